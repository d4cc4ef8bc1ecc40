"""Fallback chains on a virtual clock: what a server would have tried for each request.

`core.fallback` decides, as in a server. Each model of a route is an engine of its own, and an
upstream answers after times that are given. Nothing fails here, so that chains are entered for full
queues, for first tokens that are predicted to be late, and for prompts that are too long.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from quickstep.core.fallback import Cause, ChainProgress, Refuse, Route, Upstream, cause_of
from quickstep.errors import RequestError
from quickstep.sim.engine import SimulatedEngine, VirtualClock
from quickstep.sim.outcome import Arrival, Ending, Follow, Progress, Simulation
from quickstep.sim.window import CountedWindow
from quickstep.types import FinishReason, Request, SequenceOutput, SequenceTimings

StepCounts = Counter[tuple[str, str]]  # by step and cause


class UpstreamTimes(msgspec.Struct, frozen=True):
    """How soon other servers answer, whatever the load: the first token, and each one after it."""

    first_token_s: float = 0.5
    token_s: float = 0.02


class _Live(msgspec.Struct):
    """A request that has not ended: as it came, when, and how far it is in its chain."""

    arrival: Arrival
    arrived_s: float
    chain: ChainProgress


class _Answer(msgspec.Struct, frozen=True):
    """The end of an upstream's answer."""

    live: _Live
    started_s: float
    num_tokens: int


class FallbackRun:
    """One simulation of a route; its step log is that of the model which the requests name.

    Args:
        engines: By the model's name; the first one is that which the requests name.
        follow, progress, window: As in `simulate`.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        clock: VirtualClock,
        engines: Mapping[str, SimulatedEngine],
        route: Route,
        upstream: UpstreamTimes,
        follow: Follow | None = None,
        progress: Progress | None = None,
        window: CountedWindow | None = None,
    ) -> None:
        self._clock = clock
        self._engines = engines
        self._name = next(iter(engines))
        self._route = route
        self._upstream = upstream
        self._follow = follow
        self._progress = progress
        self._window = window
        self._live: dict[str, _Live] = {}
        self._events: list[tuple[float, int, Arrival | _Answer | str]] = []  # as in `simulate`
        self._num_events = 0
        self._outcome = Simulation()
        self.counts: StepCounts = Counter()
        for arrival in arrivals:
            self._schedule(arrival.at_s, arrival)

    def run(self) -> Simulation:
        """Run until all requests have ended, or the window is over."""
        while (event_s := self._next_event_s()) is not None:
            self._clock.now = max(self._clock.now, event_s)
            self._advance()
        outcome, endings = self._outcome, self._outcome.endings
        outcome.records = self._engines[self._name].records
        outcome.finished_s = max((ending.timings.finished_s for ending in endings), default=0.0)
        outcome.fallbacks = dict(self.counts)
        return outcome

    def _next_event_s(self) -> float | None:
        if self._window is not None and self._window.is_over(self._clock.now):
            return None
        times = [engine.next_s() for engine in self._engines.values()]
        times.append(self._events[0][0] if self._events else None)
        return min((time for time in times if time is not None), default=None)

    def _schedule(self, at_s: float, event: Arrival | _Answer | str) -> None:
        heapq.heappush(self._events, (at_s, self._num_events, event))
        self._num_events += 1

    def _advance(self) -> None:
        now = self._clock.now
        while self._events and self._events[0][0] <= now:
            match heapq.heappop(self._events)[2]:
                case Arrival() as arrival:
                    self._arrive(arrival, now)
                case _Answer() as answer:
                    self._answered(answer, now)
                case str(request_id):
                    self._cancel(request_id, now)
        for engine in self._engines.values():
            self._ended(engine.finish_steps())
        for engine in self._engines.values():
            engine.start_steps()

    def _arrive(self, arrival: Arrival, now: float) -> None:
        request = arrival.request
        if self._window is not None:
            self._window.arrived(now, request.sampling.n)
        chain = ChainProgress(self._route, self._name)
        live = self._live[request.request_id] = _Live(arrival, now, chain)
        if arrival.cancel_after_s is not None:
            self._schedule(now + arrival.cancel_after_s, request.request_id)
        self._attempt(live, now)

    def _attempt(self, live: _Live, now: float) -> None:
        """Try the request as the chain says, and further steps while it is refused."""
        while True:
            request = live.chain.applied(live.arrival.request)
            step = live.chain.step
            if isinstance(step, Upstream):
                num_tokens = request.sampling.max_tokens or 1
                answer_s = self._upstream.first_token_s + (num_tokens - 1) * self._upstream.token_s
                self._schedule(now + answer_s, _Answer(live, now, num_tokens))
                return
            request = replace(request, received_s=live.arrived_s)
            try:
                self._engines[live.chain.model].scheduler.add(request, now)
            except RequestError as error:
                if self._enter(live, cause_of(error), now):
                    continue
                self._refuse(live, str(error), now)
            return

    def _enter(self, live: _Live, cause: Cause | None, now: float) -> bool:
        """Enter the next step; False if the request is refused."""
        if cause is None:
            return False
        first_byte_s = {
            step.url: self._upstream.first_token_s
            for step in self._route.steps
            if isinstance(step, Upstream)
        }
        step = live.chain.enter(cause, self._left_s(live, now), (), first_byte_s)
        if step is None:
            return False
        self.counts[str(step), cause.value] += 1
        return not isinstance(step, Refuse)

    @staticmethod
    def _left_s(live: _Live, now: float) -> float | None:
        request = live.arrival.request
        limits = [request.ttft_deadline_s, request.timeout_s]
        left = [live.arrived_s + limit - now for limit in limits if limit is not None]
        return min(left, default=None)

    def _refuse(self, live: _Live, error: str, now: float) -> None:
        request = live.arrival.request
        del self._live[request.request_id]
        self._outcome.refused.append((request.request_id, error))
        if self._window is not None:
            self._window.refused(now, request.sampling.n)

    def _cancel(self, request_id: str, now: float) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        if isinstance(live.chain.step, Upstream):
            self._end(live, FinishReason.ABORTED, self._timings(live.arrival.request, live, now))
        else:
            self._ended(self._engines[live.chain.model].scheduler.abort(request_id, now))

    def _ended(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            reason, timings = output.finish_reason, output.timings
            live = self._live.get(output.request_id)
            if reason is None or timings is None or live is None:
                continue
            now, is_only = self._clock.now, live.arrival.request.sampling.n == 1
            # no byte was sent: it has waited in the queue for as long as it may
            if reason is FinishReason.SHED and is_only and self._enter(live, Cause.DEADLINE, now):
                self._attempt(live, now)
                continue
            self._end(live, reason, timings, output.index)

    def _answered(self, answer: _Answer, now: float) -> None:
        live = answer.live
        if self._live.get(live.arrival.request.request_id) is not live:
            return  # its client has cancelled it
        timings = replace(
            self._timings(live.arrival.request, live, now),
            first_token_s=answer.started_s + self._upstream.first_token_s,
            num_output_tokens=answer.num_tokens,
        )
        for index in live.arrival.request.indices:
            self._end(live, FinishReason.MAX_TOKENS, timings, index)

    @staticmethod
    def _timings(request: Request, live: _Live, now: float) -> SequenceTimings:
        num_tokens = len(request.prompt_token_ids)
        return SequenceTimings.of_unknown(num_tokens, live.arrived_s, now)

    def _end(
        self, live: _Live, reason: FinishReason, timings: SequenceTimings, index: int = 0
    ) -> None:
        request = live.arrival.request
        timings = replace(timings, arrival_s=live.arrived_s)
        ending = Ending(request.request_id, index, reason, timings, request.tenant)
        self._outcome.endings.append(ending)
        if index == request.indices[-1]:
            self._live.pop(request.request_id, None)
        if self._window is not None:
            self._window.ended(ending)
        if self._progress is not None:
            self._progress(len(self._outcome.endings))
        for arrival in self._follow(ending) if self._follow is not None else ():
            self._schedule(max(arrival.at_s, self._clock.now), arrival)
