"""The output of a running request: deltas, which the engine puts into the request's sink.

A sink is an object with `put`. A `Stream` is the sink that a caller iterates in the engine's event
loop; the connection to the server's process is another (`remote.service`). A stream drops nothing
for a slow reader: if too much is unread, the request is paused (`StreamConfig`) until the reader
has caught up.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from typing import Protocol, Self

from quickstep.config import StreamConfig
from quickstep.errors import QuickstepError
from quickstep.types import Delta, FinishReason, Request

_LOGGER = logging.getLogger(__name__)


class Sink(Protocol):
    """Where an engine puts the deltas of one request, in order per sequence."""

    def put(self, delta: Delta) -> None:
        """Receive a delta, in the engine's event loop; an exception ends the request."""


class StreamOwner(Protocol):
    """The object that runs a stream's request: the engine, or its client in another process."""

    def abort(self, request_id: str) -> None:
        """End it."""

    def pause(self, request_id: str) -> None:
        """Generate no more for it until `resume`."""

    def resume(self, request_id: str) -> None:
        """Continue it."""


class Stream:
    """The deltas of one request, in order per sequence; ends after the last sequence's end.

    The owner accepts or refuses the request, and puts the deltas; the caller reads them. To stop
    early, call `aclose()` (or leave `async with`), which aborts what still runs.
    """

    def __init__(
        self, request: Request, owner: StreamOwner, bounds: StreamConfig | None = None
    ) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.seed = request.seed
        # keywords that the engine enforces less strictly than specified; set once it has accepted
        self.ignored: tuple[str, ...] = ()
        self._decided = asyncio.Event()
        self._refusal: QuickstepError | None = None
        self._num_running = len(request.indices)
        self._owner = owner
        # of unread deltas, before the request is paused
        self._max_deltas = sys.maxsize if bounds is None else bounds.max_unread_deltas
        self._max_bytes = sys.maxsize if bounds is None else bounds.max_unread_bytes
        self._deltas: deque[tuple[Delta, int]] = deque()  # with their sizes
        self._num_bytes = 0  # of the deltas
        self._is_paused = False
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._refusal is not None or not self._decided.is_set():
            await self.accepted()
        while not self._deltas:
            if self._closed or self._num_running == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delta, num_bytes = self._deltas.popleft()
        self._num_bytes -= num_bytes
        is_half = 2 * self._num_bytes <= self._max_bytes
        if self._is_paused and is_half and 2 * len(self._deltas) <= self._max_deltas:
            self._is_paused = False
            if self._num_running:
                self._owner.resume(self.request_id)
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def accepted(self) -> None:
        """Return once the engine has accepted the request.

        Raises:
            RequestError: The engine cannot serve it as it is.
            EngineError: The engine accepts no requests, or ended before it accepted this one.
        """
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    def accept(self, ignored: tuple[str, ...] = ()) -> None:
        """The engine has accepted the request; ignored if that is decided (the owner only)."""
        if not self._decided.is_set():
            self.ignored = ignored
            self._decided.set()

    def refuse(self, error: QuickstepError) -> None:
        """The engine has refused the request; ignored if that is decided (the owner only)."""
        if not self._decided.is_set():
            self._refusal = error
            self._decided.set()

    async def aclose(self) -> None:
        """Abort what still runs and drop the unread deltas. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._deltas.clear()
        if self._num_running:
            self._owner.abort(self.request_id)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def put(self, delta: Delta) -> None:
        """Append a delta (the owner only). Every end of a sequence comes here, so those that are
        failures are logged here.
        """
        if delta.finish_reason is not None:
            self._num_running -= 1
            if delta.finish_reason.is_failure and self._refusal is None:
                self._log_failure(delta)
        if self._closed:
            return
        num_bytes = delta.num_bytes
        self._deltas.append((delta, num_bytes))
        self._num_bytes += num_bytes
        is_full = self._num_bytes > self._max_bytes or len(self._deltas) > self._max_deltas
        if is_full and self._num_running and not self._is_paused:
            self._is_paused = True
            self._owner.pause(self.request_id)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _log_failure(self, delta: Delta) -> None:
        """The one line about a sequence that failed; a REFUSED one is the client's fault."""
        is_refused = delta.finish_reason is FinishReason.REFUSED
        level = logging.INFO if is_refused else logging.WARNING
        what = "was refused while it ran" if is_refused else "failed"
        sequence = f"{self.request_id}[{delta.index}]"
        _LOGGER.log(level, "request %s %s: %s", sequence, what, delta.error)
