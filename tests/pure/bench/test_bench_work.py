"""Bytes and operations of a step, against figures worked out by hand."""

import pytest

from quickstep.bench.shapes import SHAPES
from quickstep.bench.work import decode_kv_bytes, expert_fraction, prefill_flops
from quickstep.model.decoder_spec import LayerSpec
from quickstep.model.spec import parse_spec

QWEN = parse_spec(SHAPES["qwen2.5-0.5b"])
LLAMA = parse_spec(SHAPES["llama-3.2-1b"])


def test_shapes_have_the_parameters_of_their_models():
    from quickstep.model.checkpoint.tensor_schema import num_parameters

    assert num_parameters(QWEN) == 494_032_768
    assert num_parameters(LLAMA) == 1_235_814_400


def test_kv_of_one_step_is_all_tokens_of_all_rows():
    # 24 layers x K and V x 2 heads x 64 x 2 bytes = 12,288 bytes a token
    assert decode_kv_bytes(QWEN, 128, 512, 1) == 12_288 * 512
    assert decode_kv_bytes(QWEN, 128, 512, 4) == 4 * 12_288 * 512


@pytest.mark.parametrize(("spec", "seconds"), [(QWEN, 0.378), (LLAMA, 1.014)])
def test_a_prefill_of_512_takes_its_floor_at_one_teraflop(spec, seconds):
    assert prefill_flops(spec, 512) / 1e12 == pytest.approx(seconds, rel=0.01)


def test_prefill_of_one_token_is_a_product_with_every_matrix():
    # 357.8 M parameters in the layers' matrices and 136.1 M in the head, one pair of positions
    matrices = 24 * (896 * 1152 + 896 * 896 + 3 * 896 * 4864)
    head = 151_936 * 896
    assert prefill_flops(QWEN, 1) == 2 * (matrices + head) + 24 * 4 * 896


def windowed(spec, window):
    from msgspec.structs import replace

    return replace(spec, layers=tuple(replace(layer, window=window) for layer in spec.layers))


def test_a_window_bounds_what_is_read_and_computed():
    narrow = windowed(QWEN, 100)
    assert decode_kv_bytes(narrow, 128, 512, 1) == decode_kv_bytes(QWEN, 128, 100, 1)
    # 100 * 101 / 2 pairs while the window fills, then 100 each
    saved = 512 * 513 // 2 - (100 * 101 // 2 + 412 * 100)
    assert prefill_flops(QWEN, 512) - prefill_flops(narrow, 512) == 24 * 4 * 896 * saved


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def test_a_token_is_multiplied_with_the_experts_it_is_sent_to():
    spec = parse_spec(MIXTRAL)
    attention = 64 * 128 + 64 * 64
    experts = 2 * 3 * 64 * 128
    router = 8 * 64
    expected = 2 * (attention + experts + router + 100 * 64) + 4 * 64
    assert prefill_flops(spec, 1) == expected


def test_a_batch_reads_at_most_all_experts():
    spec = parse_spec(MIXTRAL)
    [layer] = spec.layers
    assert [expert_fraction(spec, layer, batch) for batch in (1, 3, 4, 9)] == [0.25, 0.75, 1, 1]
    assert expert_fraction(spec, LayerSpec(None, 0, sparse=False), 1) == 1
