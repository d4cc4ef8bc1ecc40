"""`GroupedScheduler`: the scheduler for simulations, which plans plain decode rows as a group.

A driver that computes nothing needs no list of rows: see `decode_group`. Everything that it decides
and reports is equal to the last bit to what `Scheduler` gives, in a part of the time; this is
tested. It overrides where rows are placed and received, and where sequences leave.
"""

from __future__ import annotations

from collections import Counter

from quickstep.core.accounting import StepCharges, UnitTicks, decode_record
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.core.sequence import Sequence, SequenceState
from quickstep.core.step import FlightRow, InFlightStep, StepDraft
from quickstep.sim.decode_group import DecodeGroup, DecodeSteps
from quickstep.types import (
    RowOutput,
    SequenceOutput,
    SequenceTimings,
    StepPlan,
    StepRecord,
    StepResult,
)


class GroupedScheduler(Scheduler):
    """A scheduler whose driver may have decode rows grouped, by `group_decodes`."""

    _group: DecodeGroup | None = None

    @property
    def pool(self) -> KVBlockPool:
        """The block pool, for a driver that hands KV over."""
        return self._pool

    @property
    def max_num_seqs(self) -> int:
        """The most sequences that run at once."""
        return self._config.max_num_seqs

    def group_decodes(self, token_id: int) -> None:
        """Plan decode rows without listing them, where nothing depends on them: for a driver that
        computes nothing and gets `token_id` for each row, so none of them fails. Call it before the
        first request.
        """
        config = self._config
        if (
            config.num_in_flight == 1
            and config.use_kv_cache
            and not self._drafts.max_drafts
            and not self._order.takes_turns
        ):
            self._group = DecodeGroup(self._pool, token_id)

    def decode_stretch(self, now: float, until_s: float, machine: CostModel) -> DecodeSteps:
        """Plan and commit steps of grouped rows only, one after the other, in one go.

        Equal to `plan` and, when the step is over by `machine`, `commit`, again and again until a
        step ends a sequence, would not end before `until_s`, or needs a decision. It does nothing
        if the first step is not that simple.
        """
        group, costs = self._group, self._cost_model
        if group is None or not self._has_only(group):
            return DecodeSteps()
        records: list[StepRecord] = []
        outputs: list[SequenceOutput] = []
        deadline_s = self._deadlines.next_s()
        until_s = until_s if deadline_s is None else min(until_s, deadline_s)
        while not outputs:
            load = group.load
            seconds = machine.seconds(load)
            end_s = now + seconds
            if not end_s < until_s or group.num_new_blocks > self._pool.num_free:
                break
            predicted_s = seconds if costs is machine else costs.seconds(load)
            self._slots.take_released()
            group.plan(self._in_flight.next_id)
            prices = UnitTicks.divide(seconds, costs.unit_prices(load), load)
            costs.observe(load, seconds)
            outputs = self._commit_group(group, prices, end_s)
            self._blocks.step_ended()
            self._totals.add_step(seconds, end_s - self._accounts.since_s)
            self._accounts.since_s = end_s
            records.append(
                decode_record(
                    self._in_flight.next_id,
                    now,
                    end_s,
                    seconds,
                    predicted_s,
                    load,
                    prices,
                    num_free_blocks=self._pool.num_free,
                    num_running=len(self._batch),
                )
            )
            self._in_flight.next_id += 1
            now = end_s
        return DecodeSteps(tuple(records), tuple(outputs))

    def min_decode_stretch_s(self, machine: CostModel) -> float:
        """For how long at least `decode_stretch` would take steps that end no sequence, if nothing
        else happens; 0.0 if the next step is not of that kind. Step times grow with the context.
        """
        group = self._group
        if group is None or not self._has_only(group):
            return 0.0
        num_steps = group.num_steps_without_end(self._pool.num_free)
        return num_steps * machine.seconds(group.load) if num_steps else 0.0

    def timings(self, request_id: str, now: float) -> dict[int, SequenceTimings]:
        """See `Scheduler.timings`."""
        self._settle()
        return super().timings(request_id, now)

    def fail(self, plan: StepPlan, reason: str, now: float) -> tuple[SequenceOutput, ...]:
        """See `Scheduler.fail`."""
        assert not plan.num_grouped_rows, "a step that is not computed has failed"
        return super().fail(plan, reason, now)

    def check(self) -> None:
        """See `Scheduler.check`."""
        self._settle()
        super().check()

    def _has_only(self, group: DecodeGroup) -> bool:
        """Whether the next step has the rows of the group, and nothing else."""
        return (
            not self._in_flight
            and not self._waiting
            and 0 < len(group) <= self._config.max_num_batched_tokens
            and len(group) == len(self._batch)
        )

    def _settle(self) -> None:
        if self._group is not None:
            self._group.settle()

    def _set_paused(self, request_id: str, is_paused: bool, now: float) -> None:
        if self._group is not None:
            for sequence in self._requests.get(request_id, ()):
                self._group.leave_after_step(sequence)
        super()._set_paused(request_id, is_paused, now)

    def _place_decodes(self, draft: StepDraft, budget: int, now: float) -> None:
        if not self._group or not self._place_group(self._group, draft, budget):  # none, or empty
            super()._place_decodes(draft, budget, now)

    def _place_group(self, group: DecodeGroup, draft: StepDraft, budget: int) -> bool:
        """Place the rows of the group, if they are all that decode, and are not to be chosen from.
        Else it is dissolved, and its rows are listed.
        """
        num_decoding = self._batch.num_active - len(self._batch.prefilling)
        # the step has the end of their prompts already, with policies that place prefill first
        num_decoding -= sum(
            [
                sequence.residency.planned >= sequence.residency.prefill_end
                for sequence in draft.prefill
            ]
        )
        is_free = group.num_new_blocks <= self._pool.num_free
        if len(group) == num_decoding and len(group) <= budget and is_free:
            draft.add_group(group.load)
            group.plan(self._in_flight.next_id)
            return True
        if budget > 0:
            group.dissolve()
        return False

    def _expected_growth(self) -> int:
        self._settle()
        return super()._expected_growth()

    def _leave_batch(self, sequence: Sequence) -> None:
        if self._group is not None:
            self._group.leave(sequence)
        super()._leave_batch(sequence)

    def _unlisted_load(self) -> StepLoad:
        assert self._group is not None
        return self._group.load

    def _receive_rows(
        self, step: InFlightStep, result: StepResult, charges: StepCharges, now: float
    ) -> list[SequenceOutput]:
        ended: list[SequenceOutput] = []
        if self._group is not None and step.plan.num_grouped_rows:
            ended = self._commit_group(self._group, charges.prices, now)
        return ended + super()._receive_rows(step, result, charges, now)

    def _receive(self, entry: FlightRow, output: RowOutput, now: float) -> SequenceOutput | None:
        new = super()._receive(entry, output, now)
        sequence = entry.sequence
        is_running = sequence.state is SequenceState.RUNNING
        if self._group is not None and is_running and not entry.residency.invalidated:
            self._group.join(sequence)
        return new

    def _commit_group(
        self, group: DecodeGroup, prices: UnitTicks, now: float
    ) -> list[SequenceOutput]:
        """Take the results of the rows that are not listed; returns the ends."""
        self._totals.num_output_tokens += len(group)
        return [
            self._finish(
                sequence,
                sequence.length_reason,
                now,
                new=SequenceOutput(
                    sequence.request.request_id, sequence.index, (sequence.token_ids[-1],)
                ),
            )
            for sequence in group.commit(prices)
        ]

    def _pending_tokens(self) -> Counter[str]:
        pending = super()._pending_tokens()
        if self._group is not None:
            pending.update(self._group.pending_tokens())
        return pending
