"""`ReplicaRun`: engines that share requests through a router, on a virtual clock, with faults.

    client -> router -> message -> replica (scheduler, executor) -> message -> router -> client

Messages take `link_s`, in order in each direction. One that is lost is sent again after `resend_s`,
and those that follow wait, as over TCP. A replica that crashes loses what it holds and the messages
on their way; the router notices after `detect_s`, or when the replica is back, and sends what the
replica had to others, from the start. A request that no replica can take waits at the router.

Replicas of different roles hand KV over (`sim.replicas.handovers`). They have no faults yet.

All randomness is an argument, so that a run replays exactly.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from quickstep.core.router import ReplicaState, ReplicaView, Router, route_request
from quickstep.errors import RequestError
from quickstep.sim.outcome import Arrival, Ending, Follow, Progress, Simulation
from quickstep.sim.replicas.faults import (
    CancelStorm,
    ClockJump,
    Crash,
    Fault,
    LinkFault,
    SlowDown,
)
from quickstep.sim.replicas.handovers import BlocksSent, KVHandovers, KVLink
from quickstep.sim.replicas.replica import ReplicaOptions, ReplicaSpec, SimulatedReplica
from quickstep.types import FinishReason, Request, SequenceOutput, SequenceTimings

if TYPE_CHECKING:
    from random import Random

    from quickstep.sim.window import CountedWindow


class _Live(msgspec.Struct):
    """A request that has not ended for its client."""

    arrival: Arrival
    arrived_s: float
    replica: int | None = None  # where it is; None at the router
    num_there: int = 0  # of its sequences
    generation: int = 0  # of that replica
    ends: dict[int, Ending] = msgspec.field(default_factory=dict)  # of its sequences


class _Submit(msgspec.Struct, frozen=True):
    request: Request
    arrived_s: float  # at the router


class _Cancel(msgspec.Struct, frozen=True):
    request_id: str


class _Begun(msgspec.Struct, frozen=True):
    """A replica has computed a prompt; another one continues the request."""

    request_id: str
    target: int
    request: Request


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
    content: _Submit | _Cancel | _Begun | _Ended | _Refused


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


_Event = (
    Arrival | _Message | _Detected | _Restart | BlocksSent | _EndOfSlowDown | _CancelOne | Fault
)


class ReplicaRun:
    """One simulation of replicas. `run` it once.

    Args:
        arrivals: As in `simulate`, and so are `follow`, `progress` and `window`.
        specs: A replica each; those that prefill come first.
        rng: Of what is lost and cancelled.
        kv_link: Between replicas of different roles.
        check: Called after every event: for tests.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        specs: Sequence[ReplicaSpec],
        router: Router,
        rng: Random,
        faults: Iterable[Fault] = (),
        options: ReplicaOptions | None = None,
        kv_link: KVLink | None = None,
        follow: Follow | None = None,
        progress: Progress | None = None,
        window: CountedWindow | None = None,
        check: Callable[[ReplicaRun], None] | None = None,
    ) -> None:
        options = options or ReplicaOptions()
        self.now = 0.0
        self.outcome = Simulation(num_replicas=len(specs))
        self.live: dict[str, _Live] = {}
        self._router = router
        self._options = options
        self._follow = follow
        self._progress = progress
        self._window = window
        self._check = check
        self._rng = rng
        self.replicas = [SimulatedReplica(spec, options, rng) for spec in specs]
        self.handovers: KVHandovers | None = None
        if kv_link is not None:
            self.handovers = KVHandovers(kv_link, self.replicas, self._touch)
        # What the router knows of the replicas, and how often each crashed.
        self.views = [ReplicaView() for _ in specs]
        self._known_generation = [0] * len(specs)
        # When each replica acts by itself, or now, if something has happened to it; the heap may
        # have older times, too.
        self._due_s = [math.inf] * len(specs)
        self._due: list[tuple[float, int]] = []
        self._reported_idle: set[int] = set()  # and got nothing since
        # When replicas report to a router that predicts, in that order.
        self._reports = deque([(0.0, place) for place in range(len(specs))])
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
            self._advance()
            if self._check is not None:
                self._check(self)
            next_s = self._next_s()
        for replica in self.replicas:  # of a run that ends early
            replica.catch_up(self.now)
        outcome = self.outcome
        records = [record for replica in self.replicas for record in replica.records]
        outcome.records = sorted(records, key=lambda record: record.committed_at_s)
        outcome.finished_s = max(
            (ending.timings.finished_s for ending in outcome.endings), default=0.0
        )
        if self.handovers is not None:
            outcome.handovers = self.handovers.stats(outcome.finished_s)
        return outcome

    def _next_s(self) -> float | None:
        if self._window is not None and self._window.is_over(self.now):
            return None
        due = self._due
        while due and due[0][0] != self._due_s[due[0][1]]:
            heapq.heappop(due)
        next_s = due[0][0] if due else math.inf
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

    def _advance(self) -> None:
        """Finish and start the steps of the replicas that are due."""
        due = self._take_due()
        for place in due:
            replica = self.replicas[place]
            if replica.is_up:
                replica.set_clock(self.now)
                self._report(place, replica.engine.finish_steps())
        for place in due:
            replica = self.replicas[place]
            if replica.is_up:
                replica.start_steps()
            next_s = replica.next_s()
            self._set_due(place, math.inf if next_s is None else next_s)
        for place in due:
            self._follow_orders(place)

    def _set_due(self, place: int, due_s: float) -> None:
        self._due_s[place] = due_s
        if due_s != math.inf:
            heapq.heappush(self._due, (due_s, place))

    def _take_due(self) -> list[int]:
        """The replicas that act now, in order."""
        found = set()
        while self._due and self._due[0][0] <= self.now:
            due_s, place = heapq.heappop(self._due)
            if due_s == self._due_s[place]:
                found.add(place)
        return sorted(found)

    def _touch(self, place: int) -> float:
        """A replica is about to be changed; returns its time."""
        self._reported_idle.discard(place)
        self._set_due(place, self.now)
        return self.replicas[place].set_clock(self.now)

    def _follow_orders(self, place: int) -> None:
        """Send the KV that the scheduler of a replica has ordered to be sent."""
        if self.handovers is not None:
            for at_s, sent in self.handovers.follow_orders(place, self.now):
                self._schedule(at_s, sent)

    def _report(self, place: int, outputs: Iterable[SequenceOutput]) -> None:
        """Send the ends of sequences to the router, and requests that another replica continues."""
        replica, handovers = self.replicas[place], self.handovers
        for output in outputs:
            if handovers is not None:
                handovers.computed(output)
            if output.finish_reason is not None:
                replica.ended(output.request_id)
                self._send_end(place, output)
        if handovers is not None:
            for name in handovers.take_begun():
                self._send_begun(handovers, place, name)

    def _send_begun(self, handovers: KVHandovers, place: int, name: str) -> None:
        replica = self.replicas[place]
        now = replica.clock.now
        aborted = replica.engine.scheduler.abort(name, now)
        del replica.held[name]
        target, request = handovers.continuation(name, aborted)
        self._send_up(place, _Begun(name, target, request))

    def _send_end(self, place: int, end: SequenceOutput) -> None:
        assert end.finish_reason is not None and end.timings is not None, "it has ended"
        timings = end.timings
        if self.handovers is not None:
            timings = self.handovers.joined(end.request_id, end.index, timings)
        timings = _shifted(timings, -self.replicas[place].offset_s)
        self._send_up(place, _Ended(end.request_id, end.index, end.finish_reason, timings))

    def _take(self, index: int, content: _Submit | _Cancel) -> None:
        """A message has arrived at a replica."""
        replica = self.replicas[index]
        self._set_due(index, self.now)
        now = replica.set_clock(self.now)
        scheduler = replica.engine.scheduler
        if isinstance(content, _Cancel):
            outputs = scheduler.abort(content.request_id, now)
            if self.handovers is not None:
                self._report(index, outputs)
            replica.held.pop(content.request_id, None)
            return
        request = replace(content.request, received_s=content.arrived_s + replica.offset_s)
        try:
            scheduler.add(request, now)
        except RequestError as error:
            self._send_up(index, _Refused(request.request_id, str(error)))
            return
        replica.held[request.request_id] = len(request.indices)

    # -- messages -----------------------------------------------------------------------------

    def _send_down(self, index: int, generation: int, content: _Submit | _Cancel) -> None:
        at_s = self.replicas[index].down_link.arrival_s(self.now)
        self._send(at_s, _Message(index, generation, content))

    def _send_up(self, index: int, content: _Begun | _Ended | _Refused) -> None:
        replica = self.replicas[index]
        at_s = replica.up_link.arrival_s(self.now)
        self._send(at_s, _Message(index, replica.generation, content))

    def _send(self, at_s: float, message: _Message) -> None:
        """A message without latency arrives at once."""
        if at_s > self.now:
            self._schedule(at_s, message)
        else:
            self._deliver(message)

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
            case BlocksSent():
                assert self.handovers is not None, "it was sent"
                self.handovers.arrive(event, self.now)
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
            self._sequence_ended(message.replica, content)
        elif isinstance(content, _Begun):
            self._continue(content)
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
        if not any(view.is_up for view in self.views):
            self._waiting[name] = None
            return
        if self._router.predicts or self.handovers is not None:
            self._take_reports()
        live = self.live[name]
        request = live.arrival.request
        if self.handovers is None:
            routed = route_request(request, self._router)
            place = self._router.choose(routed, self.views, self.now)
        else:
            assignment = self.handovers.assign(request, self.views, self._router, self.now)
            place = assignment.engine
            if assignment.continues_at is not None:
                request = self.handovers.divide(request, assignment.continues_at)
        self._submit(live, place, request)

    def _submit(self, live: _Live, place: int, request: Request) -> None:
        """Send a request to a replica."""
        live.replica, live.generation = place, self._known_generation[place]
        live.num_there = len(request.indices)
        self._reported_idle.discard(place)
        view = self.views[place]
        self.views[place] = replace(
            view, num_live=view.num_live + 1, num_sent=view.num_sent + live.num_there
        )
        self._send_down(place, live.generation, _Submit(request, live.arrived_s))

    def _continue(self, begun: _Begun) -> None:
        """Send a request on to the replica that continues it."""
        live = self.live.get(begun.request_id)
        if live is not None:
            self._leave_all(live)
            self._submit(live, begun.target, begun.request)

    def _take_reports(self) -> None:
        """Renew what the router knows of the replicas, as far as they report now."""
        reports, every_s = self._reports, self._options.report_s
        while reports and reports[0][0] <= self.now:
            _, place = reports.popleft()
            reports.append((self.now + every_s, place))
            view, replica = self.views[place], self.replicas[place]
            engine, reported_at_s = replica.engine, view.reported_at_s
            if reported_at_s is not None and self.now < reported_at_s + every_s:
                reports.pop()  # it has reported out of its turn, and has another one
                continue
            if not replica.is_up:
                continue
            if place in self._reported_idle:
                self.views[place] = replace(view, reported_at_s=self.now)
                continue
            transfers = engine.scheduler.held.transfers
            if not (replica.held or (transfers is not None and transfers.are_open)):
                self._reported_idle.add(place)
            adapters = engine.scheduler.held.adapters
            self.views[place] = replace(
                view,
                admission=engine.scheduler.admission_state(replica.clock.now),
                reported_at_s=self.now,
                num_sent=0,
                num_blocks=engine.scheduler.num_blocks,
                num_free_blocks=engine.scheduler.num_free_blocks,
                costs=engine.reported_costs,
                adapters=frozenset(() if adapters is None else adapters.residency.held),
                adapter_load_s=engine.adapter_load_s,
            )

    def _take_live(self, name: str) -> _Live | None:
        """Remove a request that ends now; None if it has ended already."""
        live = self.live.pop(name, None)
        if live is not None:
            self._leave_all(live)
        return live

    def _leave(self, place: int, live: _Live) -> None:
        """A sequence of a request has ended at a replica, if it was there."""
        if live.replica == place and live.num_there > 1:
            live.num_there -= 1
        elif live.replica == place:
            self._leave_all(live)

    def _leave_all(self, live: _Live) -> None:
        """No sequence of a request is at a replica."""
        if live.replica is not None and live.num_there:
            view = self.views[live.replica]
            self.views[live.replica] = replace(view, num_live=view.num_live - 1)
        live.num_there = 0

    def _sequence_ended(self, place: int, end: _Ended) -> None:
        live = self.live.get(end.request_id)
        if live is None:
            return
        self._leave(place, live)
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
        if self.handovers is not None:
            self.handovers.forget(live.arrival.request)
        self.outcome.refused.append((refused.request_id, refused.problem))
        if self._window is not None:
            self._window.refused(live.arrived_s, live.arrival.request.sampling.n)

    def _cancel(self, name: str) -> None:
        live = self.live.get(name)
        if live is not None and live.replica is not None:
            self._send_down(live.replica, live.generation, _Cancel(name))
        live = self._take_live(name)
        if live is None:  # it had ended, or its replica has answered at once
            return
        self._waiting.pop(name, None)
        request = live.arrival.request
        if self.handovers is not None:
            self.handovers.forget(request)
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
            self._set_state(index, ReplicaState.DOWN)
        lost = [
            name
            for name, live in self.live.items()
            if live.replica == index and live.generation <= generation
        ]
        for name in lost:
            live = self.live[name]
            self._leave_all(live)
            live.replica = None
            live.ends.clear()
        for name in lost:
            self.outcome.num_resent += 1
            self._route(name)

    def _restart(self, index: int) -> None:
        replica = self.replicas[index]
        self._set_due(index, self.now)
        replica.is_up = True
        self._set_state(index, ReplicaState.UP)
        self._router.lost_cache(index)
        self._known_generation[index] = replica.generation
        self._lose(index, replica.generation - 1)
        waiting, self._waiting = self._waiting, {}
        for name in waiting:
            self._route(name)

    def _set_state(self, index: int, state: ReplicaState) -> None:
        self.views[index] = replace(self.views[index], state=state, reported_at_s=None)
        self._reported_idle.discard(index)
        self._reports.appendleft((self.now, index))

    # -- faults -------------------------------------------------------------------------------

    def _catch_up(self, index: int) -> SimulatedReplica:
        """A replica to which something happens now."""
        replica = self.replicas[index]
        replica.catch_up(self.now)
        self._set_due(index, self.now)
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
