"""Log-probabilities of an emitted token, from the raw logits of its row.

log_softmax in float64 over a sum of integers (`runtime.sampling.exact_math.integer_probabilities`):
neither the order of summing nor the machine changes a bit of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quickstep.runtime.sampling.exact_math import PROBABILITY_UNIT, integer_probabilities
from quickstep.runtime.sampling.filters import largest
from quickstep.types import TokenLogprobs

__all__ = ["other_token_ids", "token_logprobs"]


def token_logprobs(
    logits: npt.NDArray[np.float32], token_id: int, num_top: int, requested_ids: Sequence[int] = ()
) -> TokenLogprobs:
    """The chosen token's logprob and rank, the `num_top` most likely tokens, then `requested_ids`.

    `logits` [V] raw, with a finite maximum. Equal logits rank by token id, so that ranks are
    unique and agree with the order of `top`.
    """
    peak = logits.max()
    total = int(integer_probabilities(logits.astype(np.float64) - float(peak)).sum())
    log_total = math.log(total / PROBABILITY_UNIT)

    def logprob(index: int) -> float:
        return float(logits[index]) - float(peak) - log_total

    chosen = logits[token_id]
    num_before = np.count_nonzero(logits > chosen)
    num_before += np.count_nonzero(logits[:token_id] == chosen)
    top = largest(logits, num_top) if num_top else np.empty(0, dtype=np.int64)
    top = top[np.argsort(-logits[top], kind="stable")]
    reported = [*top.tolist(), *other_token_ids(logits, requested_ids, top.tolist())]
    return TokenLogprobs(
        token_id=token_id,
        logprob=logprob(token_id),
        rank=int(num_before) + 1,
        top=tuple((index, logprob(index)) for index in reported),
    )


def other_token_ids(
    logits: npt.NDArray[np.float32], requested_ids: Sequence[int], top: Sequence[int]
) -> list[int]:
    """The requested tokens that are not in `top`, the most likely first."""
    others = set(requested_ids).difference(top)
    return sorted(others, key=lambda index: (-float(logits[index]), index))
