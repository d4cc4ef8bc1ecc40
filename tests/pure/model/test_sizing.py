"""Memory before loading: the worked examples, shrinking with a note, and the one refusal."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from quickstep.config import CacheConfig, SchedulerConfig
from quickstep.errors import ConfigError, ModelTooLarge
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.rope_spec import RopeKind, RopeSpec
from quickstep.model.sizing import (
    DEFAULT_KV_BYTES,
    GIB,
    DraftSizes,
    ElementBytes,
    MemoryPlan,
    activation_bytes,
    kv_bytes_per_token,
    plan_memory,
    weight_bytes,
)
from quickstep.model.spec import parse_spec

LLAMA_70B = parse_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
)
TINY = parse_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
    }
)
# The state of a sequence takes 274 KiB, the weights 712 KiB.
TINY_HYBRID = parse_spec(
    {
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mlp_only_layers": [0, 1],
    }
)
SCRATCH_BYTES = 56  # the reference ops'
ELEMENTS = ElementBytes(2, SCRATCH_BYTES)
CACHE = CacheConfig()
SCHEDULER = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=1024)


def plan(
    spec: ModelSpec = TINY,
    memory_bytes: int = GIB,
    cache: CacheConfig = CACHE,
    scheduler: SchedulerConfig = SCHEDULER,
) -> MemoryPlan:
    return plan_memory(spec, ELEMENTS, cache, scheduler, memory_bytes)


def test_70b_has_327680_kv_bytes_a_token_and_4096_tokens_take_a_gib_and_a_quarter() -> None:
    per_token = kv_bytes_per_token(LLAMA_70B, 2)
    assert per_token == 327_680
    assert per_token * 4096 == 1.25 * GIB
    assert round(per_token * 8192 / 1e9, 2) == 2.68


def test_70b_weights_are_70_6_billion_parameters() -> None:
    assert round(weight_bytes(LLAMA_70B, 2) / 2e9, 1) == 70.6


def test_rows_add_up_to_the_memory_given() -> None:
    made = plan()
    assert sum(row.num_bytes for row in made.rows) == GIB
    assert [row.label for row in made.rows] == ["weights", "KV cache", "activations", "spare"]
    assert made.table().count("GiB") >= 4
    assert all(row.num_bytes >= 0 for row in made.rows)


def test_a_tied_head_is_held_once() -> None:
    apart, tied = plan(), plan(replace(TINY, tied=True))
    assert apart.rows[0].num_bytes - tied.rows[0].num_bytes == 1000 * 64 * 2
    assert weight_bytes(replace(TINY, tied=True), 2) == weight_bytes(TINY, 2) - 1000 * 64 * 2


def test_a_roomy_machine_gets_what_was_requested_and_no_note() -> None:
    made = plan()
    assert made.notes == ()
    assert made.num_blocks == 4 * 1024 // 16
    assert (made.max_model_len, made.max_num_seqs) == (1024, 4)


def test_the_default_cache_is_modest_but_holds_one_longest_sequence() -> None:
    many = replace(SCHEDULER, max_num_seqs=4096)
    modest = plan(memory_bytes=200 * GIB, scheduler=many)
    block_bytes = kv_bytes_per_token(TINY, 2) * 16
    assert modest.num_blocks * block_bytes <= DEFAULT_KV_BYTES
    wide = replace(LLAMA_70B, max_model_len=32_768)
    long = replace(SCHEDULER, max_model_len=32_768)
    assert plan(wide, 200 * GIB, scheduler=long).max_model_len == 32_768


def test_context_shrinks_to_the_cache_with_a_note() -> None:
    made = plan(cache=CacheConfig(num_blocks=20))
    assert made.max_model_len == 320
    assert any("max_model_len 1024 became 320" in note for note in made.notes)


LONGROPE = RopeSpec(
    RopeKind.LONGROPE, 16, 1e4, 512, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8
)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        (LONGROPE, "short prompts lose accuracy; --max-model-len 512"),
        (RopeSpec(RopeKind.DYNAMIC, 16, 1e4, 512, factor=4.0), "dynamic NTK"),
        (replace(LONGROPE, short_factor=LONGROPE.long_factor), None),
        (replace(LONGROPE, trained_len=1024), None),
        (RopeSpec(RopeKind.DEFAULT, 16, 1e4, 512), None),
    ],
)
def test_positions_that_differ_from_transformers_are_noted(
    rope: RopeSpec, named: str | None
) -> None:
    notes = plan(replace(TINY, ropes=(rope, rope))).notes
    assert len(notes) == (named is not None)
    assert named is None or named in notes[0]


def test_requested_blocks_shrink_to_what_fits_with_a_note() -> None:
    made = plan(memory_bytes=8 * 2**20, cache=CacheConfig(num_blocks=100_000))
    assert 0 < made.num_blocks < 100_000
    assert any("KV blocks 100000 became" in note for note in made.notes)
    assert made.rows[-1].num_bytes >= 0


def test_a_byte_budget_is_honoured() -> None:
    block_bytes = kv_bytes_per_token(TINY, 2) * 16
    assert plan(cache=CacheConfig(kv_cache_bytes=70 * block_bytes + 5)).num_blocks == 70
    with pytest.raises(ConfigError, match="kv-cache-bytes"):
        plan(cache=CacheConfig(kv_cache_bytes=5))


def test_the_step_shrinks_before_the_cache_does() -> None:
    wide = replace(SCHEDULER, max_num_batched_tokens=8192)
    made = plan(memory_bytes=8 * 2**20, scheduler=wide)
    assert made.max_num_batched_tokens < 8192
    assert any("max_num_batched_tokens 8192 became" in note for note in made.notes)
    assert activation_bytes(TINY, 2, made.max_num_batched_tokens, 4, SCRATCH_BYTES) < 8 * 2**20


def test_fewer_blocks_than_sequences_shrinks_the_sequences() -> None:
    made = plan(cache=CacheConfig(num_blocks=20), scheduler=replace(SCHEDULER, max_num_seqs=64))
    assert made.max_num_seqs == 20


def test_weights_that_do_not_fit_are_refused_with_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(LLAMA_70B, 64 * GIB)
    message = str(caught.value)
    assert "131.4" in message and "64.00 GiB are available" in message


def test_a_gpu_has_no_modest_limit() -> None:
    many = replace(SCHEDULER, max_num_seqs=100_000)
    made = plan_memory(TINY, ELEMENTS, CACHE, many, 80 * GIB, default_kv_bytes=None)
    assert made.num_blocks * kv_bytes_per_token(TINY, 2) * 16 > 40 * GIB


def test_a_draft_model_has_its_weights_and_as_many_kv_blocks() -> None:
    sizes = DraftSizes(TINY, ELEMENTS)
    alone = plan()
    made = plan_memory(TINY, ELEMENTS, CACHE, SCHEDULER, GIB, drafts=[sizes])
    rows = {row.label: row.num_bytes for row in made.rows}
    assert sum(rows.values()) == GIB
    assert rows["draft weights"] == rows["weights"] == weight_bytes(TINY, 2)
    assert rows["draft KV cache"] == rows["KV cache"]
    assert made.num_blocks == alone.num_blocks
    assert (
        rows["activations"] == 2 * {row.label: row.num_bytes for row in alone.rows}["activations"]
    )


def test_positions_for_drafts_beyond_those_of_the_target_are_counted() -> None:
    sizes = DraftSizes(TINY, ELEMENTS, scratch_tokens=32)
    made = plan_memory(TINY, ELEMENTS, CACHE, SCHEDULER, GIB, drafts=[sizes])
    rows = {row.label: row.num_bytes for row in made.rows}
    assert sum(rows.values()) == GIB
    more = made.max_num_seqs * 32 * kv_bytes_per_token(TINY, 2)
    assert rows["draft KV cache"] == rows["KV cache"] + more


def test_they_leave_less_for_the_cache() -> None:
    many = replace(SCHEDULER, max_num_seqs=256)
    without, with_scratch = (
        plan_memory(
            TINY, ELEMENTS, CACHE, many, GIB // 8, None, [DraftSizes(TINY, ELEMENTS, tokens)]
        )
        for tokens in (0, 64)
    )
    assert with_scratch.num_blocks < without.num_blocks
    assert all(row.num_bytes >= 0 for row in with_scratch.rows)


def test_medusa_heads_are_weights_only() -> None:
    sizes = DraftSizes(None, replace(ELEMENTS, weights=1000))
    alone = plan()
    made = plan_memory(TINY, ELEMENTS, CACHE, SCHEDULER, GIB, drafts=[sizes])
    rows = {row.label: row.num_bytes for row in made.rows}
    assert rows.pop("draft weights") == 1000
    rows["spare"] += 1000
    assert rows == {row.label: row.num_bytes for row in alone.rows}
    assert sizes.num_parameters == 500


def test_the_sizes_of_several_drafts_are_added_up() -> None:
    drafts = [
        DraftSizes(TINY, ELEMENTS),
        DraftSizes(TINY, ELEMENTS, scratch_tokens=32),
        DraftSizes(None, replace(ELEMENTS, weights=1000)),
    ]

    def rows(*some: DraftSizes) -> dict[str, int]:
        made = plan_memory(TINY, ELEMENTS, CACHE, SCHEDULER, GIB, drafts=some)
        return {row.label: row.num_bytes for row in made.rows}

    together, each, without = rows(*drafts), [rows(draft) for draft in drafts], rows()
    assert sum(together.values()) == GIB
    assert together["KV cache"] == without["KV cache"]
    for label in ("draft weights", "draft KV cache", "activations"):
        least = without.get(label, 0)
        added = sum(one.get(label, 0) - least for one in each)
        assert together[label] == least + added


def test_a_draft_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="iB are available"):
        sizes = DraftSizes(LLAMA_70B, ELEMENTS)
        plan_memory(TINY, ELEMENTS, CACHE, SCHEDULER, 64 * GIB, drafts=[sizes])


def test_states_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        ModelTooLarge, match=r"weights 711\.95 KiB, states of sequences 548\.00 KiB"
    ):
        plan(TINY_HYBRID, 3 << 20)
    needed = 9.56 * 2**20
    few = plan(TINY_HYBRID, int(needed) + (1 << 19))
    assert few.max_num_seqs < SCHEDULER.max_num_seqs
    assert any("as the states of no more fit" in note for note in few.notes)
