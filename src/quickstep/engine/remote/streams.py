"""The live requests of an engine in another process: submitted and not ended.

Owned by `RemoteEngine`, called in its event loop only. Its messages are assigned to the `Stream`s
by request id. A request that was ended here, at its deadline, keeps its id until the engine has
ended it as well, so that no late delta reaches a newer request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import msgspec

from quickstep.engine.records.step_log import SequenceRecord
from quickstep.engine.stream import Stream
from quickstep.errors import EngineDied, QuickstepError
from quickstep.types import Delta, FinishReason, Request, SequenceTimings

__all__ = ["RemoteStreams"]


class _Live(msgspec.Struct):
    stream: Stream
    request: Request
    since_s: float
    running: set[int]  # indices of the sequences that have not ended
    num_tokens: Counter[int] = msgspec.field(default_factory=Counter)  # delivered, by index
    timer: asyncio.TimerHandle | None = None  # of its deadline


class RemoteStreams:
    """The streams of all live requests, by request id. `clock` is the engine's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._paused: set[str] = set()
        self._undecided: dict[str, tuple[int, int]] = {}  # level, number of sequences
        self._undecided_by_level: Counter[int] = Counter()
        self._ended_here: dict[str, set[int]] = {}  # sequences that the engine has not ended
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

    def open(self, stream: Stream, request: Request, level: int = 0) -> None:
        """Follow a request, of a level of priority, that is about to be sent."""
        now, indices = self._clock(), set(request.indices)
        if self._is_held:
            self._busy_since_s = now
        self._live[stream.request_id] = _Live(stream, request, now, indices)
        self._undecided[stream.request_id] = (level, len(indices))
        self._undecided_by_level[level] += len(indices)
        self._empty.clear()

    def accept(self, request_id: str, ignored: tuple[str, ...]) -> None:
        """The engine has accepted the request."""
        self._decided(request_id)
        if request_id in self._live:
            self._live[request_id].stream.accept(ignored)

    def refuse(self, request_id: str, error: QuickstepError) -> None:
        """The engine has refused the request: its stream raises `error`, or ends with it if it had
        been accepted.
        """
        self._ended_here.pop(request_id, None)
        if request_id in self._live:
            self._end(request_id, FinishReason.ERROR, error, is_lost=False)

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

    def _end(
        self, request_id: str, reason: FinishReason, error: QuickstepError, *, is_lost: bool
    ) -> None:
        live = self._live[request_id]
        live.stream.refuse(error)
        for index in sorted(live.running):
            delta = Delta(index, finish_reason=reason, error=str(error), is_lost=is_lost)
            live.stream.put(delta)
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
        """Put a delta into its stream, if the request is live."""
        live = self._live.get(request_id)
        running = self._ended_here.get(request_id) if live is None else live.running
        if running is None:
            return
        if live is not None:
            live.num_tokens[delta.index] += len(delta.token_ids)
            live.stream.put(delta)
        if delta.finish_reason is None:
            return
        running.discard(delta.index)
        if running:
            return
        if live is None:
            del self._ended_here[request_id]
        else:
            self._remove(request_id)

    def unfinished(self, reason: FinishReason) -> Iterator[SequenceRecord]:
        """Records of the accepted sequences that have not ended, as if they ended now: their times
        on the device are known to the engine's process only.
        """
        now = self._clock()
        for live in self._live.values():
            request = live.request
            if request.request_id in self._undecided:
                continue
            resumed = {part.index: len(part.token_ids) for part in request.resumed}
            for index in sorted(live.running):
                num_prompt, num_resumed = len(request.prompt_token_ids), resumed.get(index, 0)
                num_outputs = num_resumed + live.num_tokens[index]
                timings = SequenceTimings.of_unknown(
                    num_prompt, live.since_s, now, num_outputs, num_resumed
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

    def end_all(self, reason: FinishReason, error: str) -> None:
        """The engine has ended: end every stream, and refuse requests that were not accepted."""
        self._ended_here.clear()
        for request_id in tuple(self._live):
            self._end(request_id, reason, EngineDied(error), is_lost=True)

    def _remove(self, request_id: str) -> None:
        live = self._live.pop(request_id)
        if live.timer is not None:
            live.timer.cancel()
        self._decided(request_id)
        self._paused.discard(request_id)
        if not self._live:
            self._empty.set()
