"""Log-probabilities of a prompt's own tokens, from the logits of the positions before them.

Called by `runtime.runner` for rows with scored positions. The logits of a whole prompt are never
in memory at once: a slice of positions is scored before the next is computed.
"""

from __future__ import annotations

import numpy as np

from quickstep.ops.host_tensor import AnyTensor, to_numpy
from quickstep.runtime.sampling.logprobs import token_logprobs
from quickstep.runtime.slots import Slot
from quickstep.runtime.step_model import StepModel
from quickstep.types import StepRow, TokenLogprobs

__all__ = ["score_prompt"]

_POSITIONS_PER_SLICE = 64


def score_prompt(
    steps: StepModel, hidden: AnyTensor, row: StepRow, slot: Slot
) -> tuple[TokenLogprobs, ...]:
    """The scores of the tokens behind the row's scored positions; `hidden` is the row's, [T, H].

    Logits without a finite maximum set the slot's failure, and nothing is scored.
    """
    num_top = slot.num_prompt_logprobs
    scores: list[TokenLogprobs] = []
    end = row.score_start + row.num_scored
    for start in range(row.score_start, end, _POSITIONS_PER_SLICE):
        stop = min(start + _POSITIONS_PER_SLICE, end)
        logits = to_numpy(steps.logits(hidden[start - row.start : stop - row.start]))
        if not np.isfinite(logits.max(axis=1)).all():
            slot.failure = "the logits of the prompt hold NaN or infinity"
            return ()
        targets = slot.token_ids[start + 1 : stop + 1]
        scores += [
            token_logprobs(position, token_id, num_top)
            for position, token_id in zip(logits, targets, strict=True)
        ]
    return tuple(scores)
