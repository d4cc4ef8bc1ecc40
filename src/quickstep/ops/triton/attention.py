"""Causal attention over the paged KV cache, for prefill and decode rows together.

A program has the query heads of one KV head for as many tokens of a row as fill its tile of rows.
Tiles of keys and splits of `_SPLIT` keys start at absolute positions. The tiles of a split are
added in ascending order (online softmax: Dao et al., 2022), and then splits are in ascending order
(`_merged`): in the program itself, or, where several programs have the splits of a row, in
`_combine_kernel`, with the same operations. A tile or split without a visible key changes no bit of
a query, and is not computed.

Products of bf16 or fp16 run on matrix units with fp32 sums. Exponentials are rounded to 16 bits for
the product with the values, as its other factor is; their own sum is of fp32. Values of int8 and
e4m3 are exact in these types; the scale of an int8 key multiplies its scores, that of a value its
exponentials.

A prefill program has a tile of more rows than one of decode. The rows of both have the same bits:
a warp has 16 rows in both, uses the same matrix instruction (`compile_kernels --json` prints them),
and multiplies and adds apart (no fused multiply-adds that a compiler chooses).

Keys that are not visible may hold anything, NaN included. A score is masked. A value that is not
finite makes the sums of all rows of a program not finite, which is checked once they are complete:
then the program starts again, without such values, and NaN for the queries that see them.

Launches depend on the numbers of tokens and rows, and on the width of the block tables. Where a row
begins and how long its context is are read from memory, so that a recorded launch fits all lengths.

A draft of a tree is a row of one token whose last keys, its path, are in given slots
(`PagedLayout.tails`): only where a key is read from differs, not what is computed with it.
"""

from __future__ import annotations

import functools
import math

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.reference.paged_attention import paged_attention as _reference_attention
from quickstep.ops.table import AttentionParams, PagedLayout, RowLengths
from quickstep.ops.tensors import AnyTensor, bytes_of_float8, head_size_of, to_torch
from quickstep.ops.triton.rounding import INTERPRETED, float8_value, rounded
from quickstep.ops.triton.write_kv import has_aligned_scales, scales_of

__all__ = ["paged_attention"]

_SPLIT = (
    512  # keys, a multiple of every tile: one decode row of 8,192 keys has 16 programs per head
)
# Programs of a launch: enough for every GPU. Those without a split end at once, so that short rows
# lose little; a long row has at least `_LEAST_SPLIT_PROGRAMS` programs per KV head.
_PROGRAMS = 2048
_LEAST_SPLIT_PROGRAMS = 4
# Blocks of tokens times KV heads from which on a program has all splits of a block: enough for a
# GPU of 132 multiprocessors. Unfinished splits of a long prefill would be as much memory traffic as
# all else.
_COMPLETE_PROGRAMS = 96
_CHUNK = 128  # row offsets that a program searches at a time
_COMBINED = 8  # splits that are loaded at a time
_PARTIAL_BYTES = 256 << 20  # of unfinished splits: more KV heads take a launch of their own

_LOG2_E = tl.constexpr(math.log2(math.e))


class _Tile(msgspec.Struct, frozen=True):
    """Query rows (tokens times heads) and keys that a program computes at a time.

    `num_rows` are those of decode. Bits depend on `num_keys` and on the rows of a warp.
    """

    num_rows: int
    num_prefill_rows: int
    num_keys: int
    num_warps: int
    num_prefill_warps: int
    num_stages: int


@triton.jit
def _load_tile(cache, offsets, channels, mask, DTYPE: tl.constexpr):
    """Heads [TILE, BLOCK_D] of the cache without their scales, as factors of a product in DTYPE,
    which holds them exactly.
    """
    heads = tl.load(cache + offsets[:, None] + channels[None, :], mask=mask, other=0)
    if cache.dtype.element_ty == tl.uint8:
        heads = float8_value(heads)
    # the interpreter multiplies in fp32, and has no cast of integers to bf16
    return heads.to(tl.float32 if INTERPRETED else DTYPE)


@triton.jit
def _finite_keys(values, scales, offsets, scale_places, channels, is_key, mask, INT8: tl.constexpr):
    """[TILE], whether all values of a key are finite."""
    if INT8:
        scale = tl.load(scales + scale_places, mask=is_key, other=0.0)
        return is_key & ((scale - scale) == 0.0)
    heads = tl.load(values + offsets[:, None] + channels[None, :], mask=mask, other=0)
    if values.dtype.element_ty == tl.uint8:
        heads = float8_value(heads)
    heads = heads.to(tl.float32)
    return is_key & (tl.max(tl.where((heads - heads) == 0.0, 0, 1), 1) == 0)


@triton.jit
def _has_unusable(out):
    """1 if an element is not finite, else 0."""
    return tl.max(tl.max(tl.where((out - out) == 0.0, 0, 1), 1), 0)


@triton.jit
def _merged(peak, total, out, next_peak, next_total, next_out):
    """The splits up to one and the next split, or a sink: [M], [M], [M, BLOCK_D]."""
    higher = tl.maximum(peak, next_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    factor = tl.exp2(peak - base)
    next_factor = tl.exp2(next_peak - base)
    total = total * factor + next_total * next_factor
    out = out * factor[:, None] + next_out * next_factor[:, None]
    return higher, total, out


@triton.jit
def _with_sink(peak, total, out, sink):
    """`sink` [M] in fp32, as one more key without a value."""
    return _merged(peak, total, out, sink * _LOG2_E, total * 0.0 + 1.0, out * 0.0)


@triton.jit
def _block_of_program(row_offsets, num_rows, TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """Row, first token and number of tokens (at most TOKENS) of this program, none for some.

    Row r, from token t on, has the blocks from t // TOKENS + r on, at least as many as it needs.
    The last block is of the first program: a later block of a row has more keys.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    num_before = block * 0  # 0-d tensor: a loop keeps its type
    for first_row in range(0, num_rows, CHUNK):
        rows = first_row + tl.arange(0, CHUNK)
        begin = tl.load(row_offsets + rows, mask=rows < num_rows, other=0)
        is_before = (rows < num_rows) & (begin // TOKENS + rows <= block)
        num_before += tl.sum(is_before.to(tl.int32), 0)
    row = num_before - 1
    row_begin = tl.load(row_offsets + row)
    first_token = row_begin + (block - row_begin // TOKENS - row) * TOKENS
    num_tokens = tl.minimum(tl.load(row_offsets + row + 1) - first_token, TOKENS)
    return row, first_token, num_tokens


@triton.jit
def _attend(
    row,
    first_token,
    num_tokens,
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
    sinks,
    sums,
    peaks,
    weighted,
    result,
    factor,
    tanh_factor,
    window,
    table_stride,
    row_stride,
    head_stride,
    q_token_stride,
    q_head_stride,
    first_kv_head,
    num_heads,
    num_out_heads,
    max_splits,
    CAREFUL: tl.constexpr,
    WIDE: tl.constexpr,
    INT8: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TAILS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COMPLETE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`_attention_kernel` for tokens of a row. CAREFUL: without values that are not finite.

    Returns 1 if a sum is not finite, else 0.
    """
    Q_DTYPE: tl.constexpr = tl.float32 if WIDE else q.dtype.element_ty
    kv_head = first_kv_head + tl.program_id(1)
    lanes = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, BLOCK_D)
    is_query = lanes // HEADS_PER_KV < num_tokens
    token = (first_token + lanes // HEADS_PER_KV).to(tl.int64)
    head = kv_head * HEADS_PER_KV + lanes % HEADS_PER_KV
    q_mask = is_query[:, None] & (channels[None, :] < D)
    q_offsets = token * q_token_stride + head * q_head_stride
    query = tl.load(q + q_offsets[:, None] + channels[None, :], mask=q_mask, other=0.0).to(Q_DTYPE)
    if INTERPRETED:
        query = query.to(tl.float32)

    row_begin = tl.load(row_offsets + row)
    row_end = tl.load(row_offsets + row + 1)
    first_position = tl.load(positions + first_token).to(tl.int32)
    last_position = first_position + num_tokens - 1
    position = first_position + lanes // HEADS_PER_KV
    table = tables + row.to(tl.int64) * table_stride
    if HAS_TAILS:
        tail_offset = tl.load(tail_offsets + row)
        tail_len = tl.load(tail_offsets + row + 1) - tail_offset
        context_len = tl.load(positions + row_end - 1).to(tl.int32) + 1
        tail_begin = context_len - tail_len

    # of the block's queries: later splits have no visible key, nor have those before the window
    first_split = tl.program_id(2)
    lowest = first_split * 0
    if HAS_WINDOW:
        lowest = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        first_split += lowest // SPLIT
    num_splits = last_position // SPLIT + 1
    step = tl.num_programs(2)
    is_complete = row_end - row_begin > 1
    if COMPLETE:
        # one program has all splits
        step = tl.where(is_complete, 1, step)
        num_splits = tl.where(is_complete & (tl.program_id(2) > 0), 0, num_splits)
        all_peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        all_total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        all_out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    unusable = first_split * 0
    for split in range(first_split, num_splits, step):
        peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        stop = tl.minimum((split + 1) * SPLIT, last_position + 1)
        start = tl.maximum(split * SPLIT, lowest)
        for first in tl.range(start, stop, TILE, num_stages=1 if CAREFUL else STAGES):
            key = first + tl.arange(0, TILE)
            is_key = key <= last_position
            is_in_block = is_key
            if HAS_TAILS:
                is_in_block = is_key & (key < tail_begin)
            block = tl.load(table + key // BLOCK_SIZE, mask=is_in_block, other=0)
            slot = block * BLOCK_SIZE + key % BLOCK_SIZE
            if HAS_TAILS:
                is_in_tail = is_key & (key >= tail_begin)
                place = tail_offset + key - tail_begin
                in_tail = tl.load(tail_slots + place, mask=is_in_tail, other=0)
                slot = tl.where(is_in_tail, in_tail.to(tl.int32), slot)
            offsets = slot.to(tl.int64) * row_stride + kv_head * head_stride
            if INT8:
                # of a head of W bytes the last four are its scale
                offsets = tl.multiple_of(offsets, [4])
            scale_places = (offsets + head_stride - 4) // 4
            mask = is_key[:, None]
            if D != BLOCK_D:
                mask = mask & (channels[None, :] < D)
            k = _load_tile(keys, offsets, channels, mask, Q_DTYPE)
            is_value = is_key
            if CAREFUL:
                is_value = _finite_keys(
                    values, value_scales, offsets, scale_places, channels, is_key, mask, INT8
                )
                mask = mask & is_value[:, None]
            v = _load_tile(values, offsets, channels, mask, Q_DTYPE)

            # the scale of all scores comes later, in `factor`
            score = tl.dot(query, tl.trans(k), input_precision="ieee")
            if INT8:
                score *= tl.load(key_scales + scale_places, mask=is_key, other=0.0)[None, :]
            if HAS_SOFTCAP:
                small = tl.exp2(tl.abs(score) * tanh_factor)
                bounded = (1.0 - small) / (1.0 + small)
                score = tl.where(score >= 0, bounded, -bounded)
            is_seen_by_all = first + TILE - 1 <= first_position
            if HAS_WINDOW:
                is_seen_by_all = is_seen_by_all & (last_position - first < window)
            if CAREFUL or not is_seen_by_all:
                visible = key[None, :] <= position[:, None]
                if HAS_WINDOW:
                    visible = visible & (position[:, None] - key[None, :] < window)
                if CAREFUL:
                    score = tl.where(is_value[None, :], score, float("nan"))
                score = tl.where(visible, score, float("-inf"))
            higher = tl.maximum(peak, tl.max(score, 1) * factor)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(tl.fma(score, factor, -base[:, None]))
            rescale = tl.exp2(peak - base)
            total = total * rescale + tl.sum(p, 1)
            if INT8:
                p *= tl.load(value_scales + scale_places, mask=is_value, other=0.0)[None, :]
            p = rounded(p, Q_DTYPE)
            if INTERPRETED:
                p = p.to(tl.float32)
            out = tl.dot(p, v, out * rescale[:, None], input_precision="ieee")
            peak = higher
        if COMPLETE and is_complete:
            all_peak, all_total, all_out = _merged(all_peak, all_total, all_out, peak, total, out)
        else:
            unusable = tl.maximum(unusable, _has_unusable(out))
            index = token
            if COMPLETE:
                index = token * 0 + row
            mine = head - first_kv_head * HEADS_PER_KV
            where = (index * num_heads + mine) * max_splits + split
            tl.store(peaks + where, peak, mask=is_query)
            tl.store(sums + where, total, mask=is_query)
            tl.store(weighted + where[:, None] * D + channels[None, :], out, mask=q_mask)
    if COMPLETE and is_complete & (num_splits > 0):
        unusable = _has_unusable(all_out)
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            all_peak, all_total, all_out = _with_sink(all_peak, all_total, all_out, sink)
        all_out *= (1.0 / all_total)[:, None]
        target = result + ((token * num_out_heads + head) * D)[:, None] + channels[None, :]
        tl.store(target, rounded(all_out, result.dtype.element_ty), mask=q_mask)
    return unusable


@triton.jit(
    do_not_specialize=["table_stride", "first_kv_head", "num_heads", "num_rows", "max_splits"],
    do_not_specialize_on_alignment=["positions", "tables", "row_offsets"],
)
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
    sinks,
    sums,
    peaks,
    weighted,
    result,
    factor,
    tanh_factor,
    window,
    table_stride,
    row_stride,
    head_stride,
    q_token_stride,
    q_head_stride,
    first_kv_head,
    num_heads,
    num_out_heads,
    num_rows,
    max_splits,
    WIDE: tl.constexpr,
    INT8: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TAILS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COMPLETE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes a split's maximum, sum of exponentials and weighted values, per token and head of the
    `num_heads` from `first_kv_head` on.

    COMPLETE: for rows of several tokens, the result instead; for the others, per row and head.
    Maxima are of base-2 logarithms.
    """
    row, first_token, num_tokens = _block_of_program(
        row_offsets, num_rows, BLOCK_M // HEADS_PER_KV, CHUNK
    )
    if num_tokens <= 0:
        return
    unusable = num_tokens * 0 + 1
    for attempt in tl.static_range(2):
        if unusable > 0:
            if attempt == 1:
                # from memory again: what is kept for the unlikely case takes registers
                row, first_token, num_tokens = _block_of_program(
                    row_offsets, num_rows, BLOCK_M // HEADS_PER_KV, CHUNK
                )
            unusable = _attend(
                row,
                first_token,
                num_tokens,
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
                sinks,
                sums,
                peaks,
                weighted,
                result,
                factor,
                tanh_factor,
                window,
                table_stride,
                row_stride,
                head_stride,
                q_token_stride,
                q_head_stride,
                first_kv_head,
                num_heads,
                num_out_heads,
                max_splits,
                attempt == 1,
                WIDE,
                INT8,
                HAS_WINDOW,
                HAS_SOFTCAP,
                HAS_TAILS,
                HAS_SINKS,
                COMPLETE,
                HEADS_PER_KV,
                D,
                BLOCK_D,
                BLOCK_M,
                BLOCK_SIZE,
                TILE,
                SPLIT,
                STAGES,
            )


@triton.jit(
    do_not_specialize=["first_kv_head", "num_heads", "num_rows", "max_splits"],
    do_not_specialize_on_alignment=["positions", "row_offsets"],
)
def _combine_kernel(
    positions,
    row_offsets,
    sums,
    peaks,
    weighted,
    sinks,
    result,
    window,
    first_kv_head,
    num_heads,
    num_out_heads,
    num_rows,
    max_splits,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    COMPLETE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """The heads of a KV head of one token: splits in ascending order, then sinks. Padding is zero.

    COMPLETE: of rows of one token only.
    """
    index = tl.program_id(0).to(tl.int64)
    token = index
    if COMPLETE:
        token = tl.load(row_offsets + index).to(tl.int64)
        if tl.load(row_offsets + index + 1) != token + 1:
            return
    heads = tl.arange(0, BLOCK_H)
    channels = tl.arange(0, BLOCK_D)
    first_head = tl.program_id(1) * HEADS_PER_KV
    out_heads = first_kv_head * HEADS_PER_KV + first_head + heads
    is_head = heads < HEADS_PER_KV
    mask = is_head[:, None] & (channels[None, :] < D)
    target = result + ((token * num_out_heads + out_heads) * D)[:, None] + channels[None, :]
    if not COMPLETE and token >= tl.load(row_offsets + num_rows):
        zeros = tl.zeros((BLOCK_H, BLOCK_D), dtype=result.dtype.element_ty)
        tl.store(target, zeros, mask=mask)
        return
    position = tl.load(positions + token).to(tl.int32)
    stop = position // SPLIT + 1
    first = stop * 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0) // SPLIT
    where = (index * num_heads + first_head + heads) * max_splits
    peak = tl.full((BLOCK_H,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    out = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    for begin in range(first, stop, COMBINED):
        # without a branch, so that the loads of all are under way together
        for number in tl.static_range(COMBINED):
            split = begin + number
            is_split = split < stop
            is_part = is_head & is_split
            next_peak = tl.load(peaks + where + split, mask=is_part, other=float("-inf"))
            next_total = tl.load(sums + where + split, mask=is_part, other=0.0)
            parts = weighted + ((where + split) * D)[:, None] + channels[None, :]
            next_out = tl.load(parts, mask=mask & is_split, other=0.0)
            higher, more, merged = _merged(peak, total, out, next_peak, next_total, next_out)
            peak = tl.where(is_split, higher, peak)
            total = tl.where(is_split, more, total)
            out = tl.where(is_split, merged, out)
    if HAS_SINKS:
        sink = tl.load(sinks + out_heads, mask=is_head, other=0.0).to(tl.float32)
        peak, total, out = _with_sink(peak, total, out, sink)
    out *= (1.0 / tl.where(is_head, total, 1.0))[:, None]
    tl.store(target, rounded(out, result.dtype.element_ty), mask=mask)


def _is_wide(q: Tensor, cache: Tensor) -> bool:
    """Whether products are of fp32 factors: those of fp32 queries, of two floating types, and of
    fp16 with int8, as an exponential times a scale may be too small for fp16.
    """
    if cache.dtype == torch.int8:
        return q.dtype != torch.bfloat16
    return q.dtype == torch.float32 or (cache.dtype.itemsize > 1 and cache.dtype != q.dtype)


def _tile(q: Tensor, is_wide: bool, per_kv_head: int) -> _Tile:
    """By head size, and by the GPU, whose generation decides on instructions and memory."""
    block_d = triton.next_power_of_2(q.shape[2])
    most = triton.next_power_of_2(per_kv_head)
    if is_wide:
        rows = max(16, most)
        return _Tile(rows, rows, 32, 4, 4, 3)
    generation, has_much_memory = _generation(q.device)
    num_stages = 5 if has_much_memory and block_d <= 256 else 3
    if block_d > 128:
        rows = max(64, most)
        return _Tile(rows, rows, 32, 8, 8, num_stages)
    rows, prefill_rows = max(64, most), max(128, most)
    if generation == 10:
        # an instruction has as many rows as the tile
        prefill_rows = rows
    return _Tile(rows, prefill_rows, 64, rows // 16, prefill_rows // 16, num_stages)


def _generation(device: torch.device) -> tuple[int, bool]:
    """The major compute capability, and whether a program can have 160 KB of shared memory."""
    return _generation_of(device.index or 0) if device.type == "cuda" else (9, True)


@functools.cache
def _generation_of(index: int) -> tuple[int, bool]:
    major, minor = torch.cuda.get_device_capability(index)
    return major, (major, minor) in ((8, 0), (9, 0)) or major in (10, 11)


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
    assert params.scale > 0  # the largest product has the largest score
    num_kv_heads, head_stride = keys.shape[2], keys.shape[3]
    if not has_aligned_scales(keys):
        return _reference_attention(q, k_cache, v_cache, layout, params, sinks)
    per_kv_head = num_heads // num_kv_heads
    lengths = layout.lengths
    if lengths is None:
        lengths = RowLengths.of(layout.row_offsets, layout.tails, layout.positions.device)
    num_rows, table_width = layout.block_tables.shape
    max_splits = triton.cdiv(table_width * layout.block_size, _SPLIT)
    factor, tanh_factor = params.scale * math.log2(math.e), 0.0
    if params.softcap is not None:
        factor, tanh_factor = params.softcap * math.log2(math.e), -2.0 * factor / params.softcap
    sinks = None if sinks is None else to_torch(sinks)

    is_wide = _is_wide(q, keys)
    tile = _tile(q, is_wide, per_kv_head)
    # a recorded launch is for rows of any length, and may have padding
    is_complete = (
        layout.row_offsets != ()
        and num_tokens // (tile.num_prefill_rows // per_kv_head) * num_kv_heads
        >= _COMPLETE_PROGRAMS
    )
    block_m, num_warps = tile.num_rows, tile.num_warps
    if is_complete:
        block_m, num_warps = tile.num_prefill_rows, tile.num_prefill_warps
    num_blocks = num_tokens // (block_m // per_kv_head) + num_rows
    num_partial = num_rows if is_complete else num_tokens
    split_programs = max(_LEAST_SPLIT_PROGRAMS, _PROGRAMS // (num_blocks * num_kv_heads))
    per_kv_head_bytes = num_partial * per_kv_head * max_splits * (head_size + 2) * 4
    kv_heads_at_once = min(num_kv_heads, max(1, _PARTIAL_BYTES // per_kv_head_bytes))
    has_partial = not is_complete or num_rows > 1
    partial = (num_partial, kv_heads_at_once * per_kv_head, max_splits)
    sums = torch.empty(partial, dtype=torch.float32, device=q.device)
    peaks = torch.empty_like(sums)
    weighted = torch.empty((*partial, head_size), dtype=torch.float32, device=q.device)
    block_d = max(16, triton.next_power_of_2(head_size))
    for first in range(0, num_kv_heads, kv_heads_at_once):
        launched_kv_heads = min(kv_heads_at_once, num_kv_heads - first)
        launched_heads = launched_kv_heads * per_kv_head
        _attention_kernel[
            (
                num_blocks,
                launched_kv_heads,
                min(max_splits, split_programs) if has_partial else 1,
            )
        ](
            q,
            keys,
            values,
            scales_of(keys),
            scales_of(values),
            layout.positions,
            layout.block_tables,
            lengths.row_offsets,
            lengths.tail_offsets,
            lengths.tail_slots,
            sinks,
            sums,
            peaks,
            weighted,
            out,
            factor,
            tanh_factor,
            params.window or 0,
            layout.block_tables.stride(0),
            num_kv_heads * head_stride,
            head_stride,
            q.stride(0),
            q.stride(1),
            first,
            launched_heads,
            num_heads,
            num_rows,
            max_splits,
            WIDE=is_wide,
            INT8=keys.dtype == torch.int8,
            HAS_WINDOW=params.window is not None,
            HAS_SOFTCAP=params.softcap is not None,
            HAS_TAILS=lengths.tail_slots is not None,
            HAS_SINKS=sinks is not None,
            COMPLETE=is_complete,
            HEADS_PER_KV=per_kv_head,
            D=head_size,
            BLOCK_D=block_d,
            BLOCK_M=block_m,
            BLOCK_SIZE=layout.block_size,
            TILE=tile.num_keys,
            SPLIT=_SPLIT,
            STAGES=tile.num_stages,
            CHUNK=_CHUNK,
            num_warps=num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=False,
        )
        if has_partial:
            _combine_kernel[(num_partial, launched_kv_heads)](
                layout.positions,
                lengths.row_offsets,
                sums,
                peaks,
                weighted,
                sinks,
                out,
                params.window or 0,
                first,
                launched_heads,
                num_heads,
                num_rows,
                max_splits,
                HAS_SINKS=sinks is not None,
                HAS_WINDOW=params.window is not None,
                COMPLETE=is_complete,
                HEADS_PER_KV=per_kv_head,
                BLOCK_H=triton.next_power_of_2(per_kv_head),
                D=head_size,
                BLOCK_D=block_d,
                SPLIT=_SPLIT,
                COMBINED=_COMBINED,
                num_warps=4,
                num_stages=1,
                enable_fp_fusion=False,
            )
    return out
