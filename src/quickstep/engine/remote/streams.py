"""The live requests of an engine in another process: submitted and not ended.

Owned by `RemoteEngine`, called in its event loop only. Its messages are assigned to the `Stream`s
by request id. A request that was ended here, at its deadline, or that has moved to another engine,
keeps its id until the engine has ended it as well, so that no late delta reaches a newer request.
The tokens that a stream has got are kept, so that another engine can continue it (`LostRequest`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from quickstep.engine.records.step_log import SequenceRecord
from quickstep.engine.stream import Stream
from quickstep.errors import EngineDied, QuickstepError
from quickstep.types import Delta, FinishReason, Request, Resumed, SequenceTimings


class LostRequest(msgspec.Struct, frozen=True):
    """A live request that no engine has, because its own has ended or none served when it came,
    with what its stream has got.

    Attributes:
        stream: Continues with the deltas of another engine.
        request: With what the stream has got as `resumed`.
        fingerprint: Of its engine: only an equal one gives the bits that follow.
        num_moves: How many engine processes have ended with it, in a row without a new token.
        num_deaths: How many of those had begun to compute it, so that it may have ended them.
        was_computed: Whether the last one had.
        got_token: Whether that one had given it a token.
        num_engines: How many engines, or processes of one, had accepted it.
        is_paused: Its reader is too slow.
    """

    stream: Stream
    request: Request
    fingerprint: str
    num_moves: int = 0
    num_deaths: int = 0
    was_computed: bool = False
    got_token: bool = False
    num_engines: int = 0
    is_paused: bool = False

    def uncharged(self) -> LostRequest:
        """The same, if another request has ended the last engine."""
        num_deaths = self.num_deaths - self.was_computed
        return replace(self, num_moves=self.num_moves - 1, num_deaths=num_deaths)

    @property
    def has_output(self) -> bool:
        """Whether the stream has got anything that other weights might not have given."""
        return any(part != Resumed(part.index) for part in self.request.resumed)


class _Live(msgspec.Struct):
    stream: Stream
    request: Request
    since_s: float
    running: set[int]  # indices of the sequences that have not ended
    outputs: defaultdict[int, list[int]]  # delivered, by index
    before: LostRequest  # as it was sent to this engine
    has_started: bool = False  # a step has computed it
    num_prompt_logprobs: int = 0  # delivered
    timer: asyncio.TimerHandle | None = None  # of its deadline
    # by index, of sequences that another engine continues
    begun: dict[int, SequenceTimings] = msgspec.field(default_factory=dict)

    @property
    def has_progressed(self) -> bool:
        """Whether this engine has delivered a token."""
        num_resumed = sum(len(part.token_ids) for part in self.request.resumed)
        return sum(map(len, self.outputs.values())) > num_resumed


class RemoteStreams:
    """The streams of all live requests, by request id. `clock` is the engine's; with `moves`,
    requests continue elsewhere when the engine ends.
    """

    def __init__(self, clock: Callable[[], float], moves: bool = False) -> None:
        self._clock = clock
        self._moves = moves
        self._live: dict[str, _Live] = {}
        self._paused: set[str] = set()
        self._undecided: dict[str, tuple[int, int]] = {}  # level, number of sequences
        self._undecided_by_level: Counter[int] = Counter()
        self._ended_here: dict[str, set[int]] = {}  # sequences that the engine has not ended
        self.has_handovers = False  # a request to be handed over has got something
        self.has_freed_ids = False  # the engine has ended requests that were moved
        self._moved: set[str] = set()  # of those, which continue on another engine
        self._busy_since_s = 0.0
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: object) -> bool:
        """Whether the id is in use."""
        return request_id in self._live or request_id in self._ended_here

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the requests that have not ended."""
        return tuple(self._live)

    def is_live(self, request_id: str) -> bool:
        """Whether the request has not ended."""
        return request_id in self._live

    @property
    def num_undecided(self) -> int:
        """Number of requests that the engine has neither accepted nor refused."""
        return len(self._undecided)

    @property
    def undecided_by_level(self) -> Mapping[int, int]:
        """Number of their sequences of each level of priority."""
        return self._undecided_by_level

    @property
    def busy_since_s(self) -> float | None:
        """The time since which a request that is not paused is live; None while there is none."""
        return None if self._is_held else self._busy_since_s

    @property
    def _is_held(self) -> bool:
        return len(self._paused) == len(self._live)

    async def wait_until_empty(self) -> None:
        """Return once no request is live."""
        await self._empty.wait()

    def open(
        self,
        stream: Stream,
        request: Request,
        level: int = 0,
        before: LostRequest | None = None,
    ) -> None:
        """Follow a request, of a level of priority, that is about to be sent; `before` is what an
        engine that had it handed over.
        """
        now, running = self._clock(), set(request.indices)
        num_sequences = len(running)
        if self._is_held:
            self._busy_since_s = now
        outputs = defaultdict[int, list[int]](list)
        outputs.update({resumed.index: [*resumed.token_ids] for resumed in request.resumed})
        live = _Live(
            stream, request, now, running, outputs, before or LostRequest(stream, request, "")
        )
        live.num_prompt_logprobs = sum(part.num_prompt_logprobs for part in request.resumed)
        self._live[stream.request_id] = live
        self._undecided[stream.request_id] = (level, num_sequences)
        self._undecided_by_level[level] += num_sequences
        self._empty.clear()

    def accept(self, request_id: str, ignored: tuple[str, ...], adapter_id: str = "") -> None:
        """The engine has accepted the request, with this content of its adapter."""
        self._decided(request_id)
        if (live := self._live.get(request_id)) is not None:
            live.stream.accept(ignored)
            if adapter_id != live.request.adapter_id:
                live.request = replace(live.request, adapter_id=adapter_id)

    def start(self, request_ids: Iterable[str]) -> None:
        """The engine begins to compute these requests."""
        for request_id in request_ids:
            if (live := self._live.get(request_id)) is not None:
                live.has_started = True

    def waits_for_token(self, request_id: str) -> bool:
        """Whether a request is live and has got no token from this engine."""
        live = self._live.get(request_id)
        return live is not None and not live.has_progressed

    def complete(self, request_id: str, timings: SequenceTimings) -> SequenceTimings:
        """The engine's timings of a sequence with what it does not know: the time of its request
        on other engines.
        """
        live = self._live.get(request_id)
        if live is None or not live.before.num_engines:
            return timings
        elsewhere_s = min(timings.queue_s, max(0.0, live.since_s - timings.arrival_s))
        return replace(timings, num_moves=live.before.num_engines, elsewhere_s=elsewhere_s)

    def refuse(self, request_id: str, error: QuickstepError) -> None:
        """The engine has refused the request: its stream raises `error`, or ends with it if it had
        been accepted.
        """
        self._forget(request_id)
        if request_id in self._live:
            self._end(request_id, FinishReason.ERROR, error)

    def has_moved(self, request_id: str) -> bool:
        """Whether the request continues on another engine, and this one has yet to end it."""
        return request_id in self._moved

    def _forget(self, request_id: str) -> None:
        """The engine has ended a request that ended here, or was moved, before."""
        self._ended_here.pop(request_id, None)
        if request_id in self._moved:
            self._moved.discard(request_id)
            self.has_freed_ids = True

    def _decided(self, request_id: str) -> None:
        if request_id in self._undecided:
            level, num_sequences = self._undecided.pop(request_id)
            self._undecided_by_level[level] -= num_sequences
            if not self._undecided_by_level[level]:
                del self._undecided_by_level[level]

    def set_deadline(self, request_id: str, timer: asyncio.TimerHandle) -> None:
        """Cancel `timer` when the request ends."""
        self._live[request_id].timer = timer

    def expire(self, request_id: str) -> None:
        """End a request as the engine should have at its deadline: with its output so far."""
        live = self._live[request_id]
        live.stream.accept()
        reason = FinishReason.DEADLINE
        for index in sorted(live.running):
            live.stream.put(Delta(index, finish_reason=reason, stop_reason=reason.value))
        self._ended_here[request_id] = live.running
        self._remove(request_id)

    def _end(self, request_id: str, reason: FinishReason, error: QuickstepError) -> None:
        live = self._live[request_id]
        live.stream.refuse(error)
        for index in sorted(live.running):
            live.stream.put(Delta(index, finish_reason=reason, error=str(error)))
        self._remove(request_id)

    def pause(self, request_id: str) -> None:
        """The reader of a live request is too slow."""
        self._paused.add(request_id)

    def resume(self, request_id: str) -> None:
        """The reader of a paused request has caught up."""
        if self._is_held:
            self._busy_since_s = self._clock()
        self._paused.discard(request_id)

    def deliver(self, request_id: str, delta: Delta) -> None:
        """Put a delta into its stream, if the request is live and does not move."""
        if delta.is_lost and self._moves:
            return  # the process ends now, and `take_all` hands the request over
        live = self._live.get(request_id)
        running = self._ended_here.get(request_id) if live is None else live.running
        if running is None:
            return
        if live is not None:
            live.outputs[delta.index] += delta.token_ids
            live.num_prompt_logprobs += len(delta.prompt_logprobs)
            if live.request.handover is not None and delta.finish_reason is None:
                self.has_handovers = True
                if delta.timings is not None:
                    live.begun[delta.index] = delta.timings
                    delta = replace(delta, timings=None)
            live.stream.put(delta)
        if delta.finish_reason is None:
            return
        running.discard(delta.index)
        if running:
            return
        if live is None:
            self._forget(request_id)
        else:
            self._remove(request_id)

    def unfinished(self, reason: FinishReason) -> Iterator[SequenceRecord]:
        """Records of the accepted sequences that have not ended, as if they ended now: their times
        on the device are known to the engine's process only.
        """
        now = self._clock()
        for request_id, live in self._live.items():
            if request_id not in self._undecided:
                lost = _resumed(live, was_accepted=True)
                num_before = {part.index: len(part.token_ids) for part in live.request.resumed}
                yield from records_of_lost(lost, reason, live.since_s, now, num_before)

    def take_begun(self, fingerprint: str) -> list[LostRequest]:
        """Hand over the requests that another engine is to continue, whose sequences all have their
        first token, as `take_all` does.
        """
        self.has_handovers = False
        begun = [
            request_id
            for request_id, live in self._live.items()
            if live.request.handover is not None
            and all(live.outputs[index] for index in live.running)
        ]
        return [self._take(request_id, fingerprint, has_ended=False) for request_id in begun]

    def take_all(self, fingerprint: str, has_ended: bool = True) -> list[LostRequest]:
        """Hand over all live requests; none of them is live here any more. The engine has ended, or
        is to end them: what still comes of it is dropped.
        """
        lost = [self._take(request_id, fingerprint, has_ended) for request_id in tuple(self._live)]
        if has_ended:
            self._ended_here.clear()
            self._moved.clear()
        return lost

    def _take(self, request_id: str, fingerprint: str, has_ended: bool) -> LostRequest:
        live = self._live[request_id]
        resumed = _resumed(live, was_accepted=request_id not in self._undecided)
        is_new = live.has_progressed  # nothing has ended with it since its last token
        was_computed = has_ended and live.has_started
        lost = LostRequest(
            live.stream,
            resumed,
            fingerprint,
            num_moves=(0 if is_new else live.before.num_moves) + has_ended,
            num_deaths=(0 if is_new else live.before.num_deaths) + was_computed,
            was_computed=was_computed,
            got_token=is_new,
            num_engines=live.before.num_engines + bool(resumed.resumed),
            is_paused=request_id in self._paused,
        )
        self._remove(request_id)
        if not has_ended:
            self._ended_here[request_id] = live.running
            self._moved.add(request_id)
        return lost

    def end_all(self, reason: FinishReason, error: str) -> None:
        """The engine has ended: end every stream, and refuse requests that were not accepted."""
        self._ended_here.clear()
        self._moved.clear()
        for request_id in tuple(self._live):
            self._end(request_id, reason, EngineDied(error))

    def _remove(self, request_id: str) -> None:
        live = self._live.pop(request_id)
        if live.timer is not None:
            live.timer.cancel()
        self._decided(request_id)
        self._paused.discard(request_id)
        if not self._live:
            self._empty.set()


def _resumed(live: _Live, was_accepted: bool) -> Request:
    """The request with what its stream has got. One that was accepted names its sequences even if
    that is nothing: it has passed the limits of the queue. Another one is as it was.
    """
    request = live.request
    if not (was_accepted or request.resumed):
        return request
    before = {part.index: part for part in request.resumed}
    resumed = []
    for index in range(request.sampling.n):
        spent = live.begun.get(index) or before.get(index) or Resumed(index)
        part = Resumed(
            index,
            tuple(live.outputs[index]),
            is_finished=index not in live.running,
            num_prompt_logprobs=0 if index else live.num_prompt_logprobs,
            num_cached_tokens=spent.num_cached_tokens,
            device_s=spent.device_s,
        )
        resumed.append(part)
    return replace(request, resumed=tuple(resumed))


def records_of_lost(
    request: Request,
    reason: FinishReason,
    since_s: float,
    now: float,
    num_before: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[SequenceRecord]:
    """Records of the sequences of a request that end `now` without an engine, as `reason`. Their
    outputs are what the request is resumed with, of which `num_before` tokens, by index, are of
    engines before the last one.
    """
    outputs = {part.index: len(part.token_ids) for part in request.resumed}
    for index in request.indices:
        timings = SequenceTimings.of_unknown(
            len(request.prompt_token_ids),
            since_s,
            now,
            outputs.get(index, 0),
            num_before.get(index, 0),
        )
        yield SequenceRecord(
            request_id=request.request_id,
            index=index,
            tenant=request.tenant,
            priority=request.priority,
            seed=request.seed,
            finish_reason=reason,
            timings=timings,
            adapter=request.adapter,
            endpoint=request.endpoint,
            is_continuation=request.is_continuation,
        )
