"""Replicas of an engine that share requests through a router, on a virtual clock, with faults.

    client -> router -> message -> replica (scheduler, executor) -> message -> router -> client

Messages take `link_s`, in order in each direction. One that is lost is sent again after `resend_s`,
and those that follow wait, as over TCP. A replica that crashes loses what it holds and the messages
on their way; the router notices after `detect_s`, or when the replica is back, and sends what the
replica had to others, from the start. A request that no replica can take waits at the router.

All randomness is an argument, so that a run replays exactly.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from quickstep.errors import RequestError
from quickstep.sim.engine import SimulatedEngine, VirtualClock
from quickstep.sim.faults import CancelStorm, ClockJump, Crash, Fault, LinkFault, SlowDown
from quickstep.sim.outcome import Arrival, Ending, Follow, Progress, Simulation
from quickstep.sim.routers import Router
from quickstep.types import (
    FinishReason,
    Request,
    SequenceOutput,
    SequenceTimings,
    StepRecord,
)

if TYPE_CHECKING:
    from random import Random

    from quickstep.sim.window import CountedWindow

__all__ = ["NewEngine", "ReplicaOptions", "ReplicaRun"]

# A new engine of a replica, on its clock.
NewEngine = Callable[[VirtualClock], SimulatedEngine]


class ReplicaOptions(msgspec.Struct, frozen=True):
    """Times in seconds between router and replicas."""

    link_s: float = 0.0005
    resend_s: float = 0.2
    detect_s: float = 1.0


class _Live(msgspec.Struct):
    """A request that has not ended for its client."""

    arrival: Arrival
    arrived_s: float
    replica: int | None = None  # where it is; None at the router
    generation: int = 0  # of that replica
    ends: dict[int, Ending] = msgspec.field(default_factory=dict)  # of its sequences


class _Submit(msgspec.Struct, frozen=True):
    request: Request
    arrived_s: float  # at the router


class _Cancel(msgspec.Struct, frozen=True):
    request_id: str


class _Ended(msgspec.Struct, frozen=True):
    request_id: str
    index: int
    reason: FinishReason
    timings: SequenceTimings


class _Refused(msgspec.Struct, frozen=True):
    request_id: str
    problem: str


class _Message(msgspec.Struct, frozen=True):
    """On its way to or from a replica; dropped if that has crashed meanwhile."""

    replica: int
    generation: int
    content: _Submit | _Cancel | _Ended | _Refused


class _Detected(msgspec.Struct, frozen=True):
    """The router knows that a generation of a replica is gone."""

    replica: int
    generation: int


class _Restart(msgspec.Struct, frozen=True):
    replica: int


class _EndOfSlowDown(msgspec.Struct, frozen=True):
    fault: SlowDown


class _CancelOne(msgspec.Struct, frozen=True):
    request_id: str


_Event = Arrival | _Message | _Detected | _Restart | _EndOfSlowDown | _CancelOne | Fault


class _Link:
    """One direction between router and replica: in order, so nothing overtakes what is late."""

    def __init__(self, options: ReplicaOptions, rng: Random) -> None:
        self._options = options
        self._rng = rng
        self._last_s = 0.0
        self.faults: list[LinkFault] = []

    def arrival_s(self, now: float) -> float:
        """When a message that is sent now arrives."""
        at_s, sent_s = now + self._options.link_s, now
        active = [fault for fault in self.faults if fault.at_s <= now < fault.at_s + fault.for_s]
        at_s += sum(one.delay_s for one in active)
        while any(
            fault.at_s <= sent_s < fault.at_s + fault.for_s and self._rng.random() < fault.loss
            for fault in self.faults
        ):
            sent_s += self._options.resend_s
            at_s += self._options.resend_s
        self._last_s = max(self._last_s, at_s)
        return self._last_s


class _Replica:
    """An engine with its own clock, and what the driver knows about it."""

    def __init__(self, make_engine: NewEngine, links: tuple[_Link, _Link]) -> None:
        self._make_engine = make_engine
        self.down_link, self.up_link = links
        self.clock = VirtualClock()
        self.offset_s = 0.0  # of its clock
        self.generation = 0
        self.is_up = True
        self.slow_downs: list[float] = []
        self.held: dict[str, int] = {}  # live sequences of each request here
        self.engine = make_engine(self.clock)
        self.past_records: list[StepRecord] = []  # of engines that have crashed
        # Its steps until then were put off: its clock is at the end of the last step before them.
        self.quiet_until_s: float | None = None

    def crash(self) -> float:
        """Lose everything; returns the device seconds of the requests that it held."""
        scheduler = self.engine.scheduler
        lost_s = sum(
            output.timings.device_s
            for name in self.held
            for output in scheduler.abort(name, self.clock.now)
            if output.timings is not None
        )
        self.past_records += self.engine.records
        self.is_up = False
        self.generation += 1
        self.held.clear()
        self.engine = self._make_engine(self.clock)
        self._set_pace()
        return lost_s

    def begin_slow_down(self, factor: float) -> None:
        """Slow its steps down; several slow-downs at the same time multiply."""
        self.slow_downs.append(factor)
        self._set_pace()

    def end_slow_down(self, factor: float) -> None:
        """End one that has begun."""
        self.slow_downs.remove(factor)
        self._set_pace()

    def _set_pace(self) -> None:
        self.engine.executor.slowdown = math.prod(self.slow_downs)

    def start_steps(self) -> None:
        """Start the next step, or put it off, with those after it that nothing outside depends on:
        `catch_up` computes them in one go. With its clock off, their times would be rounded twice.
        """
        self.quiet_until_s = None if self.offset_s else self.engine.quiet_until_s()
        if self.quiet_until_s is None:
            self.engine.start_steps()

    def catch_up(self, now: float) -> None:
        """Compute the steps that were put off, and start the one that runs at `now`."""
        if self.quiet_until_s is not None:
            self.quiet_until_s = None
            outputs = self.engine.skip_decodes(now)
            assert not outputs, "a sequence ended in a step that was put off"
            self.engine.start_steps()

    def set_clock(self, now: float) -> float:
        """Set and return its time, at the time `now` of the run."""
        self.catch_up(now)
        due_s = self.engine.next_s()
        times = [self.clock.now, now + self.offset_s]
        if due_s is not None and due_s - self.offset_s <= now:
            times.append(due_s)  # which the sum above may miss by a rounding
        self.clock.now = max(times)
        return self.clock.now

    def next_s(self) -> float | None:
        """When it acts by itself, on the clock of the run."""
        if self.quiet_until_s is not None:
            return self.quiet_until_s
        next_s = self.engine.next_s()
        return None if next_s is None or not self.is_up else next_s - self.offset_s


class ReplicaRun:
    """One simulation of replicas. `run` it once.

    Args:
        arrivals: As in `simulate`, and so are `follow`, `progress` and `window`.
        make_engine: A new engine on a clock, for a replica, and for one that has crashed.
        rng: Of what is lost and cancelled.
        check: Called after every event: for tests.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        num_replicas: int,
        make_engine: NewEngine,
        router: Router,
        rng: Random,
        faults: Iterable[Fault] = (),
        options: ReplicaOptions | None = None,
        follow: Follow | None = None,
        progress: Progress | None = None,
        window: CountedWindow | None = None,
        check: Callable[[ReplicaRun], None] | None = None,
    ) -> None:
        options = options or ReplicaOptions()
        self.now = 0.0
        self.outcome = Simulation(num_replicas=num_replicas)
        self.live: dict[str, _Live] = {}
        self._router = router
        self._options = options
        self._follow = follow
        self._progress = progress
        self._window = window
        self._check = check
        self._rng = rng
        self.replicas = [
            _Replica(make_engine, (_Link(options, self._rng), _Link(options, self._rng)))
            for _ in range(num_replicas)
        ]
        # What the router believes: whether a replica is up, and how often it has crashed.
        self._believed_up = [True] * num_replicas
        self._believed_generation = [0] * num_replicas
        # When each replica acts by itself, or now, if something has happened to it.
        self._due_s = [math.inf] * num_replicas
        self.num_live = [0] * num_replicas  # requests that the router has sent to each
        self._waiting: dict[str, None] = {}  # requests at the router, in their order
        self._events: list[tuple[float, int, _Event]] = []
        self._num_events = 0
        for event in (*arrivals, *faults):
            self._schedule(event.at_s, event)

    def _schedule(self, at_s: float, event: _Event) -> None:
        heapq.heappush(self._events, (max(at_s, self.now), self._num_events, event))
        self._num_events += 1

    def run(self) -> Simulation:
        """Until nothing is left to happen. Records are those of all replicas, by their ends."""
        next_s = self._next_s()
        while next_s is not None:
            self.now = max(self.now, next_s)
            while self._events and self._events[0][0] <= self.now:
                self._handle(heapq.heappop(self._events)[2])
            for index, due_s in enumerate(self._due_s):
                if due_s <= self.now:
                    self._advance(index, self.replicas[index])
            if self._check is not None:
                self._check(self)
            next_s = self._next_s()
        for replica in self.replicas:  # of a run that ends early
            replica.catch_up(self.now)
        outcome = self.outcome
        records = [
            record for one in self.replicas for record in (*one.past_records, *one.engine.records)
        ]
        outcome.records = sorted(records, key=lambda record: record.committed_at_s)
        outcome.finished_s = max(
            (ending.timings.finished_s for ending in outcome.endings), default=0.0
        )
        return outcome

    def _next_s(self) -> float | None:
        if self._window is not None and self._window.is_over(self.now):
            return None
        next_s = min(self._due_s)
        if self._events:
            next_s = min(next_s, self._events[0][0])
        return None if math.isinf(next_s) else next_s

    def on_the_way(self) -> Iterable[str]:
        """The requests of messages that have not arrived: for tests."""
        for _, _, event in self._events:
            if isinstance(event, _Message):
                content = event.content
                yield (
                    content.request.request_id
                    if isinstance(content, _Submit)
                    else content.request_id
                )

    # -- replicas -----------------------------------------------------------------------------

    def _advance(self, index: int, replica: _Replica) -> None:
        if replica.is_up:
            replica.set_clock(self.now)
            self._report(index, replica.engine.finish_steps())
            replica.start_steps()
        next_s = replica.next_s()
        self._due_s[index] = math.inf if next_s is None else next_s

    def _report(self, index: int, outputs: Iterable[SequenceOutput]) -> None:
        """Send the ends of sequences to the router."""
        replica = self.replicas[index]
        for output in outputs:
            if output.finish_reason is None or output.timings is None:
                continue
            name = output.request_id
            replica.held[name] -= 1
            if not replica.held[name]:
                del replica.held[name]
            timings = _shifted(output.timings, -replica.offset_s)
            self._send_up(index, _Ended(name, output.index, output.finish_reason, timings))

    def _take(self, index: int, content: _Submit | _Cancel) -> None:
        """A message has arrived at a replica."""
        replica = self.replicas[index]
        self._due_s[index] = self.now
        now = replica.set_clock(self.now)
        scheduler = replica.engine.scheduler
        if isinstance(content, _Cancel):
            scheduler.abort(content.request_id, now)
            replica.held.pop(content.request_id, None)
            return
        request = replace(content.request, received_s=content.arrived_s + replica.offset_s)
        try:
            scheduler.add(request, now)
        except RequestError as error:
            self._send_up(index, _Refused(request.request_id, str(error)))
        else:
            replica.held[request.request_id] = request.sampling.n

    # -- messages -----------------------------------------------------------------------------

    def _send_down(self, index: int, generation: int, content: _Submit | _Cancel) -> None:
        at_s = self.replicas[index].down_link.arrival_s(self.now)
        self._schedule(at_s, _Message(index, generation, content))

    def _send_up(self, index: int, content: _Ended | _Refused) -> None:
        replica = self.replicas[index]
        at_s = replica.up_link.arrival_s(self.now)
        self._schedule(at_s, _Message(index, replica.generation, content))

    def _handle(self, event: _Event) -> None:
        match event:
            case Arrival():
                self._arrive(event)
            case _Message():
                self._deliver(event)
            case _CancelOne():
                self._cancel(event.request_id)
            case _Detected():
                self._lose(event.replica, event.generation)
            case _Restart():
                self._restart(event.replica)
            case _EndOfSlowDown():
                self._catch_up(event.fault.replica).end_slow_down(event.fault.factor)
            case _:
                self._fail(event)

    def _deliver(self, message: _Message) -> None:
        replica = self.replicas[message.replica]
        if not replica.is_up or replica.generation != message.generation:
            return
        content = message.content
        if isinstance(content, _Submit | _Cancel):
            self._take(message.replica, content)
        elif isinstance(content, _Ended):
            self._sequence_ended(content)
        else:
            self._refuse(content)

    # -- router -------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival) -> None:
        request = arrival.request
        self.live[request.request_id] = _Live(arrival, self.now)
        if self._window is not None:
            self._window.arrived(self.now, request.sampling.n)
        if arrival.cancel_after_s is not None:
            self._schedule(self.now + arrival.cancel_after_s, _CancelOne(request.request_id))
        self._route(request.request_id)

    def _route(self, name: str) -> None:
        if not any(self._believed_up):
            self._waiting[name] = None
            return
        live = self.live[name]
        loads = [
            count if is_up else None
            for count, is_up in zip(self.num_live, self._believed_up, strict=True)
        ]
        live.replica = self._router.choose(live.arrival.request, loads)
        live.generation = self._believed_generation[live.replica]
        self.num_live[live.replica] += 1
        self._send_down(
            live.replica, live.generation, _Submit(live.arrival.request, live.arrived_s)
        )

    def _take_live(self, name: str) -> _Live | None:
        """Remove a request that ends now; None if it has ended already."""
        live = self.live.pop(name, None)
        if live is not None and live.replica is not None:
            self.num_live[live.replica] -= 1
        return live

    def _sequence_ended(self, end: _Ended) -> None:
        live = self.live.get(end.request_id)
        if live is None:
            return
        request = live.arrival.request
        timings = replace(end.timings, arrival_s=live.arrived_s, finished_s=self.now)
        name, tenant = end.request_id, request.tenant
        live.ends[end.index] = Ending(name, end.index, end.reason, timings, tenant)
        if len(live.ends) == request.sampling.n:
            self._take_live(name)
            self._end(live.ends[index] for index in sorted(live.ends))

    def _end(self, endings: Iterable[Ending]) -> None:
        for ending in endings:
            self.outcome.endings.append(ending)
            if self._window is not None:
                self._window.ended(ending)
            if self._progress is not None:
                self._progress(len(self.outcome.endings))
            for arrival in self._follow(ending) if self._follow is not None else ():
                self._schedule(arrival.at_s, arrival)

    def _refuse(self, refused: _Refused) -> None:
        live = self._take_live(refused.request_id)
        if live is None:
            return
        self.outcome.refused.append((refused.request_id, refused.problem))
        if self._window is not None:
            self._window.refused(live.arrived_s, live.arrival.request.sampling.n)

    def _cancel(self, name: str) -> None:
        live = self._take_live(name)
        if live is None:
            return
        self._waiting.pop(name, None)
        if live.replica is not None:
            self._send_down(live.replica, live.generation, _Cancel(name))
        request = live.arrival.request
        # a request whose client cancelled it: what it received is not counted
        num_prompt = len(request.prompt_token_ids)
        timings = SequenceTimings.of_unknown(num_prompt, live.arrived_s, self.now)
        cancelled = (
            Ending(name, index, FinishReason.ABORTED, timings, request.tenant)
            for index in range(request.sampling.n)
        )
        self._end(live.ends.get(ending.index, ending) for ending in cancelled)

    def _lose(self, index: int, generation: int) -> None:
        """Send the requests of a replica that is gone elsewhere."""
        if self.replicas[index].generation == generation + 1 and not self.replicas[index].is_up:
            self._believed_up[index] = False
        lost = [
            name
            for name, live in self.live.items()
            if live.replica == index and live.generation <= generation
        ]
        for name in lost:
            live = self.live[name]
            live.replica = None
            live.ends.clear()
            self.num_live[index] -= 1
        for name in lost:
            self.outcome.num_resent += 1
            self._route(name)

    def _restart(self, index: int) -> None:
        replica = self.replicas[index]
        self._due_s[index] = self.now
        replica.is_up = self._believed_up[index] = True
        self._believed_generation[index] = replica.generation
        self._lose(index, replica.generation - 1)
        waiting, self._waiting = self._waiting, {}
        for name in waiting:
            self._route(name)

    # -- faults -------------------------------------------------------------------------------

    def _catch_up(self, index: int) -> _Replica:
        """A replica to which something happens now."""
        replica = self.replicas[index]
        replica.catch_up(self.now)
        self._due_s[index] = self.now
        return replica

    def _fail(self, fault: Fault) -> None:
        match fault:
            case Crash():
                replica = self._catch_up(fault.replica)
                if replica.is_up:
                    generation = replica.generation
                    self.outcome.lost_s += replica.crash()
                    lost = _Detected(fault.replica, generation)
                    self._schedule(self.now + self._options.detect_s, lost)
                    self._schedule(self.now + fault.down_s, _Restart(fault.replica))
            case SlowDown():
                self._catch_up(fault.replica).begin_slow_down(fault.factor)
                self._schedule(self.now + fault.for_s, _EndOfSlowDown(fault))
            case LinkFault():
                replica = self.replicas[fault.replica]
                for link in (replica.down_link, replica.up_link):
                    link.faults.append(fault)
            case ClockJump():
                self._catch_up(fault.replica).offset_s += fault.seconds
            case CancelStorm():
                for name in list(self.live):
                    if self._rng.random() < fault.part:
                        self._cancel(name)


def _shifted(timings: SequenceTimings, seconds: float) -> SequenceTimings:
    """The same on a clock that differs by so much."""
    scheduled_s, first_s = timings.first_scheduled_s, timings.first_token_s
    return replace(
        timings,
        arrival_s=timings.arrival_s + seconds,
        first_scheduled_s=None if scheduled_s is None else scheduled_s + seconds,
        first_token_s=None if first_s is None else first_s + seconds,
        finished_s=timings.finished_s + seconds,
        activities=(),
    )
