"""The live requests of an engine in another process: what was submitted and has not ended.

Owned by `RemoteEngine`, called in its event loop only. Verdicts and deltas go in by number; the
readers are the same `Stream`s as in the engine's own process, behind a `RemoteStream` that knows
whether the engine has taken the request.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Self

import msgspec

from quickstep.engine.stream import Delta, Stream
from quickstep.errors import EngineDied, QuickstepError
from quickstep.types import FinishReason

__all__ = ["RemoteStream", "RemoteStreams"]


class RemoteStream:
    """A `Stream` whose engine may still refuse the request."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._decided = asyncio.Event()
        self._refusal: QuickstepError | None = None

    @property
    def request_id(self) -> str:
        """The engine's id."""
        return self._stream.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as the model reads it."""
        return self._stream.prompt_token_ids

    @property
    def seed(self) -> int:
        """The noise seed that is used, given or drawn."""
        return self._stream.seed

    @property
    def ignored(self) -> tuple[str, ...]:
        """What the engine takes less strictly than the request says; known once it accepted."""
        return self._stream.ignored

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        await self.accepted()
        return await anext(self._stream)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def accepted(self) -> None:
        """Return once the engine has taken the request.

        Raises:
            RequestError: The engine cannot serve it as it stands.
            EngineError: The engine takes no requests, or ended before it took this one.
        """
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    async def aclose(self) -> None:
        """Abort what still runs, drop what was not read. Idempotent."""
        await self._stream.aclose()

    def put(self, delta: Delta) -> None:
        """Append (the engine's client only)."""
        self._stream.put(delta)

    def decide(self, refusal: QuickstepError | None, ignored: tuple[str, ...] = ()) -> None:
        """The engine's verdict; the first one counts (the engine's client only)."""
        if not self._decided.is_set():
            self._stream.ignored = ignored
            self._refusal = refusal
            self._decided.set()


class _Live(msgspec.Struct):
    stream: RemoteStream
    running: set[int]  # indices of the sequences that have not ended
    timer: asyncio.TimerHandle | None = None  # of its deadline


class RemoteStreams:
    """All of them, by number and by id. `clock` is the engine's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[int, _Live] = {}
        self._paused: set[int] = set()
        self._undecided: set[int] = set()
        self._number_of: dict[str, int] = {}
        self._numbers = itertools.count()
        self._busy_since_s = 0.0
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_undecided(self) -> int:
        """Requests that the engine has neither taken nor refused."""
        return len(self._undecided)

    @property
    def busy_since_s(self) -> float | None:
        """Since when there has been a request that is not paused; None while there is none."""
        return None if self._is_held else self._busy_since_s

    @property
    def _is_held(self) -> bool:
        return len(self._paused) == len(self._live)

    def number_of(self, request_id: str) -> int | None:
        """The number of a live request."""
        return self._number_of.get(request_id)

    async def wait_until_empty(self) -> None:
        """Return once no request is live."""
        await self._empty.wait()

    def open(self, stream: Stream, num_sequences: int) -> tuple[int, RemoteStream]:
        """Take in a request that is about to be sent; gives its number."""
        number = next(self._numbers)
        remote = RemoteStream(stream)
        if self._is_held:
            self._busy_since_s = self._clock()
        self._live[number] = _Live(remote, set(range(num_sequences)))
        self._undecided.add(number)
        self._number_of[stream.request_id] = number
        self._empty.clear()
        return number, remote

    def accept(self, number: int, ignored: tuple[str, ...]) -> None:
        """The engine has taken the request."""
        self._undecided.discard(number)
        if number in self._live:
            self._live[number].stream.decide(None, ignored)

    def refuse(self, number: int, error: QuickstepError) -> None:
        """The engine has not; its stream raises `error`, or ends with it if it had been taken."""
        if number in self._live:
            self._end(number, FinishReason.ERROR, error)

    def set_deadline(self, number: int, timer: asyncio.TimerHandle) -> None:
        """Cancel `timer` when the request ends."""
        self._live[number].timer = timer

    def expire(self, number: int) -> None:
        """End a request as the engine should have at its deadline: with what there is."""
        live = self._live[number]
        live.stream.decide(None)
        reason = FinishReason.DEADLINE
        for index in sorted(live.running):
            live.stream.put(Delta(index, finish_reason=reason, stop_reason=reason.value))
        self._remove(number)

    def _end(self, number: int, reason: FinishReason, error: QuickstepError) -> None:
        live = self._live[number]
        live.stream.decide(error)
        for index in sorted(live.running):
            live.stream.put(Delta(index, finish_reason=reason, error=str(error)))
        self._remove(number)

    def pause(self, number: int) -> None:
        """The reader of a live request is behind."""
        self._paused.add(number)

    def resume(self, number: int) -> None:
        """It has caught up."""
        if self._is_held:
            self._busy_since_s = self._clock()
        self._paused.discard(number)

    def deliver(self, number: int, delta: Delta) -> None:
        """Hand a delta to its reader."""
        live = self._live.get(number)
        if live is None:
            return
        live.stream.put(delta)
        if delta.finish_reason is not None:
            live.running.discard(delta.index)
            if not live.running:
                self._remove(number)

    def end_all(self, reason: FinishReason, error: str) -> None:
        """The engine is gone: end every stream, and refuse what it had not taken."""
        for number in tuple(self._live):
            self._end(number, reason, EngineDied(error))

    def _remove(self, number: int) -> None:
        live = self._live.pop(number)
        if live.timer is not None:
            live.timer.cancel()
        self._undecided.discard(number)
        self._paused.discard(number)
        del self._number_of[live.stream.request_id]
        if not self._live:
            self._empty.set()
