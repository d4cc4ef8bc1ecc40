"""The Triton kernels, interpreted on the CPU: near float64, and the same bits in every batch.

The interpreter takes milliseconds a program, so that only small cases are checked here; all are on
a GPU (`tests/cuda`).
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton")

from op_checks.agreement import agreement
from op_checks.attention_cases import make_layout, stored_heads
from op_checks.cases import Case, bind, cases
from op_checks.invariance import same_bits, same_without_adapters
from quickstep.errors import ConfigError
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.table import AttentionParams, LoRAPart, OpTable, RowLengths
from quickstep.ops.triton import attention, lora
from quickstep.ops.weights import QuantizedWeight

CPU = torch.device("cpu")
ROW_OPS = (
    "linear",
    "lora",
    "route",
    "experts",
    "experts_lora",
    "quantized_linear",
    "quantized_rows",
    "logits",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "add_layer_norm",
    "rotary",
    "write_kv",
    "rotary_write_kv",
    "activation",
    "gated_activation",
    "gated_linear",
)
ATTENTION = ("one-key", "window-below-tile", "sinks-one-key")
SMALL = 25_000  # elements of all inputs of a case


def num_elements(value: object) -> int:
    if isinstance(value, tuple):
        return sum(map(num_elements, value))
    if isinstance(value, LoRAPart):
        return num_elements((value.a, value.b))
    value = getattr(value, "quants", value)
    return value.numel() if isinstance(value, torch.Tensor) else 0


def small_cases(op: str, dtypes: tuple[torch.dtype, ...]) -> list[Case]:
    chosen = []
    for case in cases([op], dtypes):
        assert isinstance(case, Case)
        if num_elements((case.tokens, case.fixed)) <= SMALL:
            chosen.append(case)
    assert chosen
    return chosen


@pytest.mark.parametrize("op", ROW_OPS)
def test_interpreted_results_are_near_float64(ops: OpTable, op: str) -> None:
    every = (torch.float32, torch.bfloat16, torch.float16)
    wrong = [agreement(ops, case) for case in small_cases(op, every)]
    assert [one for one in wrong if not one.ok] == []


@pytest.mark.parametrize("op", ROW_OPS)
def test_an_interpreted_token_has_the_same_bits_in_every_batch(ops: OpTable, op: str) -> None:
    several = [one for one in small_cases(op, (torch.bfloat16,)) if len(one.tokens[0]) > 2]
    chosen = min(several, key=lambda one: one.tokens[0].numel())
    run = bind(ops, chosen)
    together = run(*chosen.tokens)
    for index in (0, len(chosen.tokens[0]) - 1):
        token = slice(index, index + 1)
        alone = run(*(one[token] for one in chosen.tokens))
        assert all(same_bits(a, b[token]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_product_has_the_same_bits_in_tiles_of_16_and_of_64_tokens(
    ops: OpTable, bits: int
) -> None:
    generator = torch.Generator().manual_seed(bits)
    quants = torch.randint(0, 2**bits, (33, 96), generator=generator, dtype=torch.uint8)
    scales, zeros = (torch.rand(33, 3, generator=generator) for _ in range(2))
    weight = ops.pack_quantized(QuantizedWeight(quants, scales, zeros, bits, 32), scales[:, 0])
    x = torch.randn(17, 96, generator=generator)
    together = ops.linear(x, weight)
    for tokens in (slice(0, 1), slice(1, 17)):
        assert same_bits(ops.linear(x[tokens], weight), together[tokens])


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("op", ["experts", "experts_lora"])
def test_grouped_experts_have_the_bits_of_experts_one_by_one(ops: OpTable, op: str) -> None:
    for case in small_cases(op, (torch.bfloat16,)):
        [grouped] = bind(ops, case)(*case.tokens)
        [one_by_one] = bind(replace(ops, experts=None), case)(*case.tokens)
        assert same_bits(grouped, one_by_one), case.name


@pytest.mark.usefixtures("products_in_order")
def test_adapters_of_other_tokens_change_no_bit_of_experts(ops: OpTable) -> None:
    for case in small_cases("experts_lora", (torch.bfloat16,)):
        assert same_without_adapters(ops, case), case.name


def test_tensors_of_an_adapter_are_aligned_for_wide_loads(ops: OpTable) -> None:
    values = torch.randn(1 + 4 * 32, generator=torch.Generator().manual_seed(6)).bfloat16()
    part = LoRAPart(values[1:].view(4, 32), values[: 9 * 4].view(9, 4), 0, 1.0)
    packed = ops.pack_lora([(part,)]).data
    assert isinstance(packed, lora._Packed)
    assert not (packed.table[0, 0, :2] % 16).any()
    assert [tensor.shape for tensor in packed.tensors] == [(4, 32), (9, 8)]


def test_experts_of_different_forms_are_computed_one_by_one(ops: OpTable) -> None:
    weights = torch.ones(4, 8), torch.ones(4, 8).bfloat16()
    packed = tuple(ops.pack_linear(weight, None) for weight in weights)
    assert ops.pack_experts is not None
    assert ops.pack_experts((packed[0], packed[0]), (packed[1], packed[1])) is not None
    assert ops.pack_experts(packed, packed) is None


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_one_launch_writes_the_bits_of_rotary_and_write_kv(
    ops: OpTable, kv_dtype: torch.dtype
) -> None:
    for case in small_cases("rotary_write_kv", (torch.bfloat16,))[-4:]:
        caches = tuple(stored_heads(cache, kv_dtype) for cache in case.fixed[1:])
        narrow = replace(case, fixed=(case.fixed[0], *caches))
        fused = bind(ops, narrow)(*case.tokens)
        separate = bind(replace(ops, rotary_write_kv=None), narrow)(*case.tokens)
        for one, other in zip(fused, separate, strict=True):
            assert same_bits(one, other), case.name


def test_interpreted_attention_is_near_float64(ops: OpTable) -> None:
    chosen = [
        case
        for case in cases(["paged_attention"], (torch.bfloat16,))
        if case.name.removeprefix("paged_attention-bfloat16-").startswith(ATTENTION)
    ]
    assert len(chosen) >= len(ATTENTION)
    wrong = [agreement(ops, case) for case in chosen]
    assert [one for one in wrong if not one.ok] == []


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_interpreted_attention_has_the_same_bits_alone_and_in_chunks(
    ops: OpTable, kv_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = ((0, 5), (1030, 1), (62, 4))  # within a tile, over two splits, over two tiles
    block_size, lengths = 32, (1, 33, 3)
    tables = torch.zeros(3, max(lengths), dtype=torch.int32)
    order = torch.randperm(sum(lengths), generator=generator).int() + 1
    for row, blocks in enumerate(torch.split(order, lengths)):
        tables[row, : len(blocks)] = blocks
    shape = (sum(lengths) + 1, block_size, 2, 16)
    keys, values = (stored_heads(normal(*shape), kv_dtype) for _ in range(2))
    q = normal(10, 6, 16).bfloat16()
    params = AttentionParams(0.25)

    def attend(picked: list[int], rows: tuple[tuple[int, int], ...], q: torch.Tensor):
        layout = make_layout(rows, tables[picked], block_size)
        return ops.paged_attention(q, keys, values, layout, params, None)

    together = attend([0, 1, 2], rows, q)
    starts = (0, 5, 6, 10)
    for row, span in enumerate(rows):
        mine = slice(starts[row], starts[row + 1])
        assert same_bits(attend([row], (span,), q[mine]), together[mine])
    for index in range(4):
        token = slice(6 + index, 7 + index)
        assert same_bits(attend([2], ((62 + index, 1),), q[token]), together[token])


def test_interpreted_attention_reads_lengths_from_memory(
    ops: OpTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without tokens, padding tokens and wide block tables change no bit, nor do the numbers
    of programs that share the work, and of heads in a launch.
    """
    generator = torch.Generator().manual_seed(4)
    rows = ((2100, 2), (0, 3), (70, 1))  # the first over three splits
    lengths = (66, 1, 3)
    order = torch.randperm(sum(lengths), generator=generator).int()
    tables = torch.full((130, 100), 9_999, dtype=torch.int32)  # more rows than are searched at once
    for row, blocks in enumerate(torch.split(order, lengths)):
        tables[row, : len(blocks)] = blocks
    keys, values = (torch.randn(70, 32, 2, 16, generator=generator) for _ in range(2))
    q = torch.randn(9, 2, 16, generator=generator)
    for window in (None, 1500):
        params = AttentionParams(0.25, window)
        plain = make_layout(rows, tables[:3], 32)
        expected = ops.paged_attention(q[:6], keys, values, plain, params, None)
        offsets = torch.tensor([0, 2, 5, *[6] * 128], dtype=torch.int32)
        padded = msgspec.structs.replace(
            plain,
            positions=torch.nn.functional.pad(plain.positions, (0, 3)),
            row_offsets=(),
            context_lens=(),
            block_tables=tables,
            lengths=RowLengths(offsets),
        )
        with monkeypatch.context() as patched:
            patched.setattr(attention, "_PROGRAMS_PER_MULTIPROCESSOR", 1)
            patched.setattr(attention, "_PARTIAL_BYTES", 1)
            found = ops.paged_attention(q, keys, values, padded, params, None)
        assert same_bits(found[:6], expected)
        assert not found[6:].any(), "padding is zero"


@pytest.mark.parametrize("is_complete", [False, True])
def test_the_work_of_attention_is_planned_once_for_all_layers(
    ops: OpTable, monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    """Every block of tokens with every split that it sees, the last split first."""
    monkeypatch.setattr(attention, "_COMPLETE_PROGRAMS", 0 if is_complete else 1000)
    rows = ((1000, 40), (0, 70), (511, 1), *[(512 * row, 1) for row in range(40)])
    tables = torch.zeros(len(rows), 41 * 16, dtype=torch.int32)
    keys = torch.zeros(1, 32, 2, 16, dtype=torch.bfloat16)
    layout = make_layout(rows, tables, 32)
    assert ops.plan_attention is not None
    planned = ops.plan_attention(layout, torch.bfloat16, 8, keys)
    assert planned.lengths is not None and planned.lengths.work is not None
    work = planned.lengths.work
    of_item = work.tokens_per_item
    assert (of_item, work.has_complete_rows) == ((32, True) if is_complete else (16, False))
    expected = set()
    for row, ((start, count), begin) in enumerate(zip(rows, layout.row_offsets, strict=False)):
        for first in range(0, count, of_item):
            num_tokens = min(of_item, count - first)
            splits = range((start + first + num_tokens - 1) // 512 + 1)
            for split in (-1,) if is_complete and count > 1 else splits:
                expected.add((row, begin + first, num_tokens, start + first, split))
    num_items = int(work.ends[-1])
    found = [tuple(item[:5]) for item in work.items[:num_items].tolist()]
    kept = [one for one in found if one[4] >= 0 or is_complete]
    assert len(kept) == len(expected) and set(kept) == expected
    distances = [0 if last < 0 else (at + n - 1) // 512 - last for _, _, n, at, last in kept]
    assert distances == sorted(distances)
    if is_complete:
        assert [distances.count(0), len(distances)] == [int(work.ends[0]), work.items.shape[0]]


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_interpreted_attention_has_the_same_bits_in_prefill_tiles_and_for_every_number_of_tokens(
    ops: OpTable, monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype
) -> None:
    """A program with all splits of a row, in tiles of more rows, has the bits of programs with one
    split each, also next to a value that is not finite and only later tokens see.
    """
    generator = torch.Generator().manual_seed(5)
    # 4 heads per KV head: 16 tokens in a decode tile, 32 in one of prefill
    count, start, block_size = 17, 505, 32
    tables = torch.arange(17, dtype=torch.int32)[None]
    keys, values = (torch.randn(17, block_size, 1, 16, generator=generator) for _ in range(2))
    values.view(-1, 16)[start + count - 1, 3] = torch.inf
    keys, values = (stored_heads(one, kv_dtype) for one in (keys, values))
    q = torch.randn(count, 4, 16, generator=generator).bfloat16()
    sinks = torch.randn(4, generator=generator)

    def attend(first: int, stop: int) -> torch.Tensor:
        layout = make_layout(((start + first, stop - first),), tables, block_size)
        return ops.paged_attention(
            q[first:stop], keys, values, layout, AttentionParams(0.25), sinks
        )

    split = attend(0, count)
    assert split[:-1].isfinite().all() and split[-1].isnan().all()
    for num_tokens in (1, 2, 15, 16):
        assert same_bits(attend(0, num_tokens), split[:num_tokens])
    assert same_bits(attend(count - 1, count), split[-1:])
    monkeypatch.setattr(attention, "_COMPLETE_PROGRAMS", 0)
    assert same_bits(attend(0, count), split)
    mixed = make_layout(((start, count), (start + 7, 1)), tables.expand(2, -1), block_size)
    found = ops.paged_attention(
        torch.cat((q, q[7:8])), keys, values, mixed, AttentionParams(0.25), sinks
    )
    assert same_bits(found, torch.cat((split, split[7:8])))


def test_triton_is_resolved_by_name_and_refused_where_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert resolve_ops(CPU, "triton").name == "triton"
    assert resolve_ops(CPU, "reference").name == "reference"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="Triton is not installed or does not run on cpu"):
        resolve_ops(CPU, "triton")


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_a_gated_product_has_the_bits_of_its_two_ops(ops: OpTable, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(2)
    packed = ops.pack_linear(torch.randn(2 * 40, 96, generator=generator).bfloat16(), None)
    x = torch.randn(num_tokens, 96, generator=generator).bfloat16()
    assert ops.gated_linear is not None
    for kind in ("silu", "gelu", "gelu_tanh", "clamped_swiglu"):
        apart = ops.gated_activation(ops.linear(x, packed), kind)
        assert same_bits(ops.gated_linear(x, packed, kind), apart)
