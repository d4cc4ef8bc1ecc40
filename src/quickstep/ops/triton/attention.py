"""Causal attention over the paged KV cache, for prefill and decode rows together.

A program has the query heads of one KV head for as many tokens of a row as give `_ROWS` rows, and
one split of the keys; its shape is the same in prefill and decode. Tiles of `_TILE` keys and splits
of `_SPLIT` start at absolute positions; a program adds tiles in ascending order (online softmax:
Dao et al., 2022), `_combine_kernel` adds splits in ascending order. A tile or split without a
visible key changes no bit of a query.
Keys that are not visible may hold anything, NaN included.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.reference.paged_attention import paged_attention as _reference_attention
from quickstep.ops.table import AttentionParams, PagedLayout
from quickstep.ops.tensors import AnyTensor, bytes_of_float8, head_size_of, to_torch
from quickstep.ops.triton.rounding import float8_value, rounded

__all__ = ["paged_attention"]

_TILE = 64
_SPLIT = 1024  # keys, a multiple of _TILE
_ROWS = 16  # queries times heads in a program; more where one KV head has more heads


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
    blocks,
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
    num_heads,
    num_splits,
    INT8: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Writes a split's maximum, sum of exponentials and weighted values, per token and head.

    `blocks` [programs, 3] int32: the row, its first token here, and the number of tokens.
    """
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(blocks + program * 3).to(tl.int64)
    first_token = tl.load(blocks + program * 3 + 1)
    num_tokens = tl.load(blocks + program * 3 + 2)

    lanes = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, BLOCK_D)
    is_query = lanes // HEADS_PER_KV < num_tokens
    token = (first_token + lanes // HEADS_PER_KV).to(tl.int64)
    head = kv_head * HEADS_PER_KV + lanes % HEADS_PER_KV
    q_mask = is_query[:, None] & (channels[None, :] < D)
    q_offsets = token[:, None] * q_token_stride + head[:, None] * q_head_stride
    query = tl.load(q + q_offsets + channels[None, :], mask=q_mask, other=0.0).to(tl.float32)
    position = tl.load(positions + token, mask=is_query, other=0)
    first_position = tl.load(positions + first_token)
    last_position = tl.load(positions + first_token + num_tokens - 1)

    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    start = split * SPLIT
    stop = tl.minimum(start + SPLIT, last_position + 1)
    if HAS_WINDOW:
        lowest = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        start = tl.maximum(start, lowest)
    for first in range(start, stop, TILE):
        key = first + tl.arange(0, TILE)
        is_key = key <= last_position
        block = tl.load(tables + row * table_stride + key // block_size, mask=is_key, other=0)
        slot = block.to(tl.int64) * block_size + key % block_size
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
    where = (token * num_heads + head) * num_splits + split
    tl.store(peaks + where, peak, mask=is_query)
    tl.store(sums + where, total, mask=is_query)
    tl.store(weighted + where[:, None] * D + channels[None, :], out, mask=q_mask)


@triton.jit
def _combine_kernel(
    sums,
    peaks,
    weighted,
    sinks,
    out,
    num_heads,
    num_splits,
    HAS_SINKS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One head of one token: its splits in ascending order, then its sink."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channels = tl.arange(0, BLOCK_D)
    mask = channels < D
    where = (token * num_heads + head) * num_splits
    # 0-d tensors: a loop keeps their type
    peak = tl.load(peaks + where)
    for split in range(1, num_splits):
        peak = tl.maximum(peak, tl.load(peaks + where + split))
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        peak = tl.maximum(peak, sink)
    total = tl.load(sums + where) * 0.0
    result = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for split in range(0, num_splits):
        mine = tl.load(peaks + where + split)
        factor = tl.where(mine == float("-inf"), 0.0, tl.exp(mine - peak))
        total += tl.load(sums + where + split) * factor
        part = tl.load(weighted + (where + split) * D + channels, mask=mask, other=0.0)
        result += part * factor
    if HAS_SINKS:
        total += tl.exp(sink - peak)
    result = result / total
    target = out + (token * num_heads + head) * D + channels
    tl.store(target, rounded(result, out.dtype.element_ty), mask=mask)


def _query_blocks(row_offsets: tuple[int, ...], most: int) -> list[tuple[int, int, int]]:
    """(row, first token, number of tokens) of each program, of at most `most` tokens."""
    return [
        (row, first, min(most, stop - first))
        for row, (start, stop) in enumerate(pairwise(row_offsets))
        for first in range(start, stop, most)
    ]


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
    blocks = _query_blocks(layout.row_offsets, block_m // per_kv_head)
    num_splits = triton.cdiv(max(layout.context_lens), _SPLIT)
    partial = (num_tokens, num_heads, num_splits)
    sums = torch.empty(partial, dtype=torch.float32, device=q.device)
    peaks = torch.empty_like(sums)
    weighted = torch.empty((*partial, head_size), dtype=torch.float32, device=q.device)
    block_d = max(16, triton.next_power_of_2(head_size))
    _attention_kernel[(len(blocks), num_kv_heads, num_splits)](
        q,
        keys,
        values,
        *scales,
        layout.positions,
        layout.block_tables,
        torch.tensor(blocks, dtype=torch.int32, device=q.device),
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
        num_heads,
        num_splits,
        INT8=is_int8,
        HAS_WINDOW=params.window is not None,
        HAS_SOFTCAP=params.softcap is not None,
        HEADS_PER_KV=per_kv_head,
        D=head_size,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        TILE=_TILE,
        SPLIT=_SPLIT,
    )
    _combine_kernel[(num_tokens, num_heads)](
        sums,
        peaks,
        weighted,
        None if sinks is None else to_torch(sinks),
        out,
        num_heads,
        num_splits,
        HAS_SINKS=sinks is not None,
        D=head_size,
        BLOCK_D=block_d,
    )
    return out
