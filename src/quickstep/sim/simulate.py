"""The second driver of the scheduler: a list of arrivals on a virtual clock.

The same `Scheduler` as in the engine (`sim.engine`) and this loop. Arrivals go in, per-sequence
timings and the step log come out; `Follow` adds the requests that a client sends after an answer.
`sim.replicas` has several engines.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quickstep.core.cost_model import CostModel
from quickstep.core.overhead import StageTimes
from quickstep.core.scheduler import Scheduler
from quickstep.errors import RequestError
from quickstep.sim.drafts import SimulatedDrafts
from quickstep.sim.engine import SimulatedEngine, VirtualClock
from quickstep.sim.outcome import Arrival, Ending, Follow, Progress, Simulation
from quickstep.types import SequenceOutput

if TYPE_CHECKING:
    from quickstep.sim.window import CountedWindow


class _Run:
    """One simulation in progress."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        clock: VirtualClock,
        engine: SimulatedEngine,
        follow: Follow | None,
        progress: Progress | None,
        window: CountedWindow | None,
    ) -> None:
        self.outcome = Simulation(records=engine.records)
        self._clock = clock
        self._engine = engine
        self._follow = follow
        self._progress = progress
        self._window = window
        self._tenants: dict[str, str] = {}  # of live requests that have one
        # (time, number of the event, what happens: a string is the request to cancel)
        self._events: list[tuple[float, int, Arrival | str]] = []
        self._num_events = 0
        for arrival in arrivals:
            self._schedule(arrival.at_s, arrival)

    def _schedule(self, at_s: float, event: Arrival | str) -> None:
        heapq.heappush(self._events, (at_s, self._num_events, event))
        self._num_events += 1

    def advance(self) -> None:
        """Do everything that is due now: clients, deadlines, finished steps, new steps."""
        now = self._clock.now
        while self._events and self._events[0][0] <= now:
            self._handle(heapq.heappop(self._events)[2], now)
        self._record_endings(self._engine.finish_steps())
        outputs = self._engine.skip_decodes(self._next_client_s())
        while outputs is not None:
            self._record_endings(outputs)
            outputs = self._engine.skip_decodes(self._next_client_s())
        self._engine.start_steps()

    def _next_client_s(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def _handle(self, event: Arrival | str, now: float) -> None:
        scheduler = self._engine.scheduler
        if isinstance(event, str):
            self._record_endings(scheduler.abort(event, now))
            return
        request, num_sequences = event.request, event.request.sampling.n
        if self._window is not None:
            self._window.arrived(now, num_sequences)
        try:
            scheduler.add(request, now)
        except RequestError as error:
            self.outcome.refused.append((request.request_id, str(error)))
            if self._window is not None:
                self._window.refused(now, num_sequences)
            return
        if request.tenant:
            self._tenants[request.request_id] = request.tenant
        if event.cancel_after_s is not None:
            self._schedule(now + event.cancel_after_s, request.request_id)

    def next_event_s(self) -> float | None:
        """The time of the next event; None at the end."""
        if self._window is not None and self._window.is_over(self._clock.now):
            return None
        engine_s, client_s = self._engine.next_s(), self._next_client_s()
        next_s = client_s if engine_s is None else min(client_s, engine_s)
        return None if next_s == math.inf else next_s

    def _record_endings(self, outputs: Iterable[SequenceOutput]) -> None:
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
                if self._window is not None:
                    self._window.ended(ending)
                if self._progress is not None:
                    self._progress(len(self.outcome.endings))
                for arrival in self._follow(ending) if self._follow is not None else ():
                    self._schedule(max(arrival.at_s, self._clock.now), arrival)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Without the garbage collector: a simulation makes no cycles, and its many objects live until
    its end, which the collector would look through again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collector()
def simulate(
    arrivals: Iterable[Arrival],
    scheduler: Scheduler,
    cost_model: CostModel,
    follow: Follow | None = None,
    pads: bool = False,
    step_by_step: bool = False,
    adapter_load_s: float = 0.0,
    progress: Progress | None = None,
    drafts: SimulatedDrafts | None = None,
    window: CountedWindow | None = None,
    stages: StageTimes | None = None,
) -> Simulation:
    """Run a new scheduler over `arrivals`; `cost_model` gives the duration of a step.

    `follow` is called at the end of each sequence and returns what its client requests next.
    `pads`: every row of a step costs as much as its longest (`padded`), to show what packed rows
    save. `step_by_step` does not advance steps that only decode in one go, which changes nothing
    but the time that it takes. `adapter_load_s`: how long the load of a LoRA adapter takes, if
    adapters are a resource of the scheduler. `drafts`: what proposes tokens, if the scheduler asks
    for some. With a `window`, the simulation ends when its requests are known. `stages`: those of a
    pipeline, for a scheduler with as many.

    Give the scheduler a cost model of its own: that one learns, this one does not change. For a
    machine that was measured, both are `LinearCostModel.of_fit` of its stored fit
    (`engine.step_times.cost_fits`, `quickstep calibrate`).
    """
    clock = VirtualClock()
    engine = SimulatedEngine(
        clock,
        scheduler,
        cost_model,
        pads,
        adapter_load_s,
        step_by_step,
        drafts,
        stages or StageTimes(),
    )
    run = _Run(arrivals, clock, engine, follow, progress, window)
    event_s = run.next_event_s()
    while event_s is not None:
        clock.now = max(clock.now, event_s)
        run.advance()
        event_s = run.next_event_s()
    endings = run.outcome.endings
    run.outcome.finished_s = max((ending.timings.finished_s for ending in endings), default=0.0)
    return run.outcome
