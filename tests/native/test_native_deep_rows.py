"""A row of a long context: kv heads that are read together have the bits of one at a time."""

from __future__ import annotations

import pytest
import torch

from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import AttentionParams, OpTable, PagedLayout

LEVELS = native_status().levels
HEAD_SIZE, BLOCK, CONTEXT = 16, 16, 4500
NUM_BLOCKS = -(-CONTEXT // BLOCK)
QUERIES_PER_KV_HEAD = 3


def native(level: str, num_threads: int) -> OpTable:
    ops = load_native(num_threads, level)
    assert ops is not None
    return ops


def layout_of(blocks: torch.Tensor, rows: list[tuple[int, int]]) -> PagedLayout:
    """Of rows of (tokens of the sequence, tokens of the step), all with the same blocks."""
    offsets = [0]
    for _, num_tokens in rows:
        offsets.append(offsets[-1] + num_tokens)
    return PagedLayout(
        positions=torch.zeros(offsets[-1], dtype=torch.int64),
        slot_mapping=torch.zeros(offsets[-1], dtype=torch.int64),
        row_offsets=tuple(offsets),
        context_lens=tuple(context_len for context_len, _ in rows),
        block_tables=blocks.repeat(len(rows), 1).to(torch.int32),
        block_size=BLOCK,
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_kv_heads", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("window", [None, 4200])
def test_kv_heads_of_a_deep_row_keep_their_bits(
    level: str, num_kv_heads: int, num_tokens: int, window: int | None
) -> None:
    draws = torch.Generator().manual_seed(num_kv_heads)
    shape = (NUM_BLOCKS, BLOCK, num_kv_heads, HEAD_SIZE)
    keys = torch.randn(shape, generator=draws).bfloat16()
    values = torch.randn(shape, generator=draws).bfloat16()
    num_heads = num_kv_heads * QUERIES_PER_KV_HEAD
    q = torch.randn(num_tokens, num_heads, HEAD_SIZE, generator=draws).bfloat16()
    blocks = torch.randperm(NUM_BLOCKS, generator=draws)
    layout = layout_of(blocks, [(CONTEXT, num_tokens)])
    params = AttentionParams(scale=HEAD_SIZE**-0.5, window=window)
    ops = native(level, 1)
    by_head = []  # each kv head in a cache of its own, which has one head a pass
    for head in range(num_kv_heads):
        own = slice(head, head + 1)
        of_head = slice(head * QUERIES_PER_KV_HEAD, (head + 1) * QUERIES_PER_KV_HEAD)
        k, v = keys[:, :, own].contiguous(), values[:, :, own].contiguous()
        by_head.append(ops.paged_attention(q[:, of_head].contiguous(), k, v, layout, params, None))
    expected = torch.cat(by_head, 1)
    for num_threads in (1, 2):
        ops = native(level, num_threads)
        found = ops.paged_attention(q, keys, values, layout, params, None)
        assert torch.equal(found, expected), num_threads
    # next to a chunk of a prompt, which keeps the heads of the step's rows apart
    chunk = layout_of(blocks, [(CONTEXT, num_tokens), (CONTEXT - 500, 32)])
    queries = torch.cat((q, torch.randn(32, num_heads, HEAD_SIZE, generator=draws).bfloat16()))
    ops = native(level, 2)
    found = ops.paged_attention(queries, keys, values, chunk, params, None)
    assert torch.equal(found[:num_tokens], expected)
