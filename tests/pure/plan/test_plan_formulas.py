"""The planner's formulas: the worked examples that are often wrong, and their limits."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from quickstep.config import CacheConfig, SchedulerConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_schema import num_parameters
from quickstep.model.sizing import (
    ElementBytes,
    activation_bytes,
    kv_bytes_per_token,
    plan_memory,
    weight_bytes,
)
from quickstep.plan.formulas import (
    Split,
    active_parameters,
    all_reduce_s,
    attention_pairs,
    balance_tokens,
    check_split,
    concurrency,
    end_to_end_s,
    experts_read,
    flops_per_token,
    layer_windows,
    rank_spec,
    read_fraction,
    seen_tokens,
    time_per_output_token_s,
    whole_blocks,
)
from quickstep.plan.models import find_model, known_models

LLAMA = find_model("llama-3-70b")


def test_a_70b_model_has_327680_bytes_of_kv_a_token_and_8192_take_2_68_gb() -> None:
    assert kv_bytes_per_token(LLAMA, 2) == 327_680
    assert kv_bytes_per_token(find_model("llama-2-70b"), 2) == 327_680
    assert 4096 * 327_680 == 1.25 * 2**30
    assert round(8192 * 327_680 / 1e9, 2) == 2.68


def test_int4_70b_with_4_sequences_of_8k_fits_one_card_of_80_gb() -> None:
    weights = weight_bytes(LLAMA, 2, "int4")
    kv = 4 * whole_blocks(8192, 16) * kv_bytes_per_token(LLAMA, 2)
    activations = activation_bytes(LLAMA, 2, 2048, 4, 8)
    assert round(kv / 1e9, 1) == 10.7
    assert 36e9 < weights < 42e9
    assert 48e9 < weights + kv + activations < 54e9
    assert 60e9 < weights + 2 * kv < 66e9  # batch 8


def test_a_70b_model_takes_140_gflop_a_token_not_tflop() -> None:
    per_token = flops_per_token(LLAMA)
    assert round(per_token / 1e9, -1) == 140
    assert round(40 * per_token / 1e12, 1) == 5.6
    # attention adds 4 x layers x width x context
    assert flops_per_token(LLAMA, 1000) - per_token == 4 * 80 * 8192 * 1000


def test_tensor_parallel_sizes_divide_the_heads() -> None:
    with pytest.raises(ConfigError, match="size of 3 does not divide the model's 64 query heads"):
        check_split(LLAMA, Split(3))
    with pytest.raises(ConfigError, match="16 does not divide the model's 8 kv heads"):
        check_split(LLAMA, Split(16))
    with pytest.raises(ConfigError, match="81 pipeline stages are more than 80 layers"):
        check_split(LLAMA, Split(1, 81))
    check_split(LLAMA, Split(8, 2, 3))
    assert Split(8, 2, 3).num_devices == 48


def test_200_ms_and_100_tokens_at_50_tokens_a_second_take_2_18_s() -> None:
    assert end_to_end_s(0.2, 1 / 50, 100) == pytest.approx(2.18)
    assert time_per_output_token_s(0.2, 2.18, 100) == pytest.approx(1 / 50)
    assert concurrency(10, 2.18) == pytest.approx(21.8)


def test_an_h100_computes_and_reads_equally_long_at_295_tokens() -> None:
    assert round(balance_tokens(990e12, 3.35e12, 2)) in (295, 296)


def test_causal_prefill_has_half_of_the_pairs() -> None:
    assert attention_pairs(4) == 10
    assert attention_pairs(1000) == sum(range(1, 1001))


def test_the_weights_of_a_device_are_the_matrices_divided() -> None:
    """One device is the model itself; several hold the same matrices, and every norm again."""
    full = weight_bytes(LLAMA, 2)
    assert weight_bytes(rank_spec(LLAMA, Split()), 2) == full
    for split in (Split(2), Split(8)):
        per_device = weight_bytes(rank_spec(LLAMA, split), 2)
        norms = (2 * 80 + 1) * 8192 * 2
        assert split.tensor * (per_device - norms) + norms == full
    staged = weight_bytes(rank_spec(LLAMA, Split(1, 4)), 2)
    assert full / 4 < staged < full / 4 * 1.05
    assert kv_bytes_per_token(rank_spec(LLAMA, Split(2, 4)), 2) * 8 == 327_680


def test_the_memory_of_one_device_is_the_engines_own_plan() -> None:
    elements = ElementBytes(2, 8)
    cache, scheduler = CacheConfig(num_blocks=100), SchedulerConfig()
    assert plan_memory(
        rank_spec(LLAMA, Split()), elements, cache, scheduler, 200 * 10**9
    ) == plan_memory(LLAMA, elements, cache, scheduler, 200 * 10**9)


def test_windows_bound_what_a_token_reads() -> None:
    gemma = find_model("gemma-3-27b")
    windows = layer_windows(gemma)
    full = dict(windows)[None]
    assert seen_tokens(windows, 10_000) == full * 10_000 + (62 - full) * 1024
    assert read_fraction(windows, 500) == 1.0
    assert 0.2 < read_fraction(windows, 10_000) < 0.3
    assert read_fraction(layer_windows(LLAMA), 10_000) == 1.0


def test_a_mixture_computes_with_the_chosen_experts_and_reads_those_that_tokens_reach() -> None:
    mixtral = find_model("mixtral-8x7b")
    assert 12.5e9 < active_parameters(mixtral) < 13e9
    assert num_parameters(mixtral) > 46e9
    assert experts_read(8, 2, 1) == pytest.approx(2)
    assert experts_read(8, 2, 1000) == pytest.approx(8)
    assert 3 < experts_read(8, 2, 2) < 4


def test_an_all_reduce_moves_twice_the_bytes_less_a_part() -> None:
    assert all_reduce_s(1e9, 1, 1e9, 1.0) == 0.0
    assert all_reduce_s(1e9, 4, 1e9) == pytest.approx(1.5)
    assert all_reduce_s(0, 4, 1e9, 1e-5) == pytest.approx(1e-5)


@pytest.mark.parametrize("name", list(known_models()))
def test_known_models_have_the_published_number_of_parameters(name: str) -> None:
    published = known_models()[name].parameters_b
    assert num_parameters(find_model(name)) / 1e9 == pytest.approx(published, rel=2e-3)


def test_a_model_is_found_by_its_hub_name_and_its_config(tmp_path) -> None:
    assert find_model("meta-llama/Llama-3.1-8B-Instruct") == find_model("llama-3.1-8b")
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64,'
        '"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}'
    )
    by_folder = find_model(str(tmp_path))
    assert find_model(str(tmp_path / "config.json")) == by_folder
    assert replace(by_folder, num_layers=3) != by_folder
    with pytest.raises(ConfigError, match=r"model lama-3-8b is neither .* did you mean llama-3-8b"):
        find_model("lama-3-8b")
