"""The second driver of the scheduler: a list of arrivals on a virtual clock.

The same `Scheduler` as in the engine, an executor that only takes time, and this loop. Arrivals go
in, per-sequence timings and the step log come out. Nothing waits, nothing is random.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from quickstep.core.cost_model import CostModel
from quickstep.core.scheduler import Scheduler
from quickstep.errors import RequestError
from quickstep.sim.clock import ClockExecutor, ClockTicket, VirtualClock
from quickstep.types import (
    FinishReason,
    Request,
    SequenceOutput,
    SequenceTimings,
    StepPlan,
    StepRecord,
)

__all__ = ["Arrival", "Ending", "Simulation", "simulate"]


class Arrival(msgspec.Struct, frozen=True):
    """A request, and when it comes. Its output length is `sampling.max_tokens`."""

    at_s: float
    request: Request


class Ending(msgspec.Struct, frozen=True):
    """How one simulated sequence ended."""

    request_id: str
    index: int
    reason: FinishReason
    timings: SequenceTimings


class Simulation(msgspec.Struct):
    """What came out: endings in their order, the step log, and what was refused and why."""

    endings: list[Ending] = msgspec.field(default_factory=list)
    records: list[StepRecord] = msgspec.field(default_factory=list)
    refused: list[tuple[str, str]] = msgspec.field(default_factory=list)
    finished_s: float = 0.0


class _Run:
    """One simulation under way."""

    def __init__(self, arrivals: Iterable[Arrival], scheduler: Scheduler, costs: CostModel) -> None:
        self.clock = VirtualClock()
        self.outcome = Simulation()
        self._arrivals = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
        self._scheduler = scheduler
        self._executor = ClockExecutor(self.clock, costs)
        self._in_flight: deque[tuple[StepPlan, ClockTicket]] = deque()

    def happen(self) -> None:
        """Everything that is due now: arrivals, deadlines, finished steps, new steps."""
        now = self.clock.now
        while self._arrivals and self._arrivals[0].at_s <= now:
            request = self._arrivals.popleft().request
            try:
                self._scheduler.add(request, now)
            except RequestError as error:
                self.outcome.refused.append((request.request_id, str(error)))
        while self._in_flight and self._in_flight[0][1].done():
            plan, ticket = self._in_flight.popleft()
            step = self._scheduler.commit(plan, ticket.result(), now)
            self.outcome.records.append(step.record)
            self._note(step.outputs)
        self._note(self._scheduler.expire(now))
        plan_now = self._scheduler.plan(now)
        while plan_now is not None:
            self._in_flight.append((plan_now, self._executor.submit(plan_now)))
            plan_now = self._scheduler.plan(now)

    def next_event_s(self) -> float | None:
        """When something happens next; None when all is over."""
        times = [self._scheduler.wakeup(self.clock.now)] if self._scheduler.has_work() else []
        times.append(self._arrivals[0].at_s if self._arrivals else None)
        times.append(self._in_flight[0][1].ready_at_s if self._in_flight else None)
        return min((time for time in times if time is not None), default=None)

    def _note(self, outputs: tuple[SequenceOutput, ...]) -> None:
        for output in outputs:
            if output.finish_reason is not None and output.timings is not None:
                ending = Ending(
                    output.request_id, output.index, output.finish_reason, output.timings
                )
                self.outcome.endings.append(ending)


def simulate(
    arrivals: Iterable[Arrival], scheduler: Scheduler, cost_model: CostModel
) -> Simulation:
    """Run a fresh scheduler over `arrivals`; steps take what `cost_model` says.

    Give the scheduler a cost model of its own: it learns, the true one does not change.
    """
    run = _Run(arrivals, scheduler, cost_model)
    event_s = run.next_event_s()
    while event_s is not None:
        run.clock.now = max(run.clock.now, event_s)
        run.happen()
        event_s = run.next_event_s()
    run.outcome.finished_s = run.clock.now
    return run.outcome
