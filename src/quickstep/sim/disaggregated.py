"""Prefill and decode on different engines, on a virtual clock: the KV cache is handed over.

    client -> prefill engine (1 output) -> transfer of KV -> decode engine (all other outputs)

Both ends run the unchanged scheduler. The prefill engine gets the request with one output, which is
streamed at once. The decode engine gets a continuation, with the prompt and that output as its
prompt, after the prompt's full blocks have been registered in its pool as cached ones, so that the
scheduler finds them as a prefix hit; at most the tokens of the last, partly filled block are
computed again. Blocks that the decode engine has cached already are not sent.

Blocks are counted where they are: the prefill engine keeps those of a prompt until they are sent,
and the decode engine allocates them before. A prompt whose blocks no decode engine has room for
waits at its prefill engine. The blocks that wait for admission never fill a pool so far that the
longest sequence would not fit next to them: else the scheduler could admit nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from quickstep.core.resources.block_pool import BlockKey, ChainRoot, KVBlockPool
from quickstep.errors import RequestError
from quickstep.sim.engine import SimulatedEngine, VirtualClock
from quickstep.sim.outcome import Arrival, Ending, Follow, Handovers, Progress, Simulation
from quickstep.types import FinishReason, Request, SequenceOutput, SequenceTimings

__all__ = ["DisaggregatedRun", "KVLink", "NewPhaseEngine", "PhaseEngine"]


class KVLink(msgspec.Struct, frozen=True):
    """What hands KV over: bytes per second of one engine's link in one direction, seconds of each
    transfer in addition, and bytes of a token's KV.
    """

    bytes_per_s: float
    latency_s: float
    kv_bytes_per_token: int


class PhaseEngine(msgspec.Struct, eq=False):
    """An engine of one phase. Owned by `DisaggregatedRun`.

    Attributes:
        pool: That of the engine's scheduler.
        max_num_seqs: A decode engine takes no more.
        num_live: Sequences that were sent here and have not left.
        link_free_at_s: When its last transfer is over.
        tables: Blocks that transfers hold here, by sequence.
        longest: Blocks of the longest sequence that was sent here.
    """

    engine: SimulatedEngine
    pool: KVBlockPool
    max_num_seqs: int
    num_live: int = 0
    link_free_at_s: float = 0.0
    tables: dict[str, list[int]] = msgspec.field(default_factory=dict)
    longest: int = 0

    def hold(self, name: str, block_ids: list[int]) -> None:
        """Note the blocks of a transfer, which have a reference for it."""
        self.tables[name] = block_ids

    def release(self, name: str) -> None:
        """Give the blocks of a transfer back, if it still holds some."""
        self.pool.release(self.tables.pop(name, ()))


# A new engine of a phase, on a clock.
NewPhaseEngine = Callable[[VirtualClock], PhaseEngine]


class _Live(msgspec.Struct, eq=False):
    """A sequence that has not ended."""

    name: str  # of its continuation
    request: Request
    index: int
    prefill: PhaseEngine
    timings: SequenceTimings | None = None  # of the prefill
    decode: PhaseEngine | None = None
    first_tokens: tuple[int, ...] = ()
    num_sent_tokens: int = 0
    is_cancelled: bool = False  # while its KV is sent


class _Cancel(msgspec.Struct, frozen=True):
    request_id: str


class _Sent(msgspec.Struct, frozen=True, eq=False):
    live: _Live


class DisaggregatedRun:
    """One simulation. `run` it once.

    Args:
        arrivals: As in `simulate`, and so are `follow` and `progress`.
        check: Called after every event: for tests.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        new_prefill: NewPhaseEngine,
        num_prefill: int,
        new_decode: NewPhaseEngine,
        num_decode: int,
        link: KVLink,
        follow: Follow | None = None,
        progress: Progress | None = None,
        check: Callable[[DisaggregatedRun], None] | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.prefill = [new_prefill(self.clock) for _ in range(num_prefill)]
        self.decode = [new_decode(self.clock) for _ in range(num_decode)]
        self.outcome = Simulation(num_replicas=num_prefill + num_decode)
        self.live: dict[str, _Live] = {}  # by the name of the continuation
        self.waiting: deque[_Live] = deque()  # prefilled, and no decode engine has room
        self._link = link
        self._follow = follow
        self._progress = progress
        self._check = check
        self._num_sent = 0
        self._sent_tokens = 0
        self._handover_s = 0.0
        self._events: list[tuple[float, int, Arrival | _Cancel | _Sent]] = []
        self._num_events = 0
        for arrival in arrivals:
            self._schedule(arrival.at_s, arrival)

    def _schedule(self, at_s: float, event: Arrival | _Cancel | _Sent) -> None:
        heapq.heappush(self._events, (max(at_s, self.clock.now), self._num_events, event))
        self._num_events += 1

    def run(self) -> Simulation:
        """Until nothing is left to happen. Records are those of all engines, by their ends."""
        engines = (*self.prefill, *self.decode)
        next_s = self._next_s(engines)
        while next_s is not None:
            self.clock.now = max(self.clock.now, next_s)
            while self._events and self._events[0][0] <= self.clock.now:
                self._handle(heapq.heappop(self._events)[2])
            for one in self.prefill:
                self._prefilled(one, one.engine.finish_steps())
            for one in self.decode:
                self._decoded(one.engine.finish_steps())
            self._hand_over()
            for engine in engines:
                engine.engine.start_steps()
            for one in self.decode:
                self._release_admitted(one)
            if self._check is not None:
                self._check(self)
            next_s = self._next_s(engines)
        return self._finished(engines)

    def _next_s(self, engines: Iterable[PhaseEngine]) -> float | None:
        times = [engine.engine.next_s() for engine in engines]
        times.append(self._events[0][0] if self._events else None)
        return min((time for time in times if time is not None), default=None)

    def _finished(self, engines: Iterable[PhaseEngine]) -> Simulation:
        outcome = self.outcome
        records = [record for engine in engines for record in engine.engine.records]
        outcome.records = sorted(records, key=lambda record: record.committed_at_s)
        outcome.finished_s = max(
            (ending.timings.finished_s for ending in outcome.endings), default=0.0
        )
        outcome.handovers = Handovers(
            self._num_sent,
            self._sent_tokens * self._link.kv_bytes_per_token,
            self._handover_s / self._num_sent if self._num_sent else 0.0,
            _busy(self.prefill, outcome.finished_s),
            _busy(self.decode, outcome.finished_s),
        )
        return outcome

    # -- clients --------------------------------------------------------------------------------

    def _handle(self, event: Arrival | _Cancel | _Sent) -> None:
        match event:
            case Arrival():
                self._arrive(event)
            case _Cancel():
                self._cancel(event.request_id)
            case _Sent():
                self._enter(event.live)

    def _arrive(self, arrival: Arrival) -> None:
        request, now = arrival.request, self.clock.now
        chosen = min(self.prefill, key=lambda one: one.num_live)
        most = request.sampling.max_tokens
        most = 1 if most is None else min(1, most)
        first = replace(request, sampling=replace(request.sampling, max_tokens=most))
        pool = self.decode[0].pool
        num_blocks = _whole_blocks(len(request.prompt_token_ids) + 2, pool)
        try:
            if num_blocks > pool.num_blocks:
                raise RequestError(
                    f"prompt has {len(request.prompt_token_ids)} tokens, the KV cache of a decode "
                    f"engine holds {pool.num_blocks * pool.block_size}"
                )
            chosen.engine.scheduler.add(first, now)
        except RequestError as error:
            self.outcome.refused.append((request.request_id, str(error)))
            return
        chosen.num_live += request.sampling.n
        for index in range(request.sampling.n):
            name = _name(request, index)
            self.live[name] = _Live(name, request, index, chosen)
        if arrival.cancel_after_s is not None:
            self._schedule(now + arrival.cancel_after_s, _Cancel(request.request_id))

    def _cancel(self, request_id: str) -> None:
        now = self.clock.now
        lives = [one for one in self.live.values() if one.request.request_id == request_id]
        for live in lives:
            if live.timings is None:
                outputs = live.prefill.engine.scheduler.abort(request_id, now, index=live.index)
                self._prefilled(live.prefill, outputs)
            elif live.decode is None:
                self.waiting.remove(live)
                live.prefill.release(live.name)
                self._end(live, FinishReason.ABORTED, _until(live.timings, now))
            elif live.name in live.prefill.tables:  # its KV is on the way
                live.is_cancelled = True
                self._end(live, FinishReason.ABORTED, _until(live.timings, now))
            else:
                self._decoded(live.decode.engine.scheduler.abort(live.name, now))

    def _end(self, live: _Live, reason: FinishReason, timings: SequenceTimings) -> None:
        del self.live[live.name]
        if live.timings is None:
            live.prefill.num_live -= 1
        request = live.request
        ending = Ending(request.request_id, live.index, reason, timings, request.tenant)
        self.outcome.endings.append(ending)
        if self._progress is not None:
            self._progress(len(self.outcome.endings))
        for arrival in self._follow(ending) if self._follow is not None else ():
            self._schedule(arrival.at_s, arrival)

    # -- from prefill to decode -----------------------------------------------------------------

    def _prefilled(self, source: PhaseEngine, outputs: Iterable[SequenceOutput]) -> None:
        """Take the first outputs; keep the blocks of those that continue until they are sent."""
        for output in outputs:
            if output.finish_reason is None or output.timings is None:
                continue
            live = self.live[f"{output.request_id}#{output.index}"]
            most = live.request.sampling.max_tokens
            is_over = most is not None and most <= 1
            if is_over or output.finish_reason is not FinishReason.MAX_TOKENS:
                self._end(live, output.finish_reason, output.timings)
                continue
            live.timings = output.timings
            live.first_tokens = output.token_ids
            source.num_live -= 1
            source.hold(live.name, _acquire_cached(source.pool, live.request))
            self.waiting.append(live)

    def _hand_over(self) -> None:
        """Send the KV of prompts to decode engines that have room, in the order of their ends."""
        while self.waiting:
            live = self.waiting[0]
            target = self._with_room(live.request)
            if target is None:
                return
            self.waiting.popleft()
            live.decode = target
            hits = _acquire_cached(target.pool, live.request)
            num_blocks = len(live.request.prompt_token_ids) // target.pool.block_size
            fresh = target.pool.allocate(num_blocks - len(hits))
            target.hold(live.name, [*hits, *fresh])
            target.num_live += 1
            target.longest = max(target.longest, _longest(live.request, target.pool))
            live.num_sent_tokens = len(fresh) * target.pool.block_size
            self._schedule(self._sent_at_s(live, target), _Sent(live))

    def _sent_at_s(self, live: _Live, target: PhaseEngine) -> float:
        """When the transfer is over; a link does one at a time in each direction."""
        source, link = live.prefill, self._link
        start_s = max(self.clock.now, source.link_free_at_s, target.link_free_at_s)
        num_bytes = live.num_sent_tokens * link.kv_bytes_per_token
        end_s = start_s + link.latency_s + num_bytes / link.bytes_per_s
        source.link_free_at_s = target.link_free_at_s = end_s
        return end_s

    def _with_room(self, request: Request) -> PhaseEngine | None:
        """The decode engine with the fewest requests of those that have room for one more."""
        for one in sorted(self.decode, key=lambda one: one.num_live):
            pool = one.pool
            num_blocks = len(request.prompt_token_ids) // pool.block_size
            hits = _cached(pool, request)
            num_fresh = num_blocks - len(hits)
            if not one.num_live:
                return one if num_fresh <= pool.num_free_besides(hits) else None
            longest = max(one.longest, _longest(request, pool))
            num_held = sum(map(len, one.tables.values()))
            has_room = (
                one.num_live < one.max_num_seqs
                and num_fresh + one.num_live <= pool.num_free_besides(hits)
                and num_held + num_blocks + longest <= pool.num_blocks
            )
            if has_room:
                return one
        return None

    def _enter(self, live: _Live) -> None:
        """The KV has arrived: continue at the decode engine."""
        target, timings = live.decode, live.timings
        assert target is not None and timings is not None, "the transfer has two ends"
        now, request = self.clock.now, live.request
        live.prefill.release(live.name)
        self._num_sent += 1
        self._sent_tokens += live.num_sent_tokens
        self._handover_s += now - timings.finished_s
        _register(target.pool, request, target.tables[live.name])
        if live.is_cancelled:
            target.release(live.name)
            target.num_live -= 1
            return
        try:
            target.engine.scheduler.add(_continuation(live, now), now)
        except RequestError as error:
            target.release(live.name)
            target.num_live -= 1
            del self.live[live.name]
            self.outcome.refused.append((request.request_id, str(error)))

    def _release_admitted(self, one: PhaseEngine) -> None:
        """Give the references of transfers back whose sequences have their own, oldest first."""
        for name in list(one.tables):
            of_request = one.engine.scheduler.timings(name, self.clock.now)
            if not of_request or of_request[0].first_scheduled_s is None:
                return  # its KV is on the way, or it waits
            one.release(name)

    def _decoded(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            if output.finish_reason is None or output.timings is None:
                continue
            live = self.live[output.request_id]
            assert live.decode is not None and live.timings is not None, "it was handed over"
            live.decode.release(live.name)
            live.decode.num_live -= 1
            self._end(live, output.finish_reason, _joined(live.timings, output.timings))


def _name(request: Request, index: int) -> str:
    """Of a sequence's continuation."""
    return f"{request.request_id}#{index}"


def _whole_blocks(num_tokens: int, pool: KVBlockPool) -> int:
    return -(-num_tokens // pool.block_size)


def _longest(request: Request, pool: KVBlockPool) -> int:
    """Blocks of a sequence of the request at its end, at most the pool's."""
    most = request.sampling.max_tokens
    if most is None:
        return pool.num_blocks
    return min(pool.num_blocks, _whole_blocks(len(request.prompt_token_ids) + most, pool))


def _digests(pool: KVBlockPool, request: Request) -> tuple[ChainRoot, list[bytes]]:
    """The root and the digests of the prompt's full blocks."""
    root, digests = ChainRoot(request.adapter_id, request.cache_salt), list[bytes]()
    tokens = request.prompt_token_ids
    pool.extend_digests(digests, root, tokens, len(tokens) // pool.block_size)
    return root, digests


def _cached(pool: KVBlockPool, request: Request) -> tuple[int, ...]:
    """The cached blocks of the prompt."""
    root, digests = _digests(pool, request)
    return pool.lookup(root, request.prompt_token_ids, digests).block_ids


def _acquire_cached(pool: KVBlockPool, request: Request) -> list[int]:
    """A reference to the cached blocks of the prompt."""
    hits = list(_cached(pool, request))
    pool.acquire(hits)
    return hits


def _register(pool: KVBlockPool, request: Request, block_ids: list[int]) -> None:
    """Index blocks that hold the prompt, so that the next lookup hits them."""
    root, digests = _digests(pool, request)
    parent: BlockKey | ChainRoot = root
    size = pool.block_size
    for place, (block_id, digest) in enumerate(zip(block_ids, digests, strict=True)):
        tokens = tuple(request.prompt_token_ids[place * size : (place + 1) * size])
        parent = pool.register(block_id, parent, tokens, digest)


def _continuation(live: _Live, now: float) -> Request:
    """What the decode engine gets: the prompt, its first output, and the rest of the limits."""
    request = live.request
    sampling = request.sampling
    most = None if sampling.max_tokens is None else sampling.max_tokens - 1
    timeout_s = request.timeout_s
    if timeout_s is not None and live.timings is not None:
        timeout_s = max(0.0, timeout_s - (now - live.timings.arrival_s))
    return replace(
        request,
        request_id=live.name,
        prompt_token_ids=(*request.prompt_token_ids, *live.first_tokens),
        sampling=replace(sampling, max_tokens=most, n=1),
        timeout_s=timeout_s,
        ttft_deadline_s=None,
        received_s=None,
        is_continuation=True,
    )


def _until(timings: SequenceTimings, now: float) -> SequenceTimings:
    """Of a sequence that was cancelled after its prefill."""
    return replace(timings, finished_s=now, decode_s=timings.decode_s + now - timings.finished_s)


def _joined(prefill: SequenceTimings, decode: SequenceTimings) -> SequenceTimings:
    """Of both phases; the hand-over is part of the decode phase."""
    handover_s = decode.arrival_s - prefill.finished_s
    return replace(
        decode,
        arrival_s=prefill.arrival_s,
        first_scheduled_s=prefill.first_scheduled_s,
        first_token_s=prefill.first_token_s,
        queue_s=prefill.queue_s,
        prefill_s=prefill.prefill_s,
        decode_s=decode.queue_s + decode.prefill_s + decode.decode_s + handover_s,
        preempted_s=prefill.preempted_s + decode.preempted_s,
        device_s=prefill.device_s + decode.device_s,
        num_preemptions=prefill.num_preemptions + decode.num_preemptions,
        num_prompt_tokens=prefill.num_prompt_tokens,
        num_cached_tokens=prefill.num_cached_tokens,
        num_output_tokens=prefill.num_output_tokens + decode.num_output_tokens,
        activities=(),
    )


def _busy(engines: list[PhaseEngine], duration_s: float) -> float:
    """The part of the time in which a step ran, as a mean over engines."""
    seconds = sum(record.seconds for engine in engines for record in engine.engine.records)
    return min(1.0, seconds / len(engines) / duration_s) if duration_s > 0.0 else 0.0
