"""Causal attention over the paged KV cache, for prefill and decode rows together.

A program has the query heads of one KV head for as many tokens of a row as give `_ROWS` rows, and
every n-th split of the keys; its shape is the same in prefill and decode. Tiles of `_TILE` keys and
splits of `_SPLIT` start at absolute positions; a program adds tiles in ascending order (online
softmax: Dao et al., 2022), `_combine_kernel` adds splits in ascending order. A tile or split
without a visible key changes no bit of a query, and is not computed.
Keys that are not visible may hold anything, NaN included.

Launches depend on the numbers of tokens and rows, and on the width of the block tables. Where a row
begins and how long its context is are read from memory, so that a recorded launch fits all lengths.

A draft of a tree is a row of one token whose last keys, its path, are in given slots
(`PagedLayout.tails`): only where a key is read from differs, not what is computed with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.reference.paged_attention import paged_attention as _reference_attention
from quickstep.ops.table import AttentionParams, PagedLayout, RowLengths
from quickstep.ops.tensors import AnyTensor, bytes_of_float8, head_size_of, to_torch
from quickstep.ops.triton.rounding import float8_value, rounded

__all__ = ["paged_attention"]

_TILE = 64
_SPLIT = 1024  # keys, a multiple of _TILE
_ROWS = 16  # queries times heads in a program; more where one KV head has more heads
# Programs of a launch: enough for every GPU. Those without a split end at once, so that short rows
# lose little; a long row has at least `_LEAST_SPLIT_PROGRAMS` programs per KV head.
_PROGRAMS = 2048
_LEAST_SPLIT_PROGRAMS = 4
_CHUNK = 128  # row offsets that a program searches at a time
_PARTIAL_BYTES = 256 << 20  # of unfinished splits: more KV heads take a launch of their own


@triton.jit
def _load_heads(
    cache, scales, slot, head, channels, mask, row_stride, head_stride, INT8: tl.constexpr
):
    """Heads [keys, channels] of the cache in fp32."""
    offsets = slot * row_stride + head * head_stride
    values = tl.load(cache + offsets[:, None] + channels[None, :], mask=mask, other=0.0)
    if cache.dtype.element_ty == tl.uint8:
        values = float8_value(values)
    values = values.to(tl.float32)
    if INT8:
        is_key = tl.max(mask.to(tl.int32), 1) > 0
        # of a head of W bytes the last four are its scale
        index = (offsets + head_stride - 4) // 4
        values *= tl.load(scales + index, mask=is_key, other=0.0)[:, None]
    return values


@triton.jit
def _attention_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    positions,
    tables,
    row_offsets,
    tail_offsets,
    tail_slots,
    sums,
    peaks,
    weighted,
    scale,
    softcap,
    window,
    block_size,
    table_stride,
    row_stride,
    head_stride,
    q_token_stride,
    q_head_stride,
    first_kv_head,
    num_heads,
    num_rows,
    max_splits,
    INT8: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TAILS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes a split's maximum, sum of exponentials and weighted values, per token and head of the
    `num_heads` from `first_kv_head` on.

    Row r, from token t on, has the programs from t // TOKENS + r on, at least as many as it needs.
    """
    TOKENS: tl.constexpr = BLOCK_M // HEADS_PER_KV
    program = tl.program_id(0)
    kv_head = first_kv_head + tl.program_id(1)
    num_before = program * 0  # 0-d tensor: a loop keeps its type
    for first_row in range(0, num_rows, CHUNK):
        rows = first_row + tl.arange(0, CHUNK)
        begin = tl.load(row_offsets + rows, mask=rows < num_rows, other=0)
        is_before = (rows < num_rows) & (begin // TOKENS + rows <= program)
        num_before += tl.sum(is_before.to(tl.int32), 0)
    row = num_before - 1
    row_begin = tl.load(row_offsets + row)
    first_token = row_begin + (program - row_begin // TOKENS - row) * TOKENS
    num_tokens = tl.minimum(tl.load(row_offsets + row + 1) - first_token, TOKENS)
    if num_tokens <= 0:
        return
    row = row.to(tl.int64)

    lanes = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, BLOCK_D)
    is_query = lanes // HEADS_PER_KV < num_tokens
    token = (first_token + lanes // HEADS_PER_KV).to(tl.int64)
    head = kv_head * HEADS_PER_KV + lanes % HEADS_PER_KV
    q_mask = is_query[:, None] & (channels[None, :] < D)
    q_offsets = token[:, None] * q_token_stride + head[:, None] * q_head_stride
    query = tl.load(q + q_offsets + channels[None, :], mask=q_mask, other=0.0).to(tl.float32)
    position = tl.load(positions + token, mask=is_query, other=0)
    if HAS_TAILS:
        tail_offset = tl.load(tail_offsets + row)
        tail_len = tl.load(tail_offsets + row + 1) - tail_offset
        context_len = tl.load(positions + tl.load(row_offsets + row + 1) - 1) + 1
        tail_begin = context_len - tail_len
    first_position = tl.load(positions + first_token)
    last_position = tl.load(positions + first_token + num_tokens - 1)

    # of the block's queries: later splits have no visible key, nor have those before the window
    first_split = tl.program_id(2)
    lowest = first_split * 0
    if HAS_WINDOW:
        lowest = (tl.maximum(first_position - window + 1, 0) // TILE * TILE).to(tl.int32)
        first_split += lowest // SPLIT
    num_splits = (last_position // SPLIT + 1).to(tl.int32)
    for split in range(first_split, num_splits, tl.num_programs(2)):
        peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        stop = tl.minimum((split + 1) * SPLIT, last_position + 1)
        start = tl.maximum(split * SPLIT, lowest)
        for first in range(start, stop, TILE):
            key = first + tl.arange(0, TILE)
            is_key = key <= last_position
            is_in_block = is_key
            if HAS_TAILS:
                is_in_block = is_key & (key < tail_begin)
            block = tl.load(
                tables + row * table_stride + key // block_size, mask=is_in_block, other=0
            )
            slot = block.to(tl.int64) * block_size + key % block_size
            if HAS_TAILS:
                is_in_tail = is_key & (key >= tail_begin)
                place = tail_offset + key - tail_begin
                slot = tl.where(
                    is_in_tail, tl.load(tail_slots + place, mask=is_in_tail, other=0), slot
                )
            mask = is_key[:, None] & (channels[None, :] < D)
            k = _load_heads(
                keys, key_scales, slot, kv_head, channels, mask, row_stride, head_stride, INT8
            )
            v = _load_heads(
                values, value_scales, slot, kv_head, channels, mask, row_stride, head_stride, INT8
            )
            score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                small = tl.exp(-2.0 * tl.abs(score / softcap))
                bounded = (1.0 - small) / (1.0 + small)
                score = tl.where(score >= 0, bounded, -bounded) * softcap
            visible = is_query[:, None] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible = visible & (position[:, None] - key[None, :] < window)
            score = tl.where(visible, score, float("-inf"))
            higher = tl.maximum(peak, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.where(visible, tl.exp(score - base[:, None]), 0.0)
            # a value that is not finite must not reach queries that do not see it as 0 * NaN
            finite = (v - v) == 0.0
            unusable = tl.max(tl.where(finite, 0, 1), 1) > 0
            p = tl.where(visible & unusable[None, :], float("nan"), p)
            v = tl.where(finite, v, 0.0)
            rescale = tl.where(peak == float("-inf"), 0.0, tl.exp(peak - base))
            total = total * rescale + tl.sum(p, 1)
            out = out * rescale[:, None] + tl.dot(p, v, input_precision="ieee")
            peak = higher
        mine = head - first_kv_head * HEADS_PER_KV
        where = (token * num_heads + mine) * max_splits + split
        tl.store(peaks + where, peak, mask=is_query)
        tl.store(sums + where, total, mask=is_query)
        tl.store(weighted + where[:, None] * D + channels[None, :], out, mask=q_mask)


@triton.jit
def _combine_kernel(
    positions,
    row_offsets,
    sums,
    peaks,
    weighted,
    sinks,
    out,
    window,
    first_head,
    num_heads,
    num_out_heads,
    num_rows,
    max_splits,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One head of one token: its splits in ascending order, then its sink. Padding is zero."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channels = tl.arange(0, BLOCK_D)
    mask = channels < D
    target = out + (token * num_out_heads + first_head + head) * D + channels
    if token >= tl.load(row_offsets + num_rows):
        tl.store(target, tl.zeros((BLOCK_D,), dtype=out.dtype.element_ty), mask=mask)
        return
    position = tl.load(positions + token)
    stop = (position // SPLIT + 1).to(tl.int32)
    first = stop * 0
    if HAS_WINDOW:
        first = (tl.maximum(position - window + 1, 0) // SPLIT).to(tl.int32)
    where = (token * num_heads + head) * max_splits
    # 0-d tensors: a loop keeps their type
    peak = tl.load(peaks + where + first)
    for split in range(first + 1, stop):
        peak = tl.maximum(peak, tl.load(peaks + where + split))
    if HAS_SINKS:
        sink = tl.load(sinks + first_head + head).to(tl.float32)
        peak = tl.maximum(peak, sink)
    total = tl.load(sums + where + first) * 0.0
    result = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for split in range(first, stop):
        mine = tl.load(peaks + where + split)
        factor = tl.where(mine == float("-inf"), 0.0, tl.exp(mine - peak))
        total += tl.load(sums + where + split) * factor
        part = tl.load(weighted + (where + split) * D + channels, mask=mask, other=0.0)
        result += part * factor
    if HAS_SINKS:
        total += tl.exp(sink - peak)
    result = result / total
    tl.store(target, rounded(result, out.dtype.element_ty), mask=mask)


def paged_attention(
    q: Tensor,
    k_cache: AnyTensor,
    v_cache: AnyTensor,
    layout: PagedLayout,
    params: AttentionParams,
    sinks: AnyTensor | None,
) -> Tensor:
    """Q [T, H, D], caches [B, S, K, W], sinks [H] -> [T, H, D]."""
    if q.stride(-1) != 1:
        q = q.contiguous()
    num_tokens, num_heads, head_size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    keys, values = (bytes_of_float8(to_torch(cache)) for cache in (k_cache, v_cache))
    assert keys.is_contiguous() and values.is_contiguous() and head_size_of(keys) == head_size
    num_kv_heads, head_stride = keys.shape[2], keys.shape[3]
    is_int8 = keys.dtype == torch.int8
    # the widths of int8 heads are multiples of 4 if head sizes are; others have no aligned scales
    if is_int8 and head_stride % 4:
        return _reference_attention(q, k_cache, v_cache, layout, params, sinks)
    scales = [cache.flatten().view(torch.float32) if is_int8 else cache for cache in (keys, values)]
    per_kv_head = num_heads // num_kv_heads
    block_m = max(_ROWS, triton.next_power_of_2(per_kv_head))
    lengths = layout.lengths
    if lengths is None:
        lengths = RowLengths.of(layout.row_offsets, layout.tails, layout.positions.device)
    num_rows, table_width = layout.block_tables.shape
    num_blocks = num_tokens // (block_m // per_kv_head) + num_rows
    max_splits = triton.cdiv(table_width * layout.block_size, _SPLIT)
    split_programs = max(_LEAST_SPLIT_PROGRAMS, _PROGRAMS // (num_blocks * num_kv_heads))
    per_kv_head_bytes = num_tokens * per_kv_head * max_splits * (head_size + 2) * 4
    kv_heads_at_once = min(num_kv_heads, max(1, _PARTIAL_BYTES // per_kv_head_bytes))
    partial = (num_tokens, kv_heads_at_once * per_kv_head, max_splits)
    sums = torch.empty(partial, dtype=torch.float32, device=q.device)
    peaks = torch.empty_like(sums)
    weighted = torch.empty((*partial, head_size), dtype=torch.float32, device=q.device)
    block_d = max(16, triton.next_power_of_2(head_size))
    for first in range(0, num_kv_heads, kv_heads_at_once):
        launched_kv_heads = min(kv_heads_at_once, num_kv_heads - first)
        launched_heads = launched_kv_heads * per_kv_head
        _attention_kernel[(num_blocks, launched_kv_heads, min(max_splits, split_programs))](
            q,
            keys,
            values,
            *scales,
            layout.positions,
            layout.block_tables,
            lengths.row_offsets,
            lengths.tail_offsets,
            lengths.tail_slots,
            sums,
            peaks,
            weighted,
            params.scale,
            params.softcap or 1.0,
            params.window or 0,
            layout.block_size,
            layout.block_tables.stride(0),
            num_kv_heads * head_stride,
            head_stride,
            q.stride(0),
            q.stride(1),
            first,
            launched_heads,
            num_rows,
            max_splits,
            INT8=is_int8,
            HAS_WINDOW=params.window is not None,
            HAS_SOFTCAP=params.softcap is not None,
            HAS_TAILS=lengths.tail_slots is not None,
            HEADS_PER_KV=per_kv_head,
            D=head_size,
            BLOCK_D=block_d,
            BLOCK_M=block_m,
            TILE=_TILE,
            SPLIT=_SPLIT,
            CHUNK=_CHUNK,
        )
        _combine_kernel[(num_tokens, launched_heads)](
            layout.positions,
            lengths.row_offsets,
            sums,
            peaks,
            weighted,
            None if sinks is None else to_torch(sinks),
            out,
            params.window or 0,
            first * per_kv_head,
            launched_heads,
            num_heads,
            num_rows,
            max_splits,
            HAS_SINKS=sinks is not None,
            HAS_WINDOW=params.window is not None,
            D=head_size,
            BLOCK_D=block_d,
            SPLIT=_SPLIT,
        )
    return out
