"""Sampling on the device: from logits to token ids, with the tokens of
`runtime.sampling.sampler` for the same logits.

`SamplingRecords` say how each row is sampled. Nothing here waits for the device, so that all of it
can be captured in a CUDA graph and its result can be the next step's input.

A row is read in tiles of `_TILE` logits by as many programs. Whatever is added up is an integer,
and the largest of several is the same in any order, so neither tiles nor the batch change a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.triton.sampling.exact_math import gumbel, integer_probability, noise_bits
from quickstep.ops.triton.sampling.filters import filter_rows_
from quickstep.ops.triton.sampling.records import (
    CHANGED,
    COUNTS,
    FIELDS,
    FILTERED,
    FIRST_YIELDS,
    FREQUENCY,
    KEY_B,
    KEY_C,
    LOG_MIN_P,
    PRESENCE,
    REPETITION,
    SECOND_YIELDS,
    TEMPERATURE,
    SamplingRecords,
    allowed_logits,
    ban_lists_of,
    changed_logits,
    fp64_field,
    raw_logits,
)

NO_MAXIMUM = -1  # instead of a token: the raw logits hold NaN or infinity, or nothing else
NOTHING_ALLOWED = -2  # no token is left after the changes
_TILE = 1024
# four logits a thread: on an H100 80 registers, and none spilled
_IN_FP64 = {"num_warps": 8, "enable_fp_fusion": False}

_NO_ID = tl.constexpr(2**62)
_NO_MAXIMUM = tl.constexpr(NO_MAXIMUM)
_NOTHING_ALLOWED = tl.constexpr(NOTHING_ALLOWED)
_NUM_MAXIMA = 5  # of a tile: raw; changed; and without the first, the second, either list of bans
_MAXIMA = tl.constexpr(_NUM_MAXIMA)


def sample(logits: Tensor, records: SamplingRecords) -> Tensor:
    """Logits [R, V] fp32 -> token ids [E] int64, both on the device; rows are contiguous.

    Row e samples from row `LOGITS_ROW` of the logits. A negative token is NO_MAXIMUM or
    NOTHING_ALLOWED. Does not wait for the device. Which kernels run depends only on which parts of
    `records` are there and on shapes, so a captured call can be replayed with other values in the
    same tensors. Temporary tensors take 8 bytes a logit for rows with penalties or edits, 16 for
    rows with filters, 1 for rows with bans.
    """
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    num_rows, vocab_size = records.rows.shape[0], logits.shape[1]
    num_tiles = triton.cdiv(vocab_size, _TILE)
    tile_block = triton.next_power_of_2(num_tiles)
    grid = (num_rows, num_tiles)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    rows, masks = records.rows, records.masks
    # no row reads an empty tensor; one variant of a kernel is compiled, whatever is there
    sources = (
        _changed(logits, records),
        empty(0, dtype=torch.int64) if masks is None else masks,
        _bans(logits, records),
    )
    sizes = (vocab_size, logits.stride(0))
    tile_maxima = empty(num_rows, num_tiles, _NUM_MAXIMA, dtype=torch.float64)
    _peak_kernel[grid](logits, *sources, rows, tile_maxima, *sizes, TILE=_TILE)
    peaks = empty(num_rows, dtype=torch.float64)
    states = empty(num_rows, 2, dtype=torch.int64)
    _row_kernel[(num_rows,)](rows, tile_maxima, peaks, states, num_tiles, BLOCK=tile_block)
    context = (logits, *sources, rows, peaks, states)
    filtered = empty(records.num_filtered, vocab_size, dtype=torch.float64)
    if records.num_filtered:
        weights = empty(records.num_filtered, vocab_size, dtype=torch.int64)
        _scale_kernel[grid](*context, filtered, weights, *sizes, TILE=_TILE, **_IN_FP64)
        filter_rows_(filtered, weights, rows)
    tile_values = empty(num_rows, num_tiles, dtype=torch.float64)
    tile_ids = empty(num_rows, num_tiles, dtype=torch.int64)
    _noise_kernel[grid](*context, filtered, tile_values, tile_ids, *sizes, TILE=_TILE, **_IN_FP64)
    token_ids = empty(num_rows, dtype=torch.int64)
    _winner_kernel[(num_rows,)](
        tile_values, tile_ids, states, token_ids, num_tiles, BLOCK=tile_block
    )
    return token_ids


def _changed(logits: Tensor, records: SamplingRecords) -> Tensor:
    """The logits in fp64 after penalties and edits, [num_changed * V]."""
    vocab_size, counts = logits.shape[1], records.counts
    size = records.num_changed * vocab_size
    changed = torch.empty(size, dtype=torch.float64, device=logits.device)
    if not records.num_changed:
        return changed
    if counts is None:
        counts = torch.empty(0, dtype=torch.int32, device=logits.device)
    _penalize_kernel[(records.rows.shape[0], triton.cdiv(vocab_size, _TILE))](
        logits,
        records.rows,
        counts,
        changed,
        vocab_size,
        logits.stride(0),
        TILE=_TILE,
        enable_fp_fusion=False,
    )
    if (sets := records.set_edits) is not None:
        changed.index_copy_(0, sets.places, sets.values)
    for edits in records.added_edits:
        changed.index_add_(0, edits.places, edits.values)
    return changed


def _bans(logits: Tensor, records: SamplingRecords) -> Tensor:
    """The lists of bans of each token, [num_banned * V] int8."""
    size = records.num_banned * logits.shape[1]
    bans = torch.zeros(size, dtype=torch.int8, device=logits.device)
    if records.ban_places is not None and records.ban_lists is not None:
        bans.index_add_(0, records.ban_places, records.ban_lists)
    return bans


@triton.jit
def _penalize_kernel(
    logits,
    rows,
    counts,
    changed,
    vocab_size,
    logits_stride,
    TILE: tl.constexpr,
):
    """A tile of a row's logits in fp64, after the penalties."""
    ids = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    fields = rows + tl.program_id(0).to(tl.int64) * FIELDS
    place = tl.load(fields + CHANGED)
    if place >= 0:
        x = raw_logits(logits, fields, ids, inside, logits_stride)
        counts_row = tl.load(fields + COUNTS)
        has_counts = inside & (counts_row >= 0)
        code = tl.load(counts + counts_row * vocab_size + ids, mask=has_counts, other=0)
        factor = tl.where(code > 0, fp64_field(fields, REPETITION), 1.0)
        x = tl.where(x < 0.0, x * factor, x / factor)
        count = (code >> 1).to(tl.float64)
        amount = fp64_field(fields, PRESENCE) + fp64_field(fields, FREQUENCY) * count
        x = tl.where(count > 0.0, x - amount, x)
        tl.store(changed + place * vocab_size + ids, x, mask=inside)


@triton.jit
def _peak_kernel(
    logits,
    changed,
    masks,
    bans,
    rows,
    tile_maxima,
    vocab_size,
    logits_stride,
    TILE: tl.constexpr,
):
    """The largest values of a tile; +inf as the raw one if there is a NaN."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    fields = rows + row * FIELDS
    raw = raw_logits(logits, fields, ids, inside, logits_stride)
    raw = tl.where(raw == raw, raw, float("inf"))
    x = changed_logits(logits, changed, masks, fields, ids, inside, vocab_size, logits_stride)
    x = tl.where(x == x, x, float("inf"))
    lists = ban_lists_of(bans, fields, ids, inside, vocab_size)
    target = tile_maxima + (row * tl.num_programs(1) + tl.program_id(1)) * _MAXIMA
    lowest = -float("inf")
    tl.store(target, tl.max(raw, 0))
    tl.store(target + 1, tl.max(x, 0))
    tl.store(target + 2, tl.max(tl.where((lists & 1) == 0, x, lowest), 0))
    tl.store(target + 3, tl.max(tl.where((lists & 2) == 0, x, lowest), 0))
    tl.store(target + 4, tl.max(tl.where(lists == 0, x, lowest), 0))


@triton.jit
def _row_kernel(rows, tile_maxima, peaks, states, num_tiles, BLOCK: tl.constexpr):
    """A row's largest logit, what is wrong with the row, and which of its bans have an effect."""
    row = tl.program_id(0).to(tl.int64)
    fields = rows + row * FIELDS
    tiles = tl.arange(0, BLOCK)
    mask = tiles < num_tiles
    source = tile_maxima + (row * num_tiles + tiles) * _MAXIMA
    lowest = -float("inf")
    raw = tl.max(tl.load(source, mask=mask, other=lowest), 0)
    every = tl.max(tl.load(source + 1, mask=mask, other=lowest), 0)
    without_first = tl.max(tl.load(source + 2, mask=mask, other=lowest), 0)
    without_second = tl.max(tl.load(source + 3, mask=mask, other=lowest), 0)
    without_both = tl.max(tl.load(source + 4, mask=mask, other=lowest), 0)
    first = (tl.load(fields + FIRST_YIELDS) == 0) | (without_first > lowest)
    after_first = tl.where(first, without_first, every)
    after_both = tl.where(first, without_both, without_second)
    second = (tl.load(fields + SECOND_YIELDS) == 0) | (after_both > lowest)
    peak = tl.where(second, after_both, after_first)
    zero = tl.zeros_like(row)
    state = tl.where((peak - peak) == 0.0, zero, zero + _NOTHING_ALLOWED)
    state = tl.where((raw - raw) == 0.0, state, zero + _NO_MAXIMUM)
    tl.store(peaks + row, peak)
    tl.store(states + row * 2, state)
    tl.store(states + row * 2 + 1, tl.where(first, zero + 1, zero) + tl.where(second, 2, 0))


@triton.jit
def _scale_kernel(
    logits,
    changed,
    masks,
    bans,
    rows,
    peaks,
    states,
    scaled,
    weights,
    vocab_size,
    logits_stride,
    TILE: tl.constexpr,
):
    """A tile of (logit - largest) / temperature, -inf for banned tokens, and its probabilities, of
    a row with filters. A row that fails gets zeros, so that its filters end.
    """
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    fields = rows + row * FIELDS
    place = tl.load(fields + FILTERED)
    if place >= 0:
        x = allowed_logits(
            logits,
            changed,
            masks,
            bans,
            states,
            fields,
            row,
            ids,
            inside,
            vocab_size,
            logits_stride,
        )
        value = (x - tl.load(peaks + row)) / fp64_field(fields, TEMPERATURE)
        value = tl.where(tl.load(states + row * 2) == 0, value, 0.0)
        target = place * vocab_size + ids
        tl.store(scaled + target, value, mask=inside)
        tl.store(weights + target, integer_probability(value), mask=inside)


@triton.jit
def _noise_kernel(
    logits,
    changed,
    masks,
    bans,
    rows,
    peaks,
    states,
    filtered,
    tile_values,
    tile_ids,
    vocab_size,
    logits_stride,
    TILE: tl.constexpr,
):
    """The token of a tile whose scaled logit and noise are largest; with temperature 0, whose
    logit is. Of equal ones the first.
    """
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    fields = rows + row * FIELDS
    value = allowed_logits(
        logits, changed, masks, bans, states, fields, row, ids, inside, vocab_size, logits_stride
    )
    temperature = fp64_field(fields, TEMPERATURE)
    if temperature > 0.0:
        scaled = (value - tl.load(peaks + row)) / temperature
        kept = (scaled > -float("inf")) & (scaled >= fp64_field(fields, LOG_MIN_P))
        place = tl.load(fields + FILTERED)
        source = filtered + place * vocab_size + ids
        by_filters = tl.load(source, mask=inside & (place >= 0), other=-float("inf"))
        kept = tl.where(place < 0, kept, by_filters > -float("inf"))
        noise = gumbel(noise_bits(tl.load(fields + KEY_B), tl.load(fields + KEY_C), ids))
        value = tl.where(kept, scaled + noise, -float("inf"))
    best = tl.max(value, 0)
    target = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(tile_values + target, best)
    tl.store(tile_ids + target, tl.min(tl.where(inside & (value == best), ids, _NO_ID), 0))


@triton.jit
def _winner_kernel(tile_values, tile_ids, states, token_ids, num_tiles, BLOCK: tl.constexpr):
    """The best token of a row's tiles, of equal ones the first; or what is wrong with the row."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK)
    mask = tiles < num_tiles
    values = tl.load(tile_values + row * num_tiles + tiles, mask=mask, other=-float("inf"))
    ids = tl.load(tile_ids + row * num_tiles + tiles, mask=mask, other=_NO_ID)
    winner = tl.min(tl.where(values == tl.max(values, 0), ids, _NO_ID), 0)
    state = tl.load(states + row * 2)
    tl.store(token_ids + row, tl.where(state == 0, winner, state))
