"""A step in progress: the draft that `Scheduler.plan` fills, and the plan in flight.

Owned by `core.scheduler`. The executor gets only the frozen `StepPlan`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from operator import attrgetter

import msgspec

from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.drafts.control import DraftControl, DraftMode
from quickstep.core.sequence import Residency, Sequence
from quickstep.types import Admission, RowFailure, StepPlan, StepResult, StepRow

RowFailures = dict[int, RowFailure]  # by the row's place in the plan

_NO_LOAD = StepLoad()
_LOAD, _ROW = attrgetter("load"), attrgetter("row")

# The prices of setting up a sequence's sampling, in microseconds, measured on a slow core (2.5 GHz,
# Python 3.11); only their proportions and order of magnitude matter. The set-up runs on one thread
# while all other rows wait: a matcher for the grammar, penalties over the prompt. One request may
# bring many sequences at once, and prompts in the prefix cache need no other work.
_GRAMMAR_US = 300.0
_TOKEN_US = 0.04
_REPETITION_TOKEN_US = 0.4
_DRY_TOKEN_US = 0.7
# A step whose set-ups cost more than this admits no more; a single sequence may take longer.
MAX_SETUP_US = 2000.0


class FlightRow(msgspec.Struct, frozen=True, gc=False):
    """A planned row, its sequence and its load. The residency distinguishes rows of an earlier
    stay. `awaits_drafts`: It has drafts or asks for some.
    """

    sequence: Sequence
    residency: Residency
    row: StepRow
    load: StepLoad
    awaits_drafts: bool = False


class InFlightStep(msgspec.Struct, frozen=True):
    """A plan that was submitted and is not committed yet, with its load and that of each phase.
    `draft_mode`: what its time says about the gain of drafts; None for nothing.
    """

    plan: StepPlan
    rows: tuple[FlightRow, ...]
    load: StepLoad
    decode_load: StepLoad
    prefill_load: StepLoad
    planned_at_s: float
    predicted_s: float
    num_preemptions: int
    draft_mode: DraftMode | None = None


def setup_us(sequence: Sequence) -> float:
    """What admitting `sequence` costs, in addition to computing its tokens: a function of its
    request and its length.
    """
    sampling = sequence.request.sampling
    token_us = _TOKEN_US
    if sampling.repetition_penalty != 1.0:
        token_us += _REPETITION_TOKEN_US
    if sampling.dry_multiplier != 0.0:
        token_us += _DRY_TOKEN_US
    grammar_us = 0.0 if sampling.grammar is None else _GRAMMAR_US
    return grammar_us + token_us * len(sequence.token_ids)


class _LoadSum(msgspec.Struct):
    """The load of the first `num_rows` rows of a list, to which rows are appended."""

    num_rows: int = 0
    load: StepLoad = _NO_LOAD

    def of(self, rows: list[FlightRow]) -> StepLoad:
        """The load of all rows."""
        num_before = self.num_rows
        if num_before == len(rows):
            return self.load
        self.num_rows = len(rows)
        new = StepLoad.total(list(map(_LOAD, rows[num_before:])))
        self.load = self.load + new if num_before else new
        return self.load


class StepsInFlight(deque[InFlightStep]):
    """The steps that were submitted and are not committed, oldest first. Owned by the scheduler.

    Attributes:
        next_id: The number of the step that is planned next.
    """

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 0

    def are_over_before(self, step_id: int) -> bool:
        """Whether all submitted steps before this one are committed or have failed."""
        return not self or self[0].plan.step_id >= step_id


class StepDraft(msgspec.Struct):
    """A step under construction.

    Attributes:
        num_tokens_left: How many tokens it may still take.
        setup_us: What setting up the admitted sequences costs.
        limit_s: How long the step may take, if rows above their tenant's part are in it.
        crowded_limit_s: The same, for prompts of tenants that have many; None if not known yet.
        shared_limit_s: The same, where only tenants that have many are in it, while others may
            send a request; None while one tenant sends them.
        prefill_may_wait: Whether prefill gets only what is left of the limit.
        min_prefill: Tokens that drafts have left for prefill.
        may_speculate: Whether a row is of a request that allows drafts.
        may_request_drafts: Whether its rows may request drafts for those after them.
    """

    num_tokens_left: int
    setup_us: float = 0.0
    decode: list[FlightRow] = msgspec.field(default_factory=list)
    prefill: list[FlightRow] = msgspec.field(default_factory=list)
    admitted: list[Admission] = msgspec.field(default_factory=list)
    grouped_load: StepLoad = _NO_LOAD
    num_preemptions: int = 0
    limit_s: float | None = None
    crowded_limit_s: float | None = None
    shared_limit_s: float | None = None
    prefill_may_wait: bool = False
    min_prefill: int = 0
    may_speculate: bool = False
    may_request_drafts: bool = False
    _decode_sum: _LoadSum = msgspec.field(default_factory=_LoadSum)
    _prefill_sum: _LoadSum = msgspec.field(default_factory=_LoadSum)

    @property
    def may_admit(self) -> bool:
        """Whether the set-ups so far leave time for another one."""
        return self.setup_us < MAX_SETUP_US

    def admit(self, sequence: Sequence) -> None:
        """Let the executor set up a sequence that has entered the batch."""
        self.admitted.append(sequence.admission())
        self.setup_us += setup_us(sequence)

    def add_group(self, load: StepLoad) -> None:
        """Add decode rows that are not listed."""
        self.grouped_load = load
        self.num_tokens_left -= load.num_tokens

    @property
    def decode_load(self) -> StepLoad:
        """The load of the decode rows so far."""
        load = self._decode_sum.of(self.decode)
        return load + self.grouped_load if self.grouped_load.num_rows else load

    @property
    def prefill_load(self) -> StepLoad:
        """The load of the prefill rows so far."""
        return self._prefill_sum.of(self.prefill)

    def issue(
        self,
        step_id: int,
        released: tuple[int, ...],
        now: float,
        cost_model: CostModel,
        drafts: DraftControl,
    ) -> InFlightStep:
        """The finished step: decode rows first. Drafts get their price for the next one."""
        entries = (*self.decode, *self.prefill)
        grouped, decode = self.grouped_load, self._decode_sum.of(self.decode)
        if grouped.num_rows:
            decode = decode + grouped
        plan = StepPlan(
            step_id,
            tuple(map(_ROW, entries)),
            tuple(self.admitted),
            released,
            grouped.num_rows,
            grouped.num_kv_tokens,
        )
        prefill = self.prefill_load if self.prefill else _NO_LOAD
        load = decode + prefill if prefill.num_rows else decode
        draft_mode = drafts.planned(decode, cost_model)
        return InFlightStep(
            plan,
            entries,
            load,
            decode,
            prefill,
            now,
            cost_model.seconds(load),
            self.num_preemptions,
            draft_mode if self.may_speculate else None,
        )


def all_failed(step: InFlightStep, reason: str) -> RowFailures:
    """A failure of every row of a step."""
    return {index: RowFailure(index, reason) for index in range(len(step.rows))}


def row_failures(plan: StepPlan, result: StepResult) -> RowFailures:
    """Which rows failed and why; a row without an output that it should have has failed too."""
    failures = {failure.row: failure for failure in result.failures}
    for index, (row, output) in enumerate(zip(plan.rows, result.outputs, strict=True)):
        if row.emits and not output.token_ids:
            failures.setdefault(index, RowFailure(index, "the executor returned no token"))
        if len(output.token_ids) > 1 + row.num_drafts:
            failures.setdefault(index, RowFailure(index, "the executor returned too many tokens"))
        if row.pools and output.embedding is None:
            failures.setdefault(index, RowFailure(index, "the executor returned no embedding"))
        if len(output.prompt_logprobs) != row.num_scored:
            failures.setdefault(index, RowFailure(index, "the executor did not score the prompt"))
    return failures


def pending_tokens(steps: Iterable[InFlightStep]) -> Counter[str]:
    """How many tokens the steps in flight will emit, by sequence id."""
    return Counter(
        entry.sequence.sequence_id
        for step in steps
        for entry in step.rows
        if entry.row.emits and not entry.residency.invalidated
    )


def invalidated_by(
    failed: Iterable[FlightRow], in_flight: Iterable[FlightRow], block_size: int
) -> set[int]:
    """Mark residencies in flight whose KV depends on failed rows; return all invalid blocks.

    A residency's blocks are invalid from its first failed position on; so are the blocks that any
    other residency computed after one of them, and so on.
    """
    blocks: set[int] = set()
    for entry in failed:
        entry.residency.invalidated = True
        blocks.update(entry.residency.blocks[entry.row.start // block_size :])
    valid = [entry.residency for entry in in_flight if not entry.residency.invalidated]
    num_known = -1
    while len(blocks) > num_known:
        num_known = len(blocks)
        for residency in valid:
            table = residency.blocks
            first = next((i for i, block_id in enumerate(table) if block_id in blocks), None)
            writer = None if residency.state is None else residency.state.depends_on()
            if writer is not None and writer.invalidated:
                first = 0  # nothing says how many of its blocks it computed itself
            if first is not None:
                residency.invalidated = True
                residency.pending = 0
                blocks.update(table[first:])
    return blocks
