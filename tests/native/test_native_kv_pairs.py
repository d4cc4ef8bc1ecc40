"""Keys and values in pairs have the bits of those in rows, at every level and in the reference."""

from __future__ import annotations

import functools
from itertools import accumulate

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from op_checks.attention_cases import DTYPES, make_layout
from quickstep.errors import EngineError
from quickstep.model.decoder_spec import KVSize, kv_groups
from quickstep.model.interface import KVLayout
from quickstep.ops.kv_pairs import (
    CacheSizes,
    fits_pairs,
    in_pairs,
    keys_at,
    pair_shapes,
    set_keys,
    set_values,
    sizes_of_keys,
    values_at,
)
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import AttentionParams, KVCache, OpTable, PagedLayout
from quickstep.ops.tensors import CPU
from quickstep.runtime.cache.kv_cache import allocate_kv, kv_bytes
from quickstep.runtime.cache.opening import open_block_bytes

LEVELS = native_status().levels
TABLES = (*LEVELS, "reference")
ROWS = ((0, 1), (36, 1), (0, 37), (700, 1), (509, 9), (255, 2), (1100, 1), (640, 3))
# (H, K, D), S
SIZES = (
    ((14, 2, 64), 16),
    ((4, 4, 2), 16),
    ((3, 1, 24), 48),
    ((6, 2, 80), 32),
    ((4, 2, 16), 16),
    ((2, 1, 320), 16),
    ((1, 1, 64), 16),
    ((6, 1, 128), 32),
    ((8, 2, 256), 16),
)
PARAMS = {
    "complete": AttentionParams(0.2),
    "window": AttentionParams(0.2, window=53),
    "chunk": AttentionParams(0.2, chunk=40),
    "softcap": AttentionParams(0.2, softcap=5.0),
}


@functools.cache
def table(name: str, num_threads: int = 2) -> OpTable:
    """Kept: an op does not keep the threads of its table."""
    ops = reference_ops() if name == "reference" else load_native(num_threads, name)
    assert ops is not None
    return ops


def pairs_of(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B, S, K, D] in pairs, by the definition: nothing of the code under test."""
    blocks, positions, heads, elements = keys.shape
    pairs = keys.view(blocks, positions, heads, elements // 2, 2).permute(0, 2, 3, 1, 4)
    twos = values.view(blocks, positions // 2, 2, heads, elements).permute(0, 3, 1, 4, 2)
    return pairs.contiguous(), twos.contiguous()


def caches(heads: tuple[int, int, int], block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values in rows for ROWS, and block tables; NaN wherever no row has a position."""
    draws = torch.Generator().manual_seed(heads[2])
    lengths = [-(-(start + count) // block_size) for start, count in ROWS]
    num_blocks = sum(lengths) + 2
    order = (torch.randperm(num_blocks - 1, generator=draws) + 1).to(torch.int32)
    tables = torch.zeros(len(ROWS), max(lengths), dtype=torch.int32)
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for row, blocks in enumerate(torch.split(order[: sum(lengths)], lengths)):
        tables[row, : len(blocks)] = blocks
        positions = torch.arange(sum(ROWS[row]))
        used[blocks[positions // block_size].long(), positions % block_size] = True
    shape = (num_blocks, block_size, *heads[1:])
    held = [torch.randn(shape, generator=draws).bfloat16() for _ in range(2)]
    for cache in held:
        cache[~used] = torch.nan
    return held[0], held[1], tables


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("heads", "block_size"), SIZES)
def test_attention_over_pairs_has_the_bits_of_attention_over_rows(
    heads: tuple[int, int, int], block_size: int, name: str
) -> None:
    keys, values, tables = caches(heads, block_size)
    paired = pairs_of(keys, values)
    layout = make_layout(ROWS, tables, block_size)
    draws = torch.Generator().manual_seed(1)
    num_tokens = sum(count for _, count in ROWS)
    queries = torch.randn(num_tokens, heads[0], heads[2], generator=draws)
    for dtype in DTYPES if name != "reference" else (torch.bfloat16,):
        q = queries.to(dtype)
        for title, params in PARAMS.items():
            expected = table(name).paged_attention(q, keys, values, layout, params, None)
            assert not expected.isnan().any()
            for num_threads in (1, 2):
                ops = table(name, num_threads)
                found = ops.paged_attention(q, *paired, layout, params, None)
                assert torch.equal(found, expected), (title, dtype, num_threads)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("context_len", [5, 33, 700, 704, 706, 2100])
def test_one_long_row_has_the_same_bits_with_its_last_positions_at_other_slots(
    context_len: int, name: str
) -> None:
    heads, block_size, length = (14, 2, 64), 16, 5
    draws = torch.Generator().manual_seed(context_len)
    num_blocks = -(-context_len // block_size)
    shape = (num_blocks + 3, block_size, *heads[1:])
    keys, values = (torch.randn(shape, generator=draws).bfloat16() for _ in range(2))
    blocks = torch.randperm(num_blocks, generator=draws).to(torch.int32).view(1, -1)
    layout = make_layout(((context_len - 1, 1),), blocks, block_size)
    q = torch.randn(1, heads[0], heads[2], generator=draws).bfloat16()
    at = torch.arange(context_len - length, context_len)
    slots = blocks[0, at // block_size].long() * block_size + at % block_size
    # odd and even places, in no order
    tail = tuple(num_blocks * block_size + place for place in (7, 2, 30, 11, 16))
    expected = table(name).paged_attention(q, keys, values, layout, PARAMS["complete"], None)
    for cache in (keys, values):
        flat = cache.view(-1, *heads[1:])
        flat[list(tail)] = flat[slots]
        flat[slots] = torch.nan
    moved = replace(layout, tails=(tail,))
    for num_threads in (1, 2):
        ops = table(name, num_threads)
        for held in ((keys, values), pairs_of(keys, values)):
            found = ops.paged_attention(q, *held, moved, PARAMS["complete"], None)
            assert torch.equal(found, expected), num_threads


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("heads", "block_size"), SIZES)
def test_written_and_moved_pairs_are_the_written_and_moved_rows(
    heads: tuple[int, int, int], block_size: int, name: str
) -> None:
    draws = torch.Generator().manual_seed(2)
    shape = (4, block_size, *heads[1:])
    slots = torch.randperm(4 * block_size, generator=draws)[: 2 * block_size + 5]
    moves = [(9, 3), (2 * block_size + 1, 4), (3, 2), (5, 5)]
    for dtype in DTYPES:
        keys, values = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))
        paired = pairs_of(keys, values)
        k, v = (torch.randn(len(slots), *heads[1:], generator=draws).to(dtype) for _ in range(2))
        ops = table(name)
        for held in ((keys, values), paired):
            ops.write_kv(k, v, *held, slots)
        for found, wanted in zip(paired, pairs_of(keys, values), strict=True):
            assert torch.equal(found, wanted), dtype
        for held in ((keys, values), paired):
            ops.move_kv(KVCache((held[0],), (held[1],)), moves)
        for found, wanted in zip(paired, pairs_of(keys, values), strict=True):
            assert torch.equal(found, wanted), dtype
    if name != "reference":
        with pytest.raises(EngineError):
            ops.write_kv(k[:1], v[:1], *paired, torch.tensor([4 * block_size]))
        with pytest.raises(EngineError):
            ops.move_kv(KVCache((paired[0],), (paired[1],)), [(0, 4 * block_size)])


@pytest.mark.parametrize(("heads", "block_size"), SIZES)
def test_what_is_stored_at_slots_is_read_there(
    heads: tuple[int, int, int], block_size: int
) -> None:
    sizes = CacheSizes(3, block_size, *heads[1:])
    keys, values = (torch.zeros(shape) for shape in pair_shapes(sizes))
    assert in_pairs(keys) and in_pairs(values) and sizes_of_keys(keys) == sizes
    slots = torch.randperm(3 * block_size).view(3, -1)
    k, v = (torch.randn(*slots.shape, *heads[1:]) for _ in range(2))
    set_keys(keys, slots, k)
    set_values(values, slots, v)
    assert torch.equal(keys_at(keys, slots), k) and torch.equal(values_at(values, slots), v)


def test_a_cache_is_in_pairs_where_kernels_read_them_and_its_sizes_allow_it() -> None:
    assert table(LEVELS[0]).kv_in_pairs and not reference_ops().kv_in_pairs
    sizes = [KVSize(2, 64), KVSize(1, 9), KVSize(1, 64, has_values=False)]
    groups = kv_groups(sizes)

    def shapes(block_size: int, dtype: torch.dtype = torch.bfloat16) -> list[bool]:
        layout = KVLayout(groups, dtype, in_pairs=True)
        kv = allocate_kv(layout, 3, block_size, CPU)
        assert sum(tensor.nbytes for tensor in kv.tensors) == kv_bytes(layout, 3, block_size)
        assert open_block_bytes(kv).num_bytes == layout.bytes_per_token * block_size
        return [in_pairs(keys) for keys in kv.keys]

    assert shapes(32) == [True, False, False]
    assert shapes(8) == shapes(24) == [False] * 3
    assert shapes(16, torch.float32) == shapes(16, torch.float16) == [False] * 3
    assert not fits_pairs(torch.bfloat16, 16, 600)


def test_blocks_in_pairs_and_in_rows_have_other_fingerprints() -> None:
    layout = KVLayout(kv_groups([KVSize(2, 64)]), torch.bfloat16)
    found = {
        open_block_bytes(allocate_kv(replace(layout, in_pairs=in_pairs), 3, 16, CPU)).fingerprint(
            "model"
        )
        for in_pairs in (False, True)
    }
    assert len(found) == 2


def test_rows_that_share_blocks_have_the_bits_of_each_by_itself() -> None:
    draws = torch.Generator().manual_seed(3)
    shape = (80, 16, 2, 64)
    paired = pairs_of(*(torch.randn(shape, generator=draws).bfloat16() for _ in range(2)))
    shared = list(range(64))
    blocks = torch.tensor([[*shared, 64 + row] for row in range(4)], dtype=torch.int32)
    lengths = (1030, 1026, 1040, 1025)
    q = torch.randn(4, 14, 64, generator=draws).bfloat16()

    def layout(rows: range) -> PagedLayout:
        return PagedLayout(
            positions=torch.zeros(len(rows), dtype=torch.int64),
            slot_mapping=torch.zeros(len(rows), dtype=torch.int64),
            row_offsets=tuple(accumulate([1] * len(rows), initial=0)),
            context_lens=tuple(lengths[row] for row in rows),
            block_tables=blocks[list(rows)],
            block_size=16,
        )

    for level in LEVELS:
        ops = table(level)
        together = ops.paged_attention(q, *paired, layout(range(4)), PARAMS["complete"], None)
        for row in range(4):
            one = layout(range(row, row + 1))
            found = ops.paged_attention(q[row : row + 1], *paired, one, PARAMS["complete"], None)
            assert torch.equal(found[0], together[row]), level
