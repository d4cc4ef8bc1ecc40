"""Log-probabilities of sampled tokens and of a prompt's tokens, from raw logits.

log_softmax in float64 over a sum of integers (`runtime.sampling.exact_math.integer_probabilities`):
neither the order of summing nor the machine changes a bit of it. `token_logprobs` and
`score_tokens` are the definitions; native kernels compute the same bits.

The samplers call `token_logprobs`, `runtime.runner` a `PromptScorer` for rows with scored
positions. The logits of a complete prompt are never in memory at once: a slice of positions is
scored before the next is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quickstep.model.interface import Model
from quickstep.ops.native.steps import TokenScores
from quickstep.ops.tensors import AnyTensor, to_numpy
from quickstep.runtime.sampling.exact_math import PROBABILITY_UNIT, integer_probabilities
from quickstep.runtime.sampling.filters import largest
from quickstep.types import StepRow, TokenLogprobs

if TYPE_CHECKING:
    from quickstep.runtime.capture import StepModel
    from quickstep.runtime.slots import Slot

__all__ = [
    "NativeScorer",
    "PromptScorer",
    "logprobs_of_scores",
    "other_token_ids",
    "score_tokens",
    "token_logprobs",
]

# A slice reads the weights of the output projection once: more positions hardly save anything.
_POSITIONS_PER_SLICE = 64
_BYTES_PER_SLICE = 64 << 20  # of logits and of the most likely tokens
_LOGIT_BYTES = 4
_TOP_BYTES = 12  # an id and a logit

# (logits [T, V] fp32, a token for each row, most likely tokens to report) -> a score for each row;
# None where a row's logits have no finite maximum
Scorer = Callable[[AnyTensor, Sequence[int], int], list[TokenLogprobs] | None]


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


class NativeScorer:
    """All positions of a slice in one native call. Not for two threads at a time."""

    def __init__(self, scores: TokenScores) -> None:
        self._scores = scores

    def score(
        self, logits: AnyTensor, token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs] | None:
        """`score_tokens` of logits [T, V], for contiguous rows on a CPU."""
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
            logprobs_of_scores(token_id, *values)
            for token_id, *values in zip(token_ids, *columns, strict=True)
        ]


class PromptScorer:
    """Scores the prompts of a model's steps, natively where its kernels are. One call at a time."""

    def __init__(self, steps: StepModel, model: Model) -> None:
        self._steps = steps
        self._vocab_size = model.vocab_size
        self._score: Scorer = score_tokens
        if model.device.type == "cpu" and model.ops.steps is not None:
            self._score = NativeScorer(model.ops.steps.scores(model.vocab_size)).score
        elif model.ops.samples_on_device:
            from quickstep.runtime.sampling.device_sampler import score_on_device

            self._score = score_on_device

    def score(self, hidden: AnyTensor, row: StepRow, slot: Slot) -> tuple[TokenLogprobs, ...]:
        """The scores of the tokens after the row's scored positions; `hidden` [T, H] is the row's.

        Logits without a finite maximum set the slot's failure, and nothing is scored.
        """
        num_top = min(slot.num_prompt_logprobs, self._vocab_size)
        bytes_per_position = self._vocab_size * _LOGIT_BYTES + num_top * _TOP_BYTES
        num_positions = min(_POSITIONS_PER_SLICE, max(1, _BYTES_PER_SLICE // bytes_per_position))
        scores: list[TokenLogprobs] = []
        end = row.score_start + row.num_scored
        for start in range(row.score_start, end, num_positions):
            stop = min(start + num_positions, end)
            positions = hidden[start - row.start : stop - row.start]
            logits = self._steps.logits(positions, row.adapter)
            slice_scores = self._score(logits, slot.token_ids[start + 1 : stop + 1], num_top)
            if slice_scores is None:
                slot.failure = "the logits of the prompt hold NaN or infinity"
                return ()
            scores += slice_scores
        return tuple(scores)
