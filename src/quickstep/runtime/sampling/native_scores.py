"""Scores of a prompt's tokens in one native call; the same bits as `runtime.prompt_scores`.

Opened by `runtime.prompt_scores` where the model's kernels are native.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quickstep.ops.native.steps import TokenScores
from quickstep.ops.tensors import AnyTensor
from quickstep.runtime.sampling.exact_math import PROBABILITY_UNIT
from quickstep.types import TokenLogprobs

__all__ = ["NativeScorer"]


class NativeScorer:
    """Runs the calls and reads them. Not for two threads at a time."""

    def __init__(self, scores: TokenScores) -> None:
        self._scores = scores

    def score(
        self, logits: AnyTensor, token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs] | None:
        """`runtime.prompt_scores.score_tokens`, for contiguous rows on a CPU."""
        found = self._scores.score(logits, token_ids, num_top)
        if (found.ranks < 0).any():
            return None
        columns = (
            found.ranks.tolist(),
            found.total_probabilities.tolist(),
            found.peaks.tolist(),
            found.chosen.tolist(),
            found.top_ids.tolist(),
            found.top_logits.tolist(),
        )
        return [
            _logprobs(token_id, *values)
            for token_id, *values in zip(token_ids, *columns, strict=True)
        ]


def _logprobs(
    token_id: int,
    rank: int,
    total: int,
    peak: float,
    chosen: float,
    top_ids: list[int],
    top_logits: list[float],
) -> TokenLogprobs:
    """As `runtime.logprobs.token_logprobs`."""
    log_total = math.log(total / PROBABILITY_UNIT)
    return TokenLogprobs(
        token_id=token_id,
        logprob=chosen - peak - log_total,
        rank=rank,
        top=tuple([(i, x - peak - log_total) for i, x in zip(top_ids, top_logits, strict=True)]),
    )
