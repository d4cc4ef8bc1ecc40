"""A token 5-gram model with interpolated Kneser-Ney smoothing: the yardstick of the model card.

One absolute discount per order, D = n1 / (n1 + 2 n2); the highest order uses counts, the lower
ones continuation counts (Kneser and Ney, 1995; Chen and Goodman, 1999). Called by `quality`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ORDER = 5
_BITS = 12  # per token: five tokens of a 4,096-token vocabulary fit 60 bits of a key

Keys = NDArray[np.uint64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Level:
    """The n-grams of one order; keys hold the newest token in the lowest bits."""

    grams: Keys  # sorted
    counts: Counts
    contexts: Keys  # sorted; the distinct grams without their newest token
    totals: Counts  # per context, the sum of its counts
    num_types: Counts  # per context, the number of distinct continuations
    discount: float


class NgramModel:
    """Counts the n-grams of a token array once, then answers probabilities."""

    def __init__(self, tokens: NDArray[np.uint16], vocab_size: int) -> None:
        if vocab_size > 1 << _BITS:
            raise ValueError(f"vocabulary of {vocab_size}, at most {1 << _BITS} fit a key")
        self._vocab_size = vocab_size
        grams, counts = np.unique(_keys(tokens, ORDER), return_counts=True)
        levels = [_level(grams, counts)]
        for order in range(ORDER - 1, 0, -1):
            newest = np.uint64((1 << (_BITS * order)) - 1)
            grams, counts = np.unique(grams & newest, return_counts=True)
            levels.append(_level(grams, counts))
        self._levels = levels[::-1]

    def log2_probabilities(self, tokens: NDArray[np.uint16]) -> NDArray[np.float64]:
        """log2 p of every token given the up to four before it; the first token is skipped."""
        probability = np.full(tokens.size, 1.0 / self._vocab_size)
        for order, level in enumerate(self._levels, start=1):
            reached = slice(order - 1, None)  # the first tokens have shorter contexts
            probability[reached] = _interpolate(level, _keys(tokens, order), probability[reached])
        bits: NDArray[np.float64] = np.log2(probability[1:])
        return bits


def _keys(tokens: NDArray[np.uint16], order: int) -> Keys:
    """The key of every n-gram of a token array, [T - order + 1]."""
    num_keys = tokens.size - order + 1
    keys = np.zeros(num_keys, np.uint64)
    for offset in range(order):
        keys = (keys << np.uint64(_BITS)) | tokens[offset : offset + num_keys].astype(np.uint64)
    return keys


def _level(grams: Keys, counts: Counts) -> _Level:
    contexts, first, num_types = np.unique(
        grams >> np.uint64(_BITS), return_index=True, return_counts=True
    )
    ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
    discount = ones / (ones + 2 * twos) if ones else 0.0
    return _Level(grams, counts, contexts, np.add.reduceat(counts, first), num_types, discount)


def _interpolate(level: _Level, keys: Keys, lower: NDArray[np.float64]) -> NDArray[np.float64]:
    counts = _find(level.grams, level.counts, keys)
    contexts = keys >> np.uint64(_BITS)
    totals = _find(level.contexts, level.totals, contexts)
    num_types = _find(level.contexts, level.num_types, contexts)
    direct = np.maximum(counts - level.discount, 0.0)
    interpolated = (direct + level.discount * num_types * lower) / np.maximum(totals, 1)
    return np.where(totals > 0, interpolated, lower)


def _find(keys: Keys, values: Counts, wanted: Keys) -> Counts:
    """The value of each wanted key, 0 where it is absent."""
    at = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return np.where(keys[at] == wanted, values[at], 0)
