"""Samples the tokens of a step's rows and accepts the drafts that are equal to them.

The tokens are those that would have been sampled without drafts: from the same logits, with the
same noise, penalties and grammar state, one position after the other. A draft is accepted if it is
that token; then the logits after it are valid, and the next position is sampled. So no sampling
state is ever taken back.

Standard rejection sampling is there for comparison: it keeps the distribution, not the tokens.

Called by `runtime.runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from quickstep.ops.tensors import AnyTensor, to_numpy
from quickstep.runtime.sampling.sampler import Sample, SampleFailure, failure_of, sample_row
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.slots import Slot

__all__ = ["EmittingRow", "sample_rows"]

# (logits [E, V] fp32, a state for each sampled row, which rows of the logits: None for all of them)
_Sampler = Callable[
    [AnyTensor, Sequence[SamplingState], Sequence[int] | None], list[Sample | SampleFailure]
]


class EmittingRow(msgspec.Struct):
    """A row of the step that emits tokens.

    Attributes:
        index: Its place in the step.
        first: The place of its first logits in [E, V]; those after its drafts follow.
        samples: What was emitted so far.
    """

    index: int
    slot: Slot
    first: int
    drafts: tuple[int, ...] = ()
    samples: list[Sample] = msgspec.field(default_factory=list)

    @property
    def state(self) -> SamplingState:
        """The sampling state of its slot."""
        assert self.slot.state is not None, "a slot without sampling state emits nothing"
        return self.slot.state

    @property
    def next_draft(self) -> int | None:
        """The draft of the position that is sampled next; None after all of them."""
        num_new = len(self.samples)
        return self.drafts[num_new] if num_new < len(self.drafts) else None

    @property
    def next_logits(self) -> int:
        """The place of the logits from which the next token is sampled."""
        return self.first + len(self.samples)

    def accept(self, sampled: Sample | SampleFailure) -> bool:
        """Record a sampled token; whether another one can be sampled after it in this step.

        The failure of the first token is the slot's. One after accepted drafts ends only this row:
        the next step samples the same position again, and fails in the same way.
        """
        slot = self.slot
        if isinstance(sampled, SampleFailure):
            if not self.samples:
                slot.failure, slot.is_refused = sampled.reason, sampled.is_refused
            return False
        try:
            slot.record(sampled.token_id)
        except BaseException as error:  # ends this row's sequence, not the step
            slot.failure = failure_of(error).reason
            return False
        self.samples.append(sampled)
        if not self.drafts:
            return False
        num_new = len(self.samples)
        return (
            num_new <= len(self.drafts)
            and self.drafts[num_new - 1] == sampled.token_id
            and sampled.token_id not in slot.end_token_ids
        )


def sample_rows(
    sample: _Sampler, logits: AnyTensor, rows: Sequence[EmittingRow], by_rejection: bool = False
) -> None:
    """Fill in the samples of all rows, or the failures of their slots. `logits` [E, V] fp32.

    `by_rejection`: accept drafts by rejection sampling.
    """
    if not any([row.drafts for row in rows]):
        samples = sample(logits, [row.state for row in rows], None)
        for row, sampled in zip(rows, samples, strict=True):
            row.accept(sampled)
    elif all([row.state.is_plain_argmax for row in rows]):
        states = [row.state for row in rows for _ in range(1 + len(row.drafts))]
        samples = sample(logits, states, None)
        for row in rows:
            while row.accept(samples[row.next_logits]):
                pass
    else:
        active = list(rows)
        while active:
            samples = _next_samples(sample, logits, active, by_rejection)
            active = [
                row for row, sampled in zip(active, samples, strict=True) if row.accept(sampled)
            ]


def _next_samples(
    sample: _Sampler, logits: AnyTensor, rows: Sequence[EmittingRow], by_rejection: bool
) -> list[Sample | SampleFailure]:
    if by_rejection:
        matrix = to_numpy(logits)
        return [sample_row(matrix[row.next_logits], row.state, row.next_draft) for row in rows]
    return sample(logits, [row.state for row in rows], [row.next_logits for row in rows])
