"""Top-k, typical-p, top-p, min-p and XTC over one row of scaled logits.

Tokens have one canonical order everywhere: larger value first, lower id first among equals.
So each filter keeps an exact number of tokens, ties included, and a row's result depends on the
row alone. Everything is float64 NumPy over one contiguous vector: its bits depend on neither the
thread count nor the rows of the batch.

Called by `runtime.sampling.sampler` and `runtime.sampling.logprobs`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from quickstep.runtime.sampling.exact_math import (
    PROBABILITY_UNIT,
    exp_nonpositive,
    integer_probabilities,
)
from quickstep.types import SamplingParams

Floats = npt.NDArray[np.floating]
Ids = npt.NDArray[np.int64]


def largest(values: Floats, count: int) -> Ids:
    """Indices of the `count` largest of values [n], ascending; of equal ones the lowest indices."""
    size = values.shape[0]
    if count >= size:
        return np.arange(size)
    threshold = np.partition(values, size - count)[size - count]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: count - above.shape[0]]
    return np.sort(np.concatenate((above, equal)))


def kept_token_ids(
    scaled: npt.NDArray[np.float64], sampling: SamplingParams, applies_xtc: bool = False
) -> Ids:
    """The token ids that may be sampled, ascending: top-k -> typical-p -> top-p -> min-p -> XTC.

    Each filter uses the probabilities among the tokens that the one before it kept. `scaled` [V]
    holds (logit - largest logit) / temperature: its maximum is 0, and tokens that are not allowed
    hold -inf. At least one token is always kept. `applies_xtc`: XTC removes tokens of this row.
    """
    ids = np.flatnonzero(scaled > -np.inf)
    if 0 < sampling.top_k < ids.shape[0]:
        ids = ids[largest(scaled[ids], sampling.top_k)]
    if sampling.typical_p < 1.0:
        ids = ids[_typical(scaled[ids], sampling.typical_p)]
    if sampling.top_p < 1.0:
        values = scaled[ids]
        ids = ids[largest(values, _nucleus_size(values - values.max(), sampling.top_p))]
    if sampling.min_p > 0.0:
        values = scaled[ids]
        ids = ids[values - values.max() >= math.log(sampling.min_p)]
    if applies_xtc:
        ids = ids[_apply_xtc(scaled[ids], sampling.xtc_threshold)]
    return ids


def _typical(values: npt.NDArray[np.float64], typical_p: float) -> Ids:
    """Places of the smallest set whose probability reaches `typical_p`, taking first the tokens
    whose surprise -log p is nearest to its mean, the entropy (Meister et al. 2022,
    arXiv:2202.00666).

    A surprise is the logarithm of the total less the value, so how far it is from the entropy is
    how far the value is from the mean value: no logarithm, and sums of integers alone.
    """
    values = values - values.max()
    weights = integer_probabilities(values)
    total = int(weights.sum())
    moments = np.rint(exp_nonpositive(values) * values * PROBABILITY_UNIT)
    moment = int(moments[weights > 0].astype(np.int64).sum())
    apart = np.abs(values - float(moment) / float(total))
    order = np.argsort(apart, kind="stable")
    cumulative = np.cumsum(weights[order])
    return np.sort(order[: int(np.searchsorted(cumulative, _target(typical_p, total))) + 1])


def _apply_xtc(values: npt.NDArray[np.float64], threshold: float) -> Ids:
    """Places of all but the tokens whose probability is at least `threshold`, and of the last of
    these in canonical order, so that something likely stays.
    """
    weights = integer_probabilities(values - values.max())
    bound = threshold * float(weights.sum())
    top = np.flatnonzero(weights.astype(np.float64) >= bound)
    if not top.size:
        return np.arange(values.shape[0])
    least = top[values[top] == values[top].min()][-1]
    places = np.arange(values.shape[0])
    rest = (values < values[least]) | ((values == values[least]) & (places >= least))
    return np.flatnonzero(rest)


def _target(probability: float, total: int) -> int:
    """`probability` of `total`; at least 1, at most all."""
    return min(max(1, math.ceil(probability * float(total))), total)


def _nucleus_size(values: npt.NDArray[np.float64], top_p: float) -> int:
    """Size of the smallest set, largest values first, whose probability reaches `top_p`; at least
    1.

    Probabilities are integers, so that they add up to the same in any order. Sorting the few large
    ones nearly always suffices.
    """
    weights = integer_probabilities(values)
    total = int(weights.sum())
    target = _target(top_p, total)
    for floor in (1e-4 * PROBABILITY_UNIT, 0.0):
        head = -np.sort(-weights[weights >= floor])
        cumulative = np.cumsum(head)
        if cumulative[-1] >= target:
            break
    return int(np.searchsorted(cumulative, target)) + 1
