"""Rows that share their first blocks go through these together: no bit shows it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import AttentionParams, OpTable, PagedLayout

LEVELS = native_status().levels
HEAD_SIZE, KV_HEADS, BLOCK = 16, 2, 32
PARAMS = AttentionParams(scale=HEAD_SIZE**-0.5)


def native(level: str) -> OpTable:
    ops = load_native(2, level)
    assert ops is not None
    return ops


def caches(num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    shape = (num_blocks, BLOCK, KV_HEADS, HEAD_SIZE)
    if dtype != torch.int8:
        return (
            torch.randn(shape, generator=draws).to(dtype),
            torch.randn(shape, generator=draws).to(dtype),
        )
    scales = torch.full((*shape[:3], 1), 0.02).view(torch.int8)
    found = [
        torch.cat((torch.randint(-127, 128, shape, generator=draws, dtype=torch.int8), scales), -1)
        for _ in range(2)
    ]
    return found[0], found[1]


def layout_of(rows: list[tuple[list[int], int, int]]) -> PagedLayout:
    """Of rows of (blocks, tokens of the sequence, tokens of the step)."""
    width = max(len(blocks) for blocks, _, _ in rows)
    tables = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks, _, _ in rows])
    offsets = [0]
    for _, _, num_tokens in rows:
        offsets.append(offsets[-1] + num_tokens)
    return PagedLayout(
        positions=torch.zeros(offsets[-1], dtype=torch.int64),
        slot_mapping=torch.zeros(offsets[-1], dtype=torch.int64),
        row_offsets=tuple(offsets),
        context_lens=tuple(context_len for _, context_len, _ in rows),
        block_tables=tables.to(torch.int32),
        block_size=BLOCK,
    )


def sequence(prefix: int, own: int, context_len: int) -> list[int]:
    """Blocks: `prefix` of the shared ones 1, 2, ..., then its own from `own` on."""
    num_blocks = -(-context_len // BLOCK)
    return [*range(1, prefix + 1), *range(own, own + num_blocks - prefix)]


# two splits shared and unequal ends; a row that shares one; one that shares none; two that do but
# see the second split in part; a draft's check; a prompt's chunk behind the same prefix
ROWS = [
    (sequence(32, 100, 1060), 1060, 1),
    (sequence(32, 110, 1025), 1025, 1),
    (sequence(32, 120, 1300), 1300, 1),
    (sequence(16, 140, 1060), 1060, 1),
    (sequence(0, 160, 600), 600, 1),
    (sequence(24, 180, 800), 800, 1),
    (sequence(24, 190, 790), 790, 1),
    (sequence(32, 200, 1040), 1040, 3),
    (sequence(32, 210, 1100), 1100, 2),
    (sequence(32, 220, 1100), 1100, 40),
    (sequence(32, 230, 1090), 1090, 1),
    (sequence(32, 240, 1026), 1026, 3),
]


def assert_rows_keep_their_bits(
    ops: OpTable,
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    params: AttentionParams,
    sinks: torch.Tensor | None = None,
) -> None:
    """Each of ROWS together with the others, and alone."""
    layout = layout_of(ROWS)
    together = ops.paged_attention(q, *caches, layout, params, sinks)
    for index, row in enumerate(ROWS):
        first, last = layout.row_offsets[index : index + 2]
        alone = ops.paged_attention(q[first:last], *caches, layout_of([row]), params, sinks)
        assert torch.equal(together[first:last], alone), (index, row[1:])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("heads", [2, 6, 14])
def test_a_shared_prefix_gives_the_bits_of_a_row_alone(
    level: str, dtype: torch.dtype, heads: int
) -> None:
    ops = native(level)
    keys, values = caches(300, dtype)
    activations = torch.float32 if dtype == torch.float32 else torch.bfloat16
    layout = layout_of(ROWS)
    draws = torch.Generator().manual_seed(heads)
    q = torch.randn(layout.row_offsets[-1], heads, HEAD_SIZE, generator=draws).to(activations)
    assert_rows_keep_their_bits(ops, q, (keys, values), PARAMS)
    sinks = torch.linspace(-4.0, 9.0, heads)
    assert_rows_keep_their_bits(ops, q, (keys, values), PARAMS, sinks)


@pytest.mark.parametrize("level", LEVELS)
def test_a_window_leaves_shared_rows_to_themselves(level: str) -> None:
    ops = native(level)
    keys, values = caches(300, torch.bfloat16)
    params = AttentionParams(scale=HEAD_SIZE**-0.5, window=700)
    layout = layout_of(ROWS)
    q = torch.randn(layout.row_offsets[-1], 4, HEAD_SIZE).bfloat16()
    assert_rows_keep_their_bits(ops, q, (keys, values), params)


@pytest.mark.parametrize("level", LEVELS)
def test_more_rows_than_are_grouped_at_once_keep_their_bits(level: str) -> None:
    ops = native(level)
    keys, values = caches(300, torch.bfloat16)
    rows = [(sequence(16, 40 + i % 200, 513 + i % 30), 513 + i % 30, 1) for i in range(300)]
    layout = layout_of(rows)
    q = torch.randn(300, 2, HEAD_SIZE).bfloat16()
    together = ops.paged_attention(q, keys, values, layout, PARAMS, None)
    for index in range(0, 300, 17):
        one = layout_of([rows[index]])
        alone = ops.paged_attention(q[index : index + 1], keys, values, one, PARAMS, None)
        assert torch.equal(together[index : index + 1], alone), index
