"""The second driver of the scheduler: a list of arrivals on a virtual clock.

The same `Scheduler` as in the engine, an executor that computes nothing (a step takes as long as
the cost model says), and this loop. Arrivals go in, per-sequence timings and the step log come out;
`Follow` adds the requests that a client sends after an answer. Nothing waits, nothing is random.
Tokens are all the same, so that only `max_tokens` and the context limit end a sequence.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.scheduler import Scheduler
from quickstep.errors import RequestError
from quickstep.types import (
    FinishReason,
    Request,
    RowOutput,
    SamplingParams,
    SequenceOutput,
    SequenceTimings,
    StepPlan,
    StepRecord,
    StepResult,
    StepRow,
    TokenLogprobs,
)

__all__ = [
    "Arrival",
    "ClockExecutor",
    "ClockTicket",
    "Ending",
    "Follow",
    "Progress",
    "Simulation",
    "VirtualClock",
    "padded",
    "simulate",
]

_TOKEN_ID = 0


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
    """Runs steps one after the other on a virtual clock.

    `pads`: All rows of a step take as long as its longest.
    """

    def __init__(self, clock: VirtualClock, cost_model: CostModel, pads: bool = False) -> None:
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
        self._free_at_s = max(self._clock.now, self._free_at_s) + seconds
        outputs = tuple(map(_output, plan.rows))
        result = StepResult(plan.step_id, outputs, seconds)
        return ClockTicket(self._clock, self._free_at_s, result)

    def ran_until(self, time_s: float) -> None:
        """Steps that were not submitted here took until then."""
        self._free_at_s = time_s

    def close(self) -> None:
        """There is nothing to free; for the protocol `Executor`."""


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


class Arrival(msgspec.Struct, frozen=True):
    """A request and its arrival time. Its output length is `sampling.max_tokens`.

    `cancel_after_s`: The client cancels it so many seconds after its arrival; None never.
    """

    at_s: float
    request: Request
    cancel_after_s: float | None = None


class Ending(msgspec.Struct, frozen=True):
    """How one simulated sequence ended."""

    request_id: str
    index: int
    reason: FinishReason
    timings: SequenceTimings
    tenant: str = ""


class _EndOfLoad(msgspec.Struct, frozen=True):
    """A LoRA adapter is in memory from then on."""

    adapter_id: str


# Called with the number of sequences that have ended.
Progress = Callable[[int], None]

# What a client does after one of its sequences has ended: its next requests.
Follow = Callable[[Ending], Iterable[Arrival]]


class Simulation(msgspec.Struct):
    """The result: endings in their order, the step log, and refused requests with the reason."""

    endings: list[Ending] = msgspec.field(default_factory=list)
    records: list[StepRecord] = msgspec.field(default_factory=list)
    refused: list[tuple[str, str]] = msgspec.field(default_factory=list)
    finished_s: float = 0.0


class _Run:
    """One simulation in progress."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        scheduler: Scheduler,
        costs: CostModel,
        follow: Follow | None,
        pads: bool,
        step_by_step: bool,
        adapter_load_s: float,
        progress: Progress | None,
    ) -> None:
        self.clock = VirtualClock()
        self.outcome = Simulation()
        self._follow = follow
        self._scheduler = scheduler
        self._costs = costs
        self._executor = ClockExecutor(self.clock, costs, pads)
        self._skips = not (pads or step_by_step)
        self._adapter_load_s = adapter_load_s
        self._progress = progress
        self._tenants: dict[str, str] = {}  # of live requests that have one
        self._in_flight: deque[tuple[StepPlan, ClockTicket]] = deque()
        # (time, number of the event, what happens: a string is the request to cancel)
        self._events: list[tuple[float, int, Arrival | _EndOfLoad | str]] = []
        self._num_events = 0
        for arrival in arrivals:
            self._schedule(arrival.at_s, arrival)

    def _schedule(self, at_s: float, event: Arrival | _EndOfLoad | str) -> None:
        heapq.heappush(self._events, (at_s, self._num_events, event))
        self._num_events += 1

    def advance(self) -> None:
        """Do everything that is due now: clients, deadlines, finished steps, new steps."""
        now = self.clock.now
        while self._events and self._events[0][0] <= now:
            self._handle(heapq.heappop(self._events)[2], now)
        while self._in_flight and self._in_flight[0][1].done():
            plan, ticket = self._in_flight.popleft()
            step = self._scheduler.commit(plan, ticket.result(), now)
            self.outcome.records.append(step.record)
            self._record_endings(step.outputs)
        self._record_endings(self._scheduler.expire(now))
        if self._skips:
            now = self._skip_decodes(now)
        plan_now = self._planned(now)
        while plan_now is not None:
            self._in_flight.append((plan_now, self._executor.submit(plan_now)))
            plan_now = self._planned(now)

    def _planned(self, now: float) -> StepPlan | None:
        """The next step, after the loads of adapters that the scheduler wants have begun."""
        plan = self._scheduler.plan(now)
        orders = self._scheduler.take_adapter_orders()
        for adapter_id in orders.loads if orders is not None else ():
            self._schedule(now + self._adapter_load_s, _EndOfLoad(adapter_id))
        return plan

    def _skip_decodes(self, now: float) -> float:
        """Advance the steps that only decode, until something else happens; returns the time."""
        while True:
            next_s = self._events[0][0] if self._events else math.inf
            steps = self._scheduler.decode_stretch(now, next_s, self._costs, _TOKEN_ID)
            if not steps.records:
                return now
            now = self.clock.now = steps.records[-1].committed_at_s
            self._executor.ran_until(now)
            self.outcome.records += steps.records
            self._record_endings(steps.outputs)

    def _handle(self, event: Arrival | _EndOfLoad | str, now: float) -> None:
        if isinstance(event, str):
            self._record_endings(self._scheduler.abort(event, now))
            return
        if isinstance(event, _EndOfLoad):
            self._scheduler.adapter_loaded(event.adapter_id, now)
            return
        request = event.request
        try:
            self._scheduler.add(request, now)
        except RequestError as error:
            self.outcome.refused.append((request.request_id, str(error)))
            return
        if request.tenant:
            self._tenants[request.request_id] = request.tenant
        if event.cancel_after_s is not None:
            self._schedule(now + event.cancel_after_s, request.request_id)

    def next_event_s(self) -> float | None:
        """The time of the next event; None at the end."""
        now = self.clock.now
        wakeup_s = self._scheduler.wakeup(now) if self._scheduler.has_work() else None
        # what was due now was done; a policy that waits for a step in flight may still say now
        times = [None if wakeup_s is None or wakeup_s <= now else wakeup_s]
        times.append(self._events[0][0] if self._events else None)
        times.append(self._in_flight[0][1].ready_at_s if self._in_flight else None)
        return min((time for time in times if time is not None), default=None)

    def _record_endings(self, outputs: tuple[SequenceOutput, ...]) -> None:
        for output in outputs:
            if output.finish_reason is not None and output.timings is not None:
                ending = Ending(
                    output.request_id,
                    output.index,
                    output.finish_reason,
                    output.timings,
                    self._tenants.get(output.request_id, ""),
                )
                self.outcome.endings.append(ending)
                if self._progress is not None:
                    self._progress(len(self.outcome.endings))
                for arrival in self._follow(ending) if self._follow is not None else ():
                    self._schedule(max(arrival.at_s, self.clock.now), arrival)


def simulate(
    arrivals: Iterable[Arrival],
    scheduler: Scheduler,
    cost_model: CostModel,
    follow: Follow | None = None,
    pads: bool = False,
    step_by_step: bool = False,
    adapter_load_s: float = 0.0,
    progress: Progress | None = None,
) -> Simulation:
    """Run a new scheduler over `arrivals`; `cost_model` gives the duration of a step.

    `follow` is called at the end of each sequence and returns what its client requests next.
    `pads`: every row of a step costs as much as its longest (`padded`), to show what packed rows
    save. `step_by_step` does not advance steps that only decode in one go, which changes nothing
    but the time that it takes. `adapter_load_s`: how long the load of a LoRA adapter takes, if
    adapters are a resource of the scheduler.

    Give the scheduler a cost model of its own: that one learns, this one does not change. For a
    machine that was measured, both are `LinearCostModel.of_fit` of its stored fit
    (`engine.cost_fits`, `quickstep calibrate`).
    """
    run = _Run(
        arrivals, scheduler, cost_model, follow, pads, step_by_step, adapter_load_s, progress
    )
    event_s = run.next_event_s()
    while event_s is not None:
        run.clock.now = max(run.clock.now, event_s)
        run.advance()
        event_s = run.next_event_s()
    endings = run.outcome.endings
    run.outcome.finished_s = max((one.timings.finished_s for one in endings), default=0.0)
    return run.outcome
