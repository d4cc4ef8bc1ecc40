"""Log-probabilities of a prompt's own tokens, from the logits of the positions before them.

Called by `runtime.runner` for rows with scored positions. The logits of a whole prompt are never
in memory at once: a slice of positions is scored before the next is computed. `score_tokens` is
the definition, which native kernels find the same bits as (`runtime.sampling.native_scores`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quickstep.model.decoder import Decoder
from quickstep.model.interface import Model
from quickstep.ops.tensors import AnyTensor, to_numpy
from quickstep.runtime.capture import StepModel
from quickstep.runtime.sampling.logprobs import token_logprobs
from quickstep.runtime.sampling.native_scores import NativeScorer
from quickstep.runtime.slots import Slot
from quickstep.types import StepRow, TokenLogprobs

__all__ = ["PromptScorer", "score_tokens"]

# A slice reads the weights of the output projection once: more positions hardly save anything.
_POSITIONS_PER_SLICE = 64
_BYTES_PER_SLICE = 64 << 20  # of logits and of the most likely tokens
_LOGIT_BYTES = 4
_TOP_BYTES = 12  # an id and a logit

# (logits [T, V] fp32, a token for each row, most likely tokens to report) -> a score for each row;
# None where a row's logits have no finite maximum
Scorer = Callable[[AnyTensor, Sequence[int], int], list[TokenLogprobs] | None]


def score_tokens(
    logits: AnyTensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs] | None:
    """A `Scorer` for any tensors: the definition."""
    rows = to_numpy(logits)
    if not np.isfinite(rows.max(axis=1)).all():
        return None
    return [
        token_logprobs(row, token_id, num_top)
        for row, token_id in zip(rows, token_ids, strict=True)
    ]


class PromptScorer:
    """Scores the prompts of a model's steps, natively where its kernels are. One call at a time."""

    def __init__(self, steps: StepModel, model: Model) -> None:
        self._steps = steps
        self._vocab_size = model.vocab_size
        self._score: Scorer = score_tokens
        if isinstance(model, Decoder) and model.ops.steps is not None:
            self._score = NativeScorer(model.ops.steps.scores(model.vocab_size)).score

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
            logits = self._steps.logits(hidden[start - row.start : stop - row.start])
            found = self._score(logits, slot.token_ids[start + 1 : stop + 1], num_top)
            if found is None:
                slot.failure = "the logits of the prompt hold NaN or infinity"
                return ()
            scores += found
        return tuple(scores)
