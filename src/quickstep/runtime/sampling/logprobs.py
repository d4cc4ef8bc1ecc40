"""Log-probabilities of sampled tokens and of a prompt's tokens, from raw logits.

log_softmax in float64 over a sum of integers (`runtime.sampling.exact_math.integer_probabilities`):
neither the order of summing nor the machine changes a bit of it. `token_logprobs` and
`score_tokens` are the definitions; native kernels compute the same bits.

The samplers call `token_logprobs`, `prompt_scores` the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quickstep.ops.tensors import AnyTensor, to_numpy
from quickstep.runtime.sampling.exact_math import PROBABILITY_UNIT, integer_probabilities
from quickstep.runtime.sampling.filters import largest
from quickstep.types import TokenLogprobs

if TYPE_CHECKING:
    pass


def token_logprobs(
    logits: npt.NDArray[np.float32], token_id: int, num_top: int, requested_ids: Sequence[int] = ()
) -> TokenLogprobs:
    """The chosen token's logprob and rank, the `num_top` most likely tokens, then `requested_ids`.

    `logits` [V] raw, with a finite maximum. Equal logits rank by token id, so that ranks are
    unique and agree with the order of `top`.
    """
    peak = logits.max()
    total = int(integer_probabilities(logits.astype(np.float64) - float(peak)).sum())
    chosen = logits[token_id]
    num_before = np.count_nonzero(logits > chosen)
    num_before += np.count_nonzero(logits[:token_id] == chosen)
    top = largest(logits, num_top) if num_top else np.empty(0, dtype=np.int64)
    top = top[np.argsort(-logits[top], kind="stable")]
    reported = [*top.tolist(), *other_token_ids(logits.__getitem__, requested_ids, top.tolist())]
    rank, values = int(num_before) + 1, logits[reported].tolist()
    return logprobs_of_scores(token_id, rank, total, float(peak), float(chosen), reported, values)


def logprobs_of_scores(
    token_id: int,
    rank: int,
    total_probability: int,
    peak: float,
    chosen: float,
    top_ids: Sequence[int],
    top_logits: Sequence[float],
) -> TokenLogprobs:
    """A token's log-probabilities from logits: `chosen` is the token's own, `peak` the largest,
    `total_probability` the sum of `integer_probabilities` over the row.
    """
    log_total = math.log(total_probability / PROBABILITY_UNIT)
    return TokenLogprobs(
        token_id=token_id,
        logprob=chosen - peak - log_total,
        rank=rank,
        top=tuple([(i, x - peak - log_total) for i, x in zip(top_ids, top_logits, strict=True)]),
    )


def other_token_ids(
    logit_of: Callable[[int], float], requested_ids: Sequence[int], top: Sequence[int]
) -> list[int]:
    """The requested tokens that are not in `top`, by their logits, the most likely first."""
    others = set(requested_ids).difference(top)
    return sorted(others, key=lambda index: (-float(logit_of(index)), index))


def score_tokens(
    logits: AnyTensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs] | None:
    """A `Scorer` of logits [T, V] for any tensors: the definition."""
    rows = to_numpy(logits)
    if not np.isfinite(rows.max(axis=1)).all():
        return None
    return [
        token_logprobs(row, token_id, num_top)
        for row, token_id in zip(rows, token_ids, strict=True)
    ]
