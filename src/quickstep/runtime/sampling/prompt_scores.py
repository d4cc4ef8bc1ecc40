"""Scores the tokens of prompts; `runtime.runner` calls it for rows with scored positions.

The logits of a complete prompt are never in memory at once: a slice of positions is scored before
the next is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quickstep.model.interface import Model
from quickstep.ops.native.steps import TokenScores
from quickstep.ops.tensors import AnyTensor
from quickstep.runtime.sampling.logprobs import logprobs_of_scores, score_tokens
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.step_model import StepModel
from quickstep.types import StepRow, TokenLogprobs

# A slice reads the weights of the output projection once: more positions hardly save anything.
_POSITIONS_PER_SLICE = 64
_BYTES_PER_SLICE = 64 << 20  # of logits and of the most likely tokens
_LOGIT_BYTES = 4
_TOP_BYTES = 12  # an id and a logit

# (logits [T, V] fp32, a token for each row, most likely tokens to report) -> a score for each row;
# None where a row's logits have no finite maximum
Scorer = Callable[[AnyTensor, Sequence[int], int], list[TokenLogprobs] | None]


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
