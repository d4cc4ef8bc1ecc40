"""Samples the tokens of a step's rows and accepts the drafts that are equal to them.

The tokens are those that would have been sampled without drafts: from the same logits, with the
same noise, penalties and grammar state, one position after the other. A draft is accepted if it is
that token; then the logits after it are valid, and the next position is sampled. So no sampling
state is ever taken back. In a tree, several drafts may follow a token; one of them at most is the
token that is sampled.

Standard rejection sampling is there for comparison: it keeps the distribution, not the tokens.

Called by `runtime.runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.ops.tensors import AnyTensor, to_numpy
from quickstep.runtime.sampling.sampler import Sample, SampleFailure, failure_of, sample_row
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.slots import Slot

# (logits [E, V] fp32, a state for each sampled row, which rows of the logits: None for all of them)
_Sampler = Callable[
    [AnyTensor, Sequence[SamplingState], Sequence[int] | None], list[Sample | SampleFailure]
]


class EmittingRow(msgspec.Struct):
    """A row of the step that emits tokens.

    Attributes:
        index: Its place in the step.
        state: The sampling state of its slot.
        first: The place of its first logits in [E, V]; those after its drafts follow.
        drafts, parents: The row's; see `StepRow.parents`.
        samples: What was emitted so far.
        nodes: The input whose logits each of the samples is from, and the one for the next sample:
            0 is the input before all drafts, i the i-th draft.
    """

    index: int
    slot: Slot
    state: SamplingState
    first: int
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    samples: list[Sample] = msgspec.field(default_factory=list)
    nodes: list[int] = msgspec.field(default_factory=lambda: [0])

    @property
    def next_draft(self) -> int | None:
        """The first draft of the position that is sampled next; None where there is none."""
        node = self.nodes[-1]
        if not self.parents:
            return self.drafts[node] if node < len(self.drafts) else None
        return self.drafts[self.parents.index(node)] if node in self.parents else None

    @property
    def next_logits(self) -> int:
        """The place of the logits from which the next token is sampled."""
        return self.first + self.nodes[-1]

    @property
    def computed(self) -> list[int]:
        """The places among the row's logits of its inputs that are tokens of the sequence."""
        return self.nodes[: len(self.samples)]

    @property
    def depths(self) -> list[int]:
        """How many drafts precede the logits of each of the row's inputs."""
        if not self.parents:
            return list(range(1 + len(self.drafts)))
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

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
        slot.last_token = sampled.token_id  # the input of the next decode row
        try:
            self.state.record(sampled.token_id)
        except BaseException as error:  # ends this row's sequence, not the step
            slot.failure = failure_of(error).reason
            return False
        self.samples.append(sampled)
        if not self.drafts or sampled.token_id in slot.end_token_ids:
            return False
        node = self._draft_after(self.nodes[-1], sampled.token_id)
        if node is None:
            return False
        self.nodes.append(node)
        return True

    def _draft_after(self, node: int, token_id: int) -> int | None:
        """The draft that follows an input and is this token."""
        if not self.parents:
            is_next = node < len(self.drafts) and self.drafts[node] == token_id
            return node + 1 if is_next else None
        for child, (parent, draft) in enumerate(zip(self.parents, self.drafts, strict=True), 1):
            if parent == node and draft == token_id:
                return child
        return None


def sample_rows(
    sample: _Sampler,
    logits: AnyTensor,
    rows: Sequence[EmittingRow],
    by_rejection: bool = False,
    at_once: bool = False,
) -> None:
    """Fill in the samples of all rows, or the failures of their slots. `logits` [E, V] fp32.

    `by_rejection`: accept drafts by rejection sampling. `at_once`: where tokens have no effect on
    later ones but by the logits, sample after all drafts in one call; those after a rejected draft
    are in vain.
    """
    states: list[SamplingState] = []
    has_drafts = False
    for row in rows:
        states.append(row.state)
        has_drafts = has_drafts or bool(row.drafts)
    if not has_drafts:
        samples = sample(logits, states, None)
        for row, sampled in zip(rows, samples, strict=True):
            row.accept(sampled)
    elif all([row.state.is_plain_argmax for row in rows]):
        states = [row.state for row in rows for _ in range(1 + len(row.drafts))]
        samples = sample(logits, states, None)
        for row in rows:
            while row.accept(samples[row.next_logits]):
                pass
    elif by_rejection:
        matrix, active = to_numpy(logits), list(rows)
        while active:
            active = [row for row in active if row.accept(_by_rejection(matrix, row))]
    else:
        active = list(rows)
        while active:
            active = _sample_next(sample, logits, active, at_once)


def _by_rejection(matrix: npt.NDArray[np.float32], row: EmittingRow) -> Sample | SampleFailure:
    return sample_row(matrix[row.next_logits], row.state, row.next_draft)


def _sample_next(
    sample: _Sampler, logits: AnyTensor, rows: Sequence[EmittingRow], at_once: bool
) -> list[EmittingRow]:
    """Sample the next token of each row, or all of a row; returns the rows that need another."""
    states: list[SamplingState] = []
    places: list[int] = []
    counts: list[int] = []
    for row in rows:
        depths = row.depths if at_once and row.state.is_function_of_position else [0]
        counts.append(len(depths))
        states += [row.state.ahead(depth) if depth else row.state for depth in depths]
        places += range(row.next_logits, row.next_logits + len(depths))
    samples = iter(sample(logits, states, places))
    return [
        row
        for row, count in zip(rows, counts, strict=True)
        if _accept_all(row, list(islice(samples, count)))
    ]


def _accept_all(row: EmittingRow, samples: Sequence[Sample | SampleFailure]) -> bool:
    """Accept the next of the samples, which belong to the inputs from the row's next one on, as
    long as it is there; whether another one is needed.
    """
    first = row.nodes[-1]
    while row.nodes[-1] - first < len(samples):
        if not row.accept(samples[row.nodes[-1] - first]):
            return False
    return True
