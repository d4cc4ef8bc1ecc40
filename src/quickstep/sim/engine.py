"""An engine on a virtual clock: the real scheduler, and an executor that computes nothing.

A step takes as long as a cost model says. Nothing waits, nothing is random. Tokens are all the
same, so that only `max_tokens` and the context limit end a sequence.
"""

from __future__ import annotations

import heapq
from collections import deque
from struct import Struct

import msgspec
from msgspec.structs import replace

from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.overhead import ScaledCosts, StageTimes
from quickstep.core.scheduler import Scheduler
from quickstep.sim.drafts import SimulatedDrafts
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.types import (
    RowOutput,
    SamplingParams,
    SequenceOutput,
    StepPlan,
    StepRecord,
    StepResult,
    StepRow,
    TokenLogprobs,
)

_TOKEN_ID = 0
_pack_hash = Struct("q").pack
_ONE_STAGE = StageTimes()
_ROUNDED = 1.0 - 1e-9  # a sum of step times is at least that part of their product


def quick_digest(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    """A digest of blocks for pools of one simulation: a fifth of the time of `chain_digest`. Its
    values differ from process to process; the pool compares tokens on a hit.
    """
    return _pack_hash(hash((parent, token_ids)))


class VirtualClock(msgspec.Struct):
    """Simulated time in seconds. Owned by the simulation's loop."""

    now: float = 0.0


class ClockTicket(msgspec.Struct, frozen=True):
    """A step that ends at `ready_at_s`."""

    clock: VirtualClock
    ready_at_s: float
    outcome: StepResult

    def done(self) -> bool:
        """Whether the clock has reached the end of the step."""
        return self.clock.now >= self.ready_at_s

    def result(self) -> StepResult:
        """The result of the step; waiting for it moves the clock."""
        self.clock.now = max(self.clock.now, self.ready_at_s)
        return self.outcome


class ClockExecutor:
    """Runs steps one after the other on a virtual clock, through the stages of a pipeline if there
    are several: each computes one step at a time.

    `cost_model`: Seconds of all stages together. `pads`: All rows of a step take as long as its
    longest. `slowdown` multiplies the time of the steps that are submitted from now on. `drafts`:
    What proposes tokens.
    """

    def __init__(
        self,
        clock: VirtualClock,
        cost_model: CostModel,
        pads: bool = False,
        drafts: SimulatedDrafts | None = None,
        stages: StageTimes = _ONE_STAGE,
    ) -> None:
        self.slowdown = 1.0
        self._stages = stages
        self._stage_free_at_s = [0.0] * stages.num_stages
        self._drafts = drafts
        self._clock = clock
        self._cost_model = cost_model
        self._pads = pads
        self._free_at_s = 0.0
        self._sampling: dict[int, SamplingParams] = {}  # by slot

    def submit(self, plan: StepPlan) -> ClockTicket:
        """Start the step when those before it are done."""
        for admission in plan.admitted:
            self._sampling[admission.slot] = admission.sampling
        computed = padded(plan) if self._pads else plan
        seconds = self._cost_model.seconds(StepLoad.of_plan(computed, self._sampling))
        drafted: dict[int, RowOutput] = {}
        if self._drafts is not None:
            drafted, drafts_s = self._drafts.step(plan, seconds, _TOKEN_ID)
            seconds += drafts_s
        seconds *= self.slowdown
        outputs = tuple(map(_output, plan.rows))
        if drafted:
            outputs = tuple([drafted.get(place, one) for place, one in enumerate(outputs)])
        if self._stages.num_stages > 1:
            return self._passed(plan, outputs, seconds)
        self._free_at_s = max(self._clock.now, self._free_at_s) + seconds
        result = StepResult(plan.step_id, outputs, seconds)
        return ClockTicket(self._clock, self._free_at_s, result)

    def _passed(
        self, plan: StepPlan, outputs: tuple[RowOutput, ...], seconds: float
    ) -> ClockTicket:
        """A step that passes all stages."""
        stage_s = tuple([seconds * part for part in self._stages.parts])
        at_s = self._clock.now
        for stage, own_s in enumerate(stage_s):
            at_s += self._stages.hop_s if stage else 0.0
            at_s = max(at_s, self._stage_free_at_s[stage]) + own_s
            self._stage_free_at_s[stage] = at_s
        at_s += self._stages.overhead_s
        self._stage_free_at_s[-1] = at_s
        mean_s = seconds / len(stage_s)
        result = StepResult(plan.step_id, outputs, mean_s, stage_s=stage_s)
        return ClockTicket(self._clock, at_s, result)

    def ran_until(self, time_s: float) -> None:
        """Steps that were not submitted here took until then."""
        self._free_at_s = time_s

    def wait_until_captured(self, timeout_s: float | None = None) -> bool:
        """There is nothing to record."""
        return True

    def close(self) -> None:
        """There is nothing to free; for the protocol `Executor`."""


class SimulatedEngine:
    """One engine. It acts only when it is called; `next_s` says when that is due.

    `scheduler`: A `GroupedScheduler` is faster, with the same result. `adapter_load_s`: How long
    the load of a LoRA adapter takes. `cost_model`, `drafts` and `stages`: As of `ClockExecutor`.
    """

    def __init__(
        self,
        clock: VirtualClock,
        scheduler: Scheduler,
        cost_model: CostModel,
        pads: bool = False,
        adapter_load_s: float = 0.0,
        step_by_step: bool = False,
        drafts: SimulatedDrafts | None = None,
        stages: StageTimes = _ONE_STAGE,
    ) -> None:
        self.scheduler = scheduler
        self._grouped = scheduler if isinstance(scheduler, GroupedScheduler) else None
        if self._grouped is not None and not (pads or step_by_step):
            self._grouped.group_decodes(_TOKEN_ID)
        self.executor = ClockExecutor(clock, cost_model, pads, drafts, stages)
        self.records: list[StepRecord] = []
        self._clock = clock
        self.cost_model = cost_model
        # as the scheduler measures them: of the mean stage
        num_stages = stages.num_stages
        self.reported_costs: CostModel = cost_model
        if num_stages > 1:
            self.reported_costs = ScaledCosts(cost_model, 1.0 / num_stages)
        self.adapter_load_s = adapter_load_s
        self._loads: list[tuple[float, str]] = []  # when an adapter is in memory; a heap
        self._in_flight: deque[tuple[StepPlan, ClockTicket]] = deque()

    def finish_steps(self) -> list[SequenceOutput]:
        """Take what is over by now: loads of adapters, steps, deadlines."""
        now = self._clock.now
        outputs: list[SequenceOutput] = []
        while self._loads and self._loads[0][0] <= now:
            self.scheduler.adapter_loaded(heapq.heappop(self._loads)[1], now)
        while self._in_flight and self._in_flight[0][1].done():
            plan, ticket = self._in_flight.popleft()
            step = self.scheduler.commit(plan, ticket.result(), now)
            self.records.append(step.record)
            outputs += step.outputs
        outputs += self.scheduler.expire(now)
        return outputs

    def skip_decodes(self, until_s: float) -> tuple[SequenceOutput, ...] | None:
        """Advance, with the clock, the steps that only decode, until one ends a sequence or would
        end after `until_s`; None if the next step is not of that kind.
        """
        until_s = min(until_s, self._loads[0][0]) if self._loads else until_s
        now = self._clock.now
        if self._grouped is None:
            return None
        steps = self._grouped.decode_stretch(now, until_s, self.cost_model)
        if not steps.records:
            return None
        self._clock.now = steps.records[-1].committed_at_s
        self.executor.ran_until(self._clock.now)
        self.records += steps.records
        return steps.outputs

    def quiet_until_s(self) -> float | None:
        """Until when at least it only decodes, ends no sequence and has no deadline, if nothing
        happens to it; None if that is not known for its next step. Its steps until then can be
        computed later, by `skip_decodes` before anything else.
        """
        if self._grouped is None or self._loads or self.executor.slowdown != 1.0:
            return None
        now = self._clock.now
        quiet_s = self._grouped.min_decode_stretch_s(self.cost_model)
        if not quiet_s:
            return None
        until_s = now + _ROUNDED * quiet_s
        wakeup_s = self.scheduler.wakeup(now)
        return until_s if wakeup_s is None else min(until_s, wakeup_s)

    def start_steps(self) -> None:
        """Plan and start as many steps as may be in flight."""
        now = self._clock.now
        plan = self._planned(now)
        while plan is not None:
            self._in_flight.append((plan, self.executor.submit(plan)))
            plan = self._planned(now)

    def _planned(self, now: float) -> StepPlan | None:
        """The next step, after the loads of adapters that the scheduler wants have begun."""
        plan = self.scheduler.plan(now)
        orders = self.scheduler.take_adapter_orders()
        for adapter_id in orders.loads if orders is not None else ():
            heapq.heappush(self._loads, (now + self.adapter_load_s, adapter_id))
        return plan

    def next_s(self) -> float | None:
        """The time at which something is over or due; None if it has nothing to do."""
        now = self._clock.now
        wakeup_s = self.scheduler.wakeup(now) if self.scheduler.has_work() else None
        # what was due now was done; a policy that waits for a step in flight may still say now
        times = [] if wakeup_s is None or wakeup_s <= now else [wakeup_s]
        if self._loads:
            times.append(self._loads[0][0])
        if self._in_flight:
            times.append(self._in_flight[0][1].ready_at_s)
        return min(times, default=None)


def padded(plan: StepPlan) -> StepPlan:
    """The step that tensors of shape (rows, longest row) compute: all rows are padded to one shape.

    It has as many tokens in every row, and attends to as long a context.
    """
    if not plan.rows:
        return plan
    num_tokens = max(row.num_tokens for row in plan.rows)
    start = max(row.end for row in plan.rows) - num_tokens
    rows = (replace(row, start=start, num_tokens=num_tokens) for row in plan.rows)
    return replace(plan, rows=tuple(rows))


def _output(row: StepRow) -> RowOutput:
    """The output that the row must have, without content."""
    score = TokenLogprobs(_TOKEN_ID, 0.0, 1)
    return RowOutput(
        token_ids=(_TOKEN_ID,) if row.emits else (),
        prompt_logprobs=(score,) * row.num_scored,
        embedding=() if row.pools else None,
    )
