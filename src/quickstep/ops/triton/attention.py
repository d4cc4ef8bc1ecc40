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

Programs of decode read what to compute from a list of items, a block of tokens and a split each,
which one kernel makes for all layers of a step (`plan_attention`): as many programs as the GPU runs
together have one item after another. In a long prefill each has one. A token whose keys are in one
split has its result at once; `_combine_kernel` is for the others.

Launches depend on the numbers of tokens and rows, and on the width of the block tables. Where a row
begins and how long its context is are read from memory, so that a recorded launch fits all lengths.

A draft of a tree is a row of one token whose last keys, its path, are in given slots
(`PagedLayout.tails`): only where a key is read from differs, not what is computed with it.
"""

from __future__ import annotations

import functools
import math
import operator

import msgspec
import torch
import triton
import triton.language as tl
from msgspec.structs import replace
from torch import Tensor

from quickstep.ops.reference.paged_attention import paged_attention as _reference_attention
from quickstep.ops.table import AttentionParams, AttentionWork, PagedLayout, RowLengths
from quickstep.ops.tensors import AnyTensor, bytes_of_float8, head_size_of, to_torch
from quickstep.ops.triton.rounding import INTERPRETED, float8_value, rounded
from quickstep.ops.triton.write_kv import has_kernels, scales_of

# keys, a multiple of every tile: one decode row of 8,192 keys has 16 items per head
_SPLIT = 512
# Two programs of decode fit a multiprocessor of an H100: 115 KB of shared memory and 255 registers
# a thread each.
_PROGRAMS_PER_MULTIPROCESSOR = 2
# Blocks of tokens times KV heads from which on a program has all splits of a block: enough for a
# GPU of 132 multiprocessors. Unfinished splits of a long prefill would be as much memory traffic as
# all else.
_COMPLETE_PROGRAMS = 96
_COMBINED = 8  # splits that are loaded at a time
_PARTIAL_BYTES = 256 << 20  # of unfinished splits: more KV heads take a launch of their own
_FIELDS = 8  # of an item (`AttentionWork`): 32 bytes, that memory reads at once
_WORK_ROWS, _WORK_BLOCKS = 32, 16  # rows, and blocks of each, whose items are written at a time

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
def _load_tile(cache, offsets, channels, mask, DTYPE: tl.constexpr, CASTS_FLOAT8: tl.constexpr):
    """Heads [TILE, BLOCK_D] of the cache without their scales, as factors of a product in DTYPE,
    which holds them exactly.
    """
    heads = tl.load(cache + offsets[:, None] + channels[None, :], mask=mask, other=0)
    if INTERPRETED:
        # it multiplies in fp32, and has no cast of integers to bf16
        if cache.dtype.element_ty == tl.uint8:
            heads = float8_value(heads)
        return heads.to(tl.float32)
    if cache.dtype.element_ty == tl.uint8:
        if CASTS_FLOAT8:
            return heads.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(DTYPE)
        return float8_value(heads).to(DTYPE)
    return heads.to(DTYPE)


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
def _rows_at(
    rows,
    positions,
    row_offsets,
    num_rows,
    COMPLETE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Of rows [ROWS]: where they begin and end, their last position, and their numbers of blocks of
    TOKENS and of splits that the last block sees; one split if one program has them all.
    """
    begin = tl.load(row_offsets + rows, mask=rows < num_rows, other=0)
    end = tl.load(row_offsets + rows + 1, mask=rows < num_rows, other=0)
    last = tl.load(positions + end - 1, mask=end > begin, other=0).to(tl.int32)
    num_splits = last // SPLIT + 1
    if COMPLETE:
        num_splits = tl.where(end - begin > 1, 1, num_splits)
    return begin, end, last, tl.cdiv(end - begin, TOKENS), num_splits


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["positions", "row_offsets", "tail_offsets"],
)
def _work_kernel(
    positions,
    row_offsets,
    tail_offsets,
    items,
    ends,
    num_rows,
    HAS_TAILS: tl.constexpr,
    COMPLETE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Writes the items of one distance (`AttentionWork`), after those of smaller ones."""
    distance = tl.program_id(0)
    place = distance * 0  # 0-d tensors: a loop keeps their type
    num_mine = distance * 0
    for first_row in range(0, num_rows, ROWS):
        rows = first_row + tl.arange(0, ROWS)
        _, _, _, num_blocks, num_splits = _rows_at(
            rows, positions, row_offsets, num_rows, COMPLETE, TOKENS, SPLIT
        )
        place += tl.sum(num_blocks * tl.minimum(num_splits, distance), 0)
        num_mine += tl.sum(tl.where(num_splits > distance, num_blocks, 0), 0)
    tl.store(ends + distance, place + num_mine)
    for first_row in range(0, num_rows, ROWS):
        rows = first_row + tl.arange(0, ROWS)
        begin, end, last, num_blocks, num_splits = _rows_at(
            rows, positions, row_offsets, num_rows, COMPLETE, TOKENS, SPLIT
        )
        num_items = tl.where(num_splits > distance, num_blocks, 0)
        places = place + tl.cumsum(num_items, 0) - num_items
        place += tl.sum(num_items, 0)
        for first_block in range(0, tl.max(num_items, 0), BLOCKS):
            number = (first_block + tl.arange(0, BLOCKS))[None, :]
            is_item = number < num_items[:, None]
            # a later block has more keys
            token = begin[:, None] + (num_blocks[:, None] - 1 - number) * TOKENS
            num_tokens = tl.minimum(end[:, None] - token, TOKENS)
            position = last[:, None] - (end[:, None] - 1 - token)
            split = (position + num_tokens - 1) // SPLIT - distance
            if COMPLETE:
                split = tl.where((end - begin > 1)[:, None], -1, split)
            item = items + (places[:, None] + number) * FIELDS
            tl.store(item, rows[:, None] + number * 0, mask=is_item)
            tl.store(item + 1, token, mask=is_item)
            tl.store(item + 2, num_tokens, mask=is_item)
            tl.store(item + 3, position, mask=is_item)
            tl.store(item + 4, split, mask=is_item)
            if HAS_TAILS:
                is_row = rows < num_rows
                tail = tl.load(tail_offsets + rows, mask=is_row, other=0)
                tail_end = tl.load(tail_offsets + rows + 1, mask=is_row, other=0)
                tl.store(item + 5, tail[:, None] + number * 0, mask=is_item)
                tail_begin = last + 1 - (tail_end - tail)
                tl.store(item + 6, tail_begin[:, None] + number * 0, mask=is_item)


@triton.jit
def _split_sums(
    split,
    lowest,
    first_position,
    last_position,
    position,
    query,
    table,
    tail_offset,
    tail_begin,
    kv_head,
    keys,
    values,
    key_scales,
    value_scales,
    tail_slots,
    factor,
    tanh_factor,
    window,
    row_stride,
    head_stride,
    CAREFUL: tl.constexpr,
    DTYPE: tl.constexpr,
    INT8: tl.constexpr,
    CASTS_FLOAT8: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TAILS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Maxima, sums of exponentials and weighted values of the keys of a split."""
    channels = tl.arange(0, BLOCK_D)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    stop = tl.minimum((split + 1) * SPLIT, last_position + 1)
    start = tl.maximum(split * SPLIT, lowest // TILE * TILE)
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
        k = _load_tile(keys, offsets, channels, mask, DTYPE, CASTS_FLOAT8)
        is_value = is_key
        if CAREFUL:
            is_value = _finite_keys(
                values, value_scales, offsets, scale_places, channels, is_key, mask, INT8
            )
            mask = mask & is_value[:, None]
        v = _load_tile(values, offsets, channels, mask, DTYPE, CASTS_FLOAT8)

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
        p = rounded(p, DTYPE)
        if INTERPRETED:
            p = p.to(tl.float32)
        out = tl.dot(p, v, out * rescale[:, None], input_precision="ieee")
        peak = higher
    return peak, total, out


@triton.jit
def _attend(
    CAREFUL: tl.constexpr,
    item,
    kv_head,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    tail_slots,
    sinks,
    parts,
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
    num_partial,
    max_splits,
    WIDE: tl.constexpr,
    INT8: tl.constexpr,
    CASTS_FLOAT8: tl.constexpr,
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
    """An item of `_attention_kernel`. CAREFUL: without values that are not finite.

    Returns 1 if a sum is not finite, else 0.
    """
    Q_DTYPE: tl.constexpr = tl.float32 if WIDE else q.dtype.element_ty
    row = tl.load(item)
    first_token = tl.load(item + 1)
    num_tokens = tl.load(item + 2)
    first_position = tl.load(item + 3)
    split = tl.load(item + 4)
    tail_offset = row * 0
    tail_begin = row * 0
    if HAS_TAILS:
        tail_offset = tl.load(item + 5)
        tail_begin = tl.load(item + 6)
    lanes = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, BLOCK_D)
    is_query = lanes // HEADS_PER_KV < num_tokens
    token = (first_token + lanes // HEADS_PER_KV).to(tl.int64)
    head = kv_head * HEADS_PER_KV + lanes % HEADS_PER_KV
    mask = is_query[:, None] & (channels[None, :] < D)
    q_offsets = token * q_token_stride + head * q_head_stride
    query = tl.load(q + q_offsets[:, None] + channels[None, :], mask=mask, other=0.0).to(Q_DTYPE)
    if INTERPRETED:
        query = query.to(tl.float32)
    last_position = first_position + num_tokens - 1
    position = first_position + lanes // HEADS_PER_KV
    table = tables + row.to(tl.int64) * table_stride

    # the lowest key that the first token sees
    lowest = first_position * 0
    if HAS_WINDOW:
        lowest = tl.maximum(first_position - window + 1, 0)
    # whether a token sees this split and another one
    has_parts = (last_position // SPLIT > lowest // SPLIT) & (split >= lowest // SPLIT)
    begin, end = split, split + 1
    if COMPLETE:
        has_all_splits = split < 0
        has_parts = has_parts & (split >= 0)
        begin = tl.where(has_all_splits, lowest // SPLIT, begin)
        end = tl.where(has_all_splits, last_position // SPLIT + 1, end)
    all_peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    all_total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    all_out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    block = (
        lowest,
        first_position,
        last_position,
        position,
        query,
        table,
        tail_offset,
        tail_begin,
        kv_head,
        keys,
        values,
        key_scales,
        value_scales,
        tail_slots,
        factor,
        tanh_factor,
        window,
        row_stride,
        head_stride,
    )
    for number in tl.range(begin, end, num_stages=1):
        peak, total, out = _split_sums(
            number,
            *block,
            CAREFUL,
            Q_DTYPE,
            INT8,
            CASTS_FLOAT8,
            HAS_WINDOW,
            HAS_SOFTCAP,
            HAS_TAILS,
            D,
            BLOCK_D,
            BLOCK_M,
            BLOCK_SIZE,
            TILE,
            SPLIT,
            STAGES,
        )
        if has_parts:
            index = token
            if COMPLETE:
                index = token * 0 + row
            mine = head - first_kv_head * HEADS_PER_KV
            where = (index * num_heads + mine) * max_splits + number
            num_parts = (token * 0 + num_partial) * num_heads * max_splits
            peaks = parts + num_parts * D + where
            tl.store(peaks, peak, mask=is_query)
            tl.store(peaks + num_parts, total, mask=is_query)
            tl.store(parts + where[:, None] * D + channels[None, :], out, mask=mask)
        all_peak, all_total, all_out = _merged(all_peak, all_total, all_out, peak, total, out)
    unusable = _has_unusable(all_out)

    # of tokens that see this split only; from memory again: registers are few in the loop
    first_token = tl.load(item + 1)
    num_tokens = tl.load(item + 2)
    first_position = tl.load(item + 3)
    split = tl.load(item + 4)
    last_lowest = first_position * 0
    position = first_position + lanes // HEADS_PER_KV
    is_result = position // SPLIT == split
    if HAS_WINDOW:
        last_lowest = tl.maximum(first_position + num_tokens - window, 0)
        is_result = is_result & (tl.maximum(position - window + 1, 0) // SPLIT == split)
    has_results = (first_position // SPLIT <= split) & (last_lowest // SPLIT >= split)
    if COMPLETE:
        is_result = is_result | (split < 0)
        has_results = has_results | (split < 0)
    if has_results:
        is_result = is_result & (lanes // HEADS_PER_KV < num_tokens)
        token = (first_token + lanes // HEADS_PER_KV).to(tl.int64)
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            all_peak, all_total, all_out = _with_sink(all_peak, all_total, all_out, sink)
        all_out *= (1.0 / all_total)[:, None]
        target = result + ((token * num_out_heads + head) * D)[:, None] + channels[None, :]
        mask = is_result[:, None] & (channels[None, :] < D)
        tl.store(target, rounded(all_out, result.dtype.element_ty), mask=mask)
    return unusable


@triton.jit(
    do_not_specialize=[
        "table_stride",
        "first_kv_head",
        "num_heads",
        "num_partial",
        "max_splits",
        "last_distance",
    ],
    do_not_specialize_on_alignment=["tables"],
)
def _attention_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    tail_slots,
    sinks,
    items,
    ends,
    parts,
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
    num_partial,
    max_splits,
    last_distance,
    WIDE: tl.constexpr,
    INT8: tl.constexpr,
    CASTS_FLOAT8: tl.constexpr,
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
    FIELDS: tl.constexpr,
):
    """Writes the results of tokens that see one split, for the `num_heads` from `first_kv_head` on;
    of others, a split's maximum, sum of exponentials and weighted values, per token and head.

    COMPLETE: of rows of several tokens, all results; parts are per row and head.
    Maxima are of base-2 logarithms.
    """
    num_kv_heads = num_heads // HEADS_PER_KV
    stop = tl.load(ends + last_distance) * num_kv_heads
    arguments = (
        q,
        keys,
        values,
        key_scales,
        value_scales,
        tables,
        tail_slots,
        sinks,
        parts,
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
        num_partial,
        max_splits,
    )
    if COMPLETE:
        # a program each, in this order
        index = tl.program_id(0)
        if index < stop:
            item = items + index // num_kv_heads * FIELDS
            kv_head = first_kv_head + index % num_kv_heads
            if (
                _attend(
                    False,
                    item,
                    kv_head,
                    *arguments,
                    WIDE,
                    INT8,
                    CASTS_FLOAT8,
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
                > 0
            ):
                _attend(
                    True,
                    item,
                    kv_head,
                    *arguments,
                    WIDE,
                    INT8,
                    CASTS_FLOAT8,
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
    else:
        for index in tl.range(tl.program_id(0), stop, tl.num_programs(0), num_stages=1):
            item = items + index // num_kv_heads * FIELDS
            kv_head = first_kv_head + index % num_kv_heads
            if (
                _attend(
                    False,
                    item,
                    kv_head,
                    *arguments,
                    WIDE,
                    INT8,
                    CASTS_FLOAT8,
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
                > 0
            ):
                _attend(
                    True,
                    item,
                    kv_head,
                    *arguments,
                    WIDE,
                    INT8,
                    CASTS_FLOAT8,
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
    parts,
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
    """The heads of a KV head of one token that sees several splits: these in ascending order, then
    sinks. Padding is zero.

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
    if stop - first == 1:
        return
    num_parts = tl.num_programs(0).to(tl.int64) * num_heads * max_splits
    peaks = parts + num_parts * D
    sums = peaks + num_parts
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
            weighted = parts + ((where + split) * D)[:, None] + channels[None, :]
            next_out = tl.load(weighted, mask=mask & is_split, other=0.0)
            higher, more, merged = _merged(peak, total, out, next_peak, next_total, next_out)
            peak = tl.where(is_split, higher, peak)
            total = tl.where(is_split, more, total)
            out = tl.where(is_split, merged, out)
    if HAS_SINKS:
        sink = tl.load(sinks + out_heads, mask=is_head, other=0.0).to(tl.float32)
        peak, total, out = _with_sink(peak, total, out, sink)
    out *= (1.0 / tl.where(is_head, total, 1.0))[:, None]
    tl.store(target, rounded(out, result.dtype.element_ty), mask=mask)


def _is_wide(dtype: torch.dtype, cache: Tensor) -> bool:
    """Whether products are of fp32 factors: those of fp32 queries, of two floating types, and of
    fp16 with int8, as an exponential times a scale may be too small for fp16.
    """
    if cache.dtype == torch.int8:
        return dtype != torch.bfloat16
    return dtype == torch.float32 or (cache.dtype.itemsize > 1 and cache.dtype != dtype)


def _tile(
    head_size: int, per_kv_head: int, is_wide: bool, has_tails: bool, device: torch.device
) -> _Tile:
    """By head size, and by the GPU, whose generation decides on instructions and memory."""
    block_d = triton.next_power_of_2(head_size)
    most = triton.next_power_of_2(per_kv_head)
    if is_wide:
        rows = max(16, most)
        return _Tile(rows, rows, 32, 4, 4, 3)
    gpu = _gpu_of(device)
    num_stages = 3
    if gpu.has_much_memory and block_d <= 256:
        # two programs fit a multiprocessor; slots of tails are memory too
        num_stages = 4 if has_tails else 5
    if block_d > 128:
        rows = max(64, most)
        return _Tile(rows, rows, 32, 8, 8, num_stages)
    rows, prefill_rows = max(64, most), max(128, most)
    if gpu.generation == 10:
        # an instruction has as many rows as the tile
        prefill_rows = rows
    return _Tile(rows, prefill_rows, 64, rows // 16, prefill_rows // 16, num_stages)


class _GPU(msgspec.Struct, frozen=True):
    """What tiles and launches depend on.

    Attributes:
        generation: The major compute capability.
        has_much_memory: Whether a program can have 160 KB of shared memory.
        casts_float8: Whether there is an instruction for e4m3.
    """

    generation: int
    has_much_memory: bool
    casts_float8: bool
    num_multiprocessors: int


_INTERPRETED_GPU = _GPU(9, True, True, 2)


def _gpu_of(device: torch.device) -> _GPU:
    return _gpu(device.index or 0) if device.type == "cuda" else _INTERPRETED_GPU


@functools.cache
def _gpu(index: int) -> _GPU:
    major, minor = torch.cuda.get_device_capability(index)
    return _GPU(
        major,
        (major, minor) in ((8, 0), (9, 0)) or major in (10, 11),
        (major, minor) >= (8, 9),
        torch.cuda.get_device_properties(index).multi_processor_count,
    )


class _Launch(msgspec.Struct, frozen=True):
    """How a step's attention is launched: the same for layers with the same heads."""

    tile: _Tile
    is_wide: bool
    is_complete: bool
    num_rows: int
    num_warps: int
    tokens_per_item: int
    max_splits: int

    def fits(self, work: AttentionWork) -> bool:
        """Whether the work was planned for such launches."""
        planned = work.tokens_per_item, work.has_complete_rows
        return planned == (self.tokens_per_item, self.is_complete)


def _launch_of(layout: PagedLayout, dtype: torch.dtype, num_heads: int, keys: Tensor) -> _Launch:
    num_kv_heads = keys.shape[2]
    per_kv_head = num_heads // num_kv_heads
    is_wide = _is_wide(dtype, keys)
    has_tails = any(layout.tails)
    if layout.lengths is not None:
        has_tails = layout.lengths.tail_slots is not None
    tile = _tile(head_size_of(keys), per_kv_head, is_wide, has_tails, keys.device)
    num_blocks = layout.positions.shape[0] // (tile.num_prefill_rows // per_kv_head)
    # a recorded launch is for rows of any length, and may have padding
    is_complete = layout.row_offsets != () and num_blocks * num_kv_heads >= _COMPLETE_PROGRAMS
    rows, num_warps = tile.num_rows, tile.num_warps
    if is_complete:
        rows, num_warps = tile.num_prefill_rows, tile.num_prefill_warps
    max_splits = triton.cdiv(layout.block_tables.shape[1] * layout.block_size, _SPLIT)
    return _Launch(tile, is_wide, is_complete, rows, num_warps, rows // per_kv_head, max_splits)


def plan_attention(
    layout: PagedLayout, dtype: torch.dtype, num_heads: int, keys: AnyTensor
) -> PagedLayout:
    """`OpTable.plan_attention`."""
    stored = bytes_of_float8(to_torch(keys))
    if layout.positions.shape[0] == 0 or not has_kernels(keys):
        return layout
    return _with_work(layout, _launch_of(layout, dtype, num_heads, stored))


def _with_work(layout: PagedLayout, launch: _Launch) -> PagedLayout:
    """The layout with its rows' lengths on the device, and with the items of this launch."""
    lengths, device = layout.lengths, layout.positions.device
    if lengths is None:
        lengths = RowLengths.of(layout.row_offsets, layout.tails, device)
    num_rows = layout.block_tables.shape[0]
    num_tokens, of_item, splits = (
        layout.positions.shape[0],
        launch.tokens_per_item,
        launch.max_splits,
    )
    if launch.is_complete:
        num_items = sum(
            triton.cdiv(count, of_item) if count > 1 else count * triton.cdiv(context_len, _SPLIT)
            for count, context_len in zip(
                map(operator.sub, layout.row_offsets[1:], layout.row_offsets),
                layout.context_lens,
                strict=True,
            )
        )
        num_distances = splits if num_rows > 1 else 1
    else:
        num_items = min(num_tokens, num_tokens // of_item + num_rows) * splits
        num_distances = splits
    items = torch.empty((num_items, _FIELDS), dtype=torch.int32, device=device)
    ends = torch.empty(num_distances, dtype=torch.int32, device=device)
    _work_kernel[(num_distances,)](
        layout.positions,
        lengths.row_offsets,
        lengths.tail_offsets,
        items,
        ends,
        num_rows,
        HAS_TAILS=lengths.tail_slots is not None,
        COMPLETE=launch.is_complete,
        TOKENS=of_item,
        SPLIT=_SPLIT,
        FIELDS=_FIELDS,
        ROWS=_WORK_ROWS,
        BLOCKS=_WORK_BLOCKS,
        num_warps=4,
    )
    work = AttentionWork(items, ends, of_item, launch.is_complete)
    return replace(layout, lengths=replace(lengths, work=work))


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
    keys, values = (bytes_of_float8(to_torch(cache)) for cache in (k_cache, v_cache))
    assert keys.is_contiguous() and values.is_contiguous() and head_size_of(k_cache) == head_size
    assert params.scale > 0  # the largest product has the largest score
    if num_tokens == 0:
        return torch.empty_like(q)
    if params.chunk is not None or not has_kernels(k_cache):
        return _reference_attention(q, k_cache, v_cache, layout, params, sinks)
    launch = _launch_of(layout, q.dtype, num_heads, keys)
    lengths = layout.lengths
    if lengths is None or lengths.work is None or not launch.fits(lengths.work):
        lengths = _with_work(layout, launch).lengths
    assert lengths is not None and lengths.work is not None
    work, tile, max_splits = lengths.work, launch.tile, launch.max_splits
    num_kv_heads, head_stride = keys.shape[2], keys.shape[3]
    per_kv_head = num_heads // num_kv_heads
    num_rows = layout.block_tables.shape[0]
    factor, tanh_factor = params.scale * math.log2(math.e), 0.0
    if params.softcap is not None:
        factor, tanh_factor = params.softcap * math.log2(math.e), -2.0 * factor / params.softcap
    sinks = None if sinks is None else to_torch(sinks)

    last_distance = work.ends.shape[0] - 1
    if params.window is not None:
        # a window and the tokens of an item are in so many splits at most
        width = params.window + launch.tokens_per_item - 2
        last_distance = min(last_distance, width // _SPLIT + 1)
    num_partial = num_rows if launch.is_complete else num_tokens
    per_kv_head_bytes = num_partial * per_kv_head * max_splits * (head_size + 2) * 4
    kv_heads_at_once = min(num_kv_heads, max(1, _PARTIAL_BYTES // per_kv_head_bytes))
    has_parts = max_splits > 1 and (not launch.is_complete or num_rows > 1)
    num_parts = num_partial * kv_heads_at_once * per_kv_head * max_splits if has_parts else 0
    parts = torch.empty(num_parts * (head_size + 2), dtype=torch.float32, device=q.device)
    # padding, of which a recorded launch may have some, is zero
    make = torch.empty if has_parts or layout.row_offsets else torch.zeros
    out = make(q.shape, dtype=q.dtype, device=q.device)
    gpu = _gpu_of(q.device)
    most_programs = gpu.num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
    block_d = max(16, triton.next_power_of_2(head_size))
    for first in range(0, num_kv_heads, kv_heads_at_once):
        launched_kv_heads = min(kv_heads_at_once, num_kv_heads - first)
        launched_heads = launched_kv_heads * per_kv_head
        num_programs = work.items.shape[0] * launched_kv_heads
        if not launch.is_complete:
            num_programs = min(num_programs, most_programs)
        _attention_kernel[(num_programs,)](
            q,
            keys,
            values,
            scales_of(keys),
            scales_of(values),
            layout.block_tables,
            lengths.tail_slots,
            sinks,
            work.items,
            work.ends,
            parts,
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
            num_partial,
            max_splits,
            last_distance,
            WIDE=launch.is_wide,
            INT8=keys.dtype == torch.int8,
            CASTS_FLOAT8=gpu.casts_float8,
            HAS_WINDOW=params.window is not None,
            HAS_SOFTCAP=params.softcap is not None,
            HAS_TAILS=lengths.tail_slots is not None,
            HAS_SINKS=sinks is not None,
            COMPLETE=launch.is_complete,
            HEADS_PER_KV=per_kv_head,
            D=head_size,
            BLOCK_D=block_d,
            BLOCK_M=launch.num_rows,
            BLOCK_SIZE=layout.block_size,
            TILE=tile.num_keys,
            SPLIT=_SPLIT,
            STAGES=tile.num_stages,
            FIELDS=_FIELDS,
            num_warps=launch.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=False,
        )
        if has_parts:
            _combine_kernel[(num_partial, launched_kv_heads)](
                layout.positions,
                lengths.row_offsets,
                parts,
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
                COMPLETE=launch.is_complete,
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
