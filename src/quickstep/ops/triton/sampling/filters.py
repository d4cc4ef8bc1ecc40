"""Which tokens of a row may be sampled: top-k, typical-p, top-p, min-p and XTC, as
`runtime.sampling.filters` defines them.

Nothing is sorted. A filter keeps the first tokens in an order until their number or their
probability reaches a target, so what is searched is the last token that it keeps. Probabilities are
integers, whose sums are exact, and the last token is searched among the bits of the values by
adding up what is on one side of four of them at a time; of equal values the lower token ids come
first.

One program filters a row; its values stay in the L2 cache meanwhile. Called by
`ops.triton.sampling.sample`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.triton.sampling.exact_math import (
    exp_nonpositive,
    integer_probability,
    rounded_int64,
)
from quickstep.ops.triton.sampling.records import (
    APPLIES_XTC,
    FIELDS,
    FILTERED,
    LOG_MIN_P,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    XTC_THRESHOLD,
    fp64_field,
)

_BLOCK = 1024  # with 16 warps: 114 registers on an H100, and none spilled

_LARGEST = tl.constexpr(0x7FEFFFFFFFFFFFFF)  # the bits of the largest finite fp64
_NO_ID = tl.constexpr(2**62)
_UNIT = tl.constexpr(2.0**44)


def filter_rows_(scaled: Tensor, weights: Tensor, rows: Tensor) -> None:
    """Set what the filters remove to -inf in F rows of scaled logits [F, V] fp64, whose largest
    is 0. `weights` [F, V] int64 are their integer probabilities, and are changed too. `rows` are
    those of the `SamplingRecords`.
    """
    _filter_kernel[(rows.shape[0],)](
        scaled,
        weights,
        rows,
        scaled.shape[1],
        BLOCK=_BLOCK,
        num_warps=16,
        enable_fp_fusion=False,
    )


@triton.jit
def _block_of(
    scaled,
    weights,
    first,
    vocab_size,
    mean,
    COUNTS: tl.constexpr,
    BY_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(token ids, places in an order as keys, weights) of a block of tokens.

    A key is the bits of an fp64 distance, from the largest value or BY_MEAN from the mean. With
    COUNTS the weight of a token is 1, otherwise its probability; 0 for what was removed.
    """
    ids = first + tl.arange(0, BLOCK).to(tl.int64)
    inside = ids < vocab_size
    value = tl.load(scaled + ids, mask=inside, other=-float("inf"))
    is_left = value > -float("inf")
    weight = is_left.to(tl.int64) if COUNTS else tl.load(weights + ids, mask=is_left, other=0)
    distance = tl.abs(value - mean) if BY_MEAN else 0.0 - value
    return ids, distance.to(tl.int64, bitcast=True), weight


@triton.jit
def _total(scaled, weights, vocab_size, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the weights."""
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab_size, BLOCK):
        _, _, weight = _block_of(scaled, weights, first, vocab_size, 0.0, COUNTS, False, BLOCK)
        total += weight
    return tl.sum(total, 0)


@triton.jit
def _target(probability, total):
    """`probability` of `total` rounded up; at least 1, at most all."""
    exact = probability * total.to(tl.float64)
    target = exact.to(tl.int64)
    target = tl.where(target.to(tl.float64) < exact, target + 1, target)
    return tl.minimum(tl.maximum(target, 1), total)


@triton.jit
def _narrowed(pivot, reaches, low, high):
    """[low, high] once it is known whether the weights up to a pivot reach the target."""
    high = tl.where(reaches, tl.minimum(high, pivot), high)
    low = tl.where(reaches, low, tl.maximum(low, pivot + 1))
    return low, high


@triton.jit
def _keep_first_(
    scaled,
    weights,
    vocab_size,
    target,
    mean,
    COUNTS: tl.constexpr,
    BY_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Remove the tokens after the one at which the weights reach `target`, which is at least 1 and
    at most the sum of all.
    """
    low = tl.zeros_like(target)
    high = low + _LARGEST
    # the key of the last token is in [low, high]; both move to keys that tokens have, so that few
    # of the 63 bits are searched: 5 to 9 passes over 151,936 logits
    while low < high:
        step = (high - low) // 5
        pivot_1, pivot_2 = low + step, low + 2 * step
        pivot_3, pivot_4 = low + 3 * step, low + 4 * step
        # sums of each thread until the loop ends, so that threads do not wait for each other
        until_1 = tl.zeros([BLOCK], tl.int64)
        until_2 = tl.zeros([BLOCK], tl.int64)
        until_3 = tl.zeros([BLOCK], tl.int64)
        until_4 = tl.zeros([BLOCK], tl.int64)
        least = tl.zeros([BLOCK], tl.int64) + _LARGEST
        most = tl.zeros([BLOCK], tl.int64)
        for first in range(0, vocab_size, BLOCK):
            _, key, weight = _block_of(
                scaled, weights, first, vocab_size, mean, COUNTS, BY_MEAN, BLOCK
            )
            until_1 += tl.where(key <= pivot_1, weight, 0)
            until_2 += tl.where(key <= pivot_2, weight, 0)
            until_3 += tl.where(key <= pivot_3, weight, 0)
            until_4 += tl.where(key <= pivot_4, weight, 0)
            is_between = (weight > 0) & (key >= low) & (key <= high)
            least = tl.where(is_between, tl.minimum(least, key), least)
            most = tl.where(is_between, tl.maximum(most, key), most)
        low, high = _narrowed(pivot_4, tl.sum(until_4, 0) >= target, low, high)
        low, high = _narrowed(pivot_3, tl.sum(until_3, 0) >= target, low, high)
        low, high = _narrowed(pivot_2, tl.sum(until_2, 0) >= target, low, high)
        low, high = _narrowed(pivot_1, tl.sum(until_1, 0) >= target, low, high)
        low = tl.maximum(low, tl.min(least, 0))
        high = tl.minimum(high, tl.max(most, 0))
    before = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab_size, BLOCK):
        _, key, weight = _block_of(scaled, weights, first, vocab_size, mean, COUNTS, BY_MEAN, BLOCK)
        before += tl.where(key < low, weight, 0)
    reached = tl.sum(before, 0)
    for first in range(0, vocab_size, BLOCK):
        ids, key, weight = _block_of(
            scaled, weights, first, vocab_size, mean, COUNTS, BY_MEAN, BLOCK
        )
        equal = tl.where(key == low, weight, 0)
        reached_before = reached + tl.cumsum(equal, 0) - equal
        is_after = (key > low) | ((key == low) & (reached_before >= target))
        tl.store(scaled + ids, -float("inf"), mask=is_after & (ids < vocab_size))
        reached += tl.sum(equal, 0)
    tl.debug_barrier()  # other threads may read what was written


@triton.jit
def _mean_of(scaled, weights, vocab_size, BLOCK: tl.constexpr):
    """The mean of the scaled logits by their probabilities, and the sum of these."""
    moments = tl.zeros([BLOCK], tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK).to(tl.int64)
        value = tl.load(scaled + ids, mask=ids < vocab_size, other=-float("inf"))
        weight = tl.load(weights + ids, mask=value > -float("inf"), other=0)
        value = tl.where(weight > 0, value, 0.0)
        moments += rounded_int64(exp_nonpositive(value) * value * _UNIT)
        total += weight
    all_weights = tl.sum(total, 0)
    return tl.sum(moments, 0).to(tl.float64) / all_weights.to(tl.float64), all_weights


@triton.jit
def _largest_of(scaled, vocab_size, BLOCK: tl.constexpr):
    """The largest value."""
    largest = tl.zeros([BLOCK], tl.float64) - float("inf")
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK).to(tl.int64)
        value = tl.load(scaled + ids, mask=ids < vocab_size, other=-float("inf"))
        largest = tl.maximum(largest, value)
    return tl.max(largest, 0)


@triton.jit
def _remove_below_(scaled, vocab_size, base, floor, BLOCK: tl.constexpr):
    """Remove tokens whose value is less than `floor` above `base`."""
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = ids < vocab_size
        value = tl.load(scaled + ids, mask=inside, other=-float("inf"))
        tl.store(scaled + ids, -float("inf"), mask=inside & (value - base < floor))
    tl.debug_barrier()


@triton.jit
def _apply_xtc_(scaled, weights, vocab_size, threshold, BLOCK: tl.constexpr):
    """Remove the tokens whose probability is at least the threshold, but for the last of them."""
    total = _total(scaled, weights, vocab_size, False, BLOCK)
    bound = threshold * total.to(tl.float64)
    last_key = tl.zeros([BLOCK], tl.int64) - 1
    last_id = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab_size, BLOCK):
        ids, key, weight = _block_of(scaled, weights, first, vocab_size, 0.0, False, False, BLOCK)
        # ids grow from block to block: of equal keys the later one counts
        is_later = (key <= _LARGEST) & (weight.to(tl.float64) >= bound) & (key >= last_key)
        last_key = tl.where(is_later, key, last_key)
        last_id = tl.where(is_later, ids, last_id)
    key_of_last = tl.max(last_key, 0)
    id_of_last = tl.max(tl.where(last_key == key_of_last, last_id, 0), 0)
    for first in range(0, vocab_size, BLOCK):
        ids, key, _ = _block_of(scaled, weights, first, vocab_size, 0.0, True, False, BLOCK)
        is_before = (key < key_of_last) | ((key == key_of_last) & (ids < id_of_last))
        tl.store(scaled + ids, -float("inf"), mask=is_before & (ids < vocab_size))


@triton.jit
def _filter_kernel(scaled, weights, rows, vocab_size, BLOCK: tl.constexpr):
    """All filters of a row, one after the other."""
    fields = rows + tl.program_id(0).to(tl.int64) * FIELDS
    place = tl.load(fields + FILTERED)
    if place >= 0:
        scaled += place * vocab_size
        weights += place * vocab_size
        base = place.to(tl.float64) * 0.0
        top_k = tl.load(fields + TOP_K)
        if top_k > 0:  # noqa: SIM102 - a kernel's `and` computes both sides
            if top_k < _total(scaled, weights, vocab_size, True, BLOCK):
                _keep_first_(scaled, weights, vocab_size, top_k, 0.0, True, False, BLOCK)
        typical_p = fp64_field(fields, TYPICAL_P)
        if typical_p < 1.0:
            mean, total = _mean_of(scaled, weights, vocab_size, BLOCK)
            target = _target(typical_p, total)
            _keep_first_(scaled, weights, vocab_size, target, mean, False, True, BLOCK)
            base = _largest_of(scaled, vocab_size, BLOCK)
            for first in range(0, vocab_size, BLOCK):
                ids = first + tl.arange(0, BLOCK).to(tl.int64)
                value = tl.load(scaled + ids, mask=ids < vocab_size, other=-float("inf"))
                weight = integer_probability(value - base)
                tl.store(weights + ids, weight, mask=ids < vocab_size)
            tl.debug_barrier()
        top_p = fp64_field(fields, TOP_P)
        if top_p < 1.0:
            target = _target(top_p, _total(scaled, weights, vocab_size, False, BLOCK))
            _keep_first_(scaled, weights, vocab_size, target, 0.0, False, False, BLOCK)
        floor = fp64_field(fields, LOG_MIN_P)
        if floor > -float("inf"):
            _remove_below_(scaled, vocab_size, base, floor, BLOCK)
        if tl.load(fields + APPLIES_XTC) > 0:
            threshold = fp64_field(fields, XTC_THRESHOLD)
            _apply_xtc_(scaled, weights, vocab_size, threshold, BLOCK)
