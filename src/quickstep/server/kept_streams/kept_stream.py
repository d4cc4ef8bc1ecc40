"""Responses that are written whether or not a client reads them, and are kept to be read again.

    KeptStreams.start -> a task that runs the response -> KeptStream -> KeptResponse of any reader

A kept stream has the status, the headers and the bytes of one response, in the order in which they
were written. Each event of a server-sent stream gets an `id:` line with its number, from 0, so that
a reader can continue after the last event that it has (`Last-Event-ID`); a byte offset does the
same for any media type. All readers get the same bytes.

Memory is bounded in bytes, for each stream and for all. A stream that is too long loses its first
bytes; a response of one piece that is too long is not kept. When all together are too large, the
API key that holds most loses: first its streams that have ended, the earliest first, then the first
bytes of its largest one. An ended stream is forgotten after `kept_s`. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.errors import RequestError
from quickstep.json_line import json_line
from quickstep.server.http.body import unless_disconnected
from quickstep.server.http.errors import error_body
from quickstep.server.http.event_stream import NDJSON, SERVER_SENT_EVENTS, data_frame
from quickstep.server.options import KeptStreamOptions

_LOG = logging.getLogger("quickstep.server")
_STREAM_BYTES = 1024  # of the objects of one stream, in addition to its content
_BLANK_LINE = b"\n\n"
_CANCELLED = "the request was cancelled"
_REPORTED = ("ignored", "fallback")  # in headers of the middleware

StreamRun = Callable[[Send], Awaitable[None]]


class StreamName(NamedTuple):
    """By which a stream is found, such as `("alice", "response", "resp_1")`.

    Attributes:
        owner: The name of the API key, "" without keys.
    """

    owner: str
    kind: str
    name: str


class KeptStream:
    """One response, while it is written and as long as it is kept. `KeptStreams` owns it.

    Attributes:
        names: By which it is found; all have the same owner.
        state: Of the request that began it, which has what the middleware adds to the headers.
        digest: Of the request; "" if no other request may have its name.
        source: The writer of a response in the background; None once it has ended.
        started_at: In seconds since 1970.
        ended_at: The same; None while it is written.
        status: None until the response begins.
        error: What was raised before the response began.
        has_failed: The response ended with an error after it had begun, or was cancelled.
        num_bytes: Written so far.
        num_dropped: Of them, the first, which are not kept.
    """

    def __init__(
        self, names: tuple[StreamName, ...], state: Mapping[str, Any], digest: str
    ) -> None:
        self.names = names
        self.state = state
        self.digest = digest
        self.source: object = None
        self.started_at = int(time.time())
        self.ended_at: int | None = None
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.error: Exception | None = None
        self.has_failed = False
        self.num_bytes = 0
        self.num_dropped = 0
        self.num_events = 0
        self._has_events = False
        self._num_dropped_events = 0
        self._chunks: list[bytes] = []
        self._starts: list[int] = []  # the offset of each chunk
        self._events: list[int] = []  # the number of the last event up to each chunk, from -1
        self._waiting: list[asyncio.Future[None]] = []
        self._readers: dict[object, int] = {}  # the offset of each
        self._writers: list[asyncio.Future[None]] = []  # wait for readers

    @property
    def owner(self) -> str:
        """The name of the API key that began it."""
        return self.names[0].owner

    @property
    def num_kept(self) -> int:
        """Bytes that it holds."""
        return self.num_bytes - self.num_dropped

    async def begun(self) -> None:
        """Wait until the response begins. Raises the error of one that never does."""
        while self.status is None and self.error is None:
            await self._change()
        if self.error is not None:
            raise self.error

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Note the status and the headers."""
        self.status, self.headers = status, list(headers)
        content_type = dict(self.headers).get(b"content-type", b"")
        self._has_events = content_type.startswith(SERVER_SENT_EVENTS.encode())
        self._wake()

    def append(self, chunk: bytes) -> None:
        """Add to the body: an event or a comment of an event stream, or any bytes of another."""
        if not chunk:
            return
        if self._has_events and not chunk.startswith(b":"):
            if not chunk.startswith(b"id: "):  # it has one if it comes from another kept stream
                chunk = b"id: %d\n%b" % (self.num_events, chunk)
            self.num_events += 1
        self._chunks.append(chunk)
        self._starts.append(self.num_bytes)
        self._events.append(self.num_events - 1)
        self.num_bytes += len(chunk)
        self._wake()

    def cancellation(self) -> Iterator[bytes]:
        """The last event, or line, of a stream that is cancelled."""
        content = error_body(_CANCELLED, 409)
        content_type = dict(self.headers).get(b"content-type", b"")
        if self._has_events:
            yield data_frame(content)
        elif content_type.startswith(NDJSON.encode()):
            yield json_line({"error": _CANCELLED}) + b"\n"

    def end(self, error: Exception | None = None) -> None:
        """No more is written; `error` is why the response never began."""
        self.has_failed = self.has_failed or bool(self.state.get("has_failed"))
        # the request itself, with its body, is needed no more
        self.state = {name: self.state[name] for name in _REPORTED if name in self.state}
        self.source = None
        self.error = error
        self.ended_at = int(time.time())
        self._wake()

    def drop(self, num_kept: int) -> int:
        """Drop the first chunks until at most `num_kept` bytes are left, but never the last chunk;
        returns how many bytes this frees.
        """
        before = self.num_dropped
        count = bisect_right(self._starts, self.num_bytes - num_kept - 1)
        count = min(count, len(self._chunks) - 1)
        if count > 0:
            self.num_dropped = self._starts[count]
            self._num_dropped_events = self._events[count - 1] + 1
            del self._chunks[:count], self._starts[:count], self._events[:count]
        return self.num_dropped - before

    def offset_after(self, event: int) -> int:
        """The offset of the first byte after an event, and after the comments that follow it; -1
        for all bytes. Raises RequestError.
        """
        if not self._has_events or not -1 <= event < self.num_events:
            count = f"{self.num_events} events" if self._has_events else "no numbered events"
            raise RequestError(f"event {event} is not in the stream, which has {count} so far")
        if event + 1 < self._num_dropped_events:
            raise self._lost()
        index = bisect_right(self._events, event)
        return self._starts[index] if index < len(self._starts) else self.num_bytes

    def checked_offset(self, offset: int) -> int:
        """The offset of a byte that is kept, or is the next to be written. Raises RequestError."""
        if offset < self.num_dropped:
            raise self._lost()
        if offset > self.num_bytes:
            raise RequestError(
                f"from is {offset}, the stream has {self.num_bytes} bytes so far", param="from"
            )
        return offset

    def _lost(self) -> RequestError:
        return RequestError(
            f"the first {self.num_dropped} bytes of the stream are not kept any more; the operator "
            "may raise --max-kept-stream-bytes",
            code="stream_offset_lost",
        )

    async def wait_for_readers(self, num_bytes: int) -> None:
        """Wait until every reader is at most so many bytes behind: a connection that reads too
        slowly is cut, which ends its reader (`http.protocol`).
        """
        while any(self.num_bytes - offset > num_bytes for offset in self._readers.values()):
            moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._writers.append(moved)
            await moved

    async def read(self, offset: int) -> AsyncGenerator[bytes, None]:
        """The bytes from an offset to the end of the response, as they are written. A reader whose
        next bytes were dropped, since all streams are too large, gets an error event and no more.
        """
        reader = object()
        try:
            while True:
                self._readers[reader] = offset
                self._moved()
                if offset < self.num_dropped:
                    if self._has_events:
                        yield data_frame(error_body(str(self._lost()), 400))
                    return
                if offset < self.num_bytes:
                    index = bisect_right(self._starts, offset) - 1
                    chunk = self._chunks[index][offset - self._starts[index] :]
                    yield chunk
                    offset += len(chunk)
                elif self.ended_at is not None:
                    return
                else:
                    await self._change()
        finally:
            del self._readers[reader]
            self._moved()

    def _moved(self) -> None:
        writers, self._writers = self._writers, []
        _resolve(writers)

    async def _change(self) -> None:
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        await changed

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        _resolve(waiting)


def _resolve(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class KeptResponse(Response):
    """A kept stream as the response to a request, from an offset on."""

    def __init__(self, stream: KeptStream, offset: int = 0, is_repeat: bool = False) -> None:
        assert stream.status is not None, "the response has begun"
        super().__init__(status_code=stream.status)
        self.raw_headers = [
            (name, value)
            for name, value in stream.headers
            if not (offset and name == b"content-length")
        ]
        if is_repeat:
            self.raw_headers.append((b"idempotent-replayed", b"true"))
        self._stream = stream
        self._offset = offset

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it until its end or until the client disconnects, which does not end it."""
        for name in _REPORTED:
            if name in self._stream.state:
                scope["state"][name] = self._stream.state[name]
        with suppress(ClientDisconnect):
            await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async with aclosing(self._stream.read(self._offset)) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class KeptStreams:
    """All kept streams of a server, by name.

    Attributes:
        num_streams: Those that are written and those that have ended.
        num_bytes: Of all of them.
    """

    def __init__(self, options: KeptStreamOptions) -> None:
        self._options = options
        self._by_name: dict[StreamName, KeptStream] = {}
        self._by_owner: dict[str, dict[KeptStream, None]] = {}  # in the order of their starts
        self._tasks: dict[KeptStream, asyncio.Task[None]] = {}
        self._owned = OwnedTasks(_LOG)
        self._expiries: dict[KeptStream, asyncio.TimerHandle] = {}
        self._bytes_of: dict[str, int] = {}  # by owner
        self.num_streams = 0
        self.num_bytes = 0

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Those that still write."""
        return list(self._tasks.values())

    def find(self, owner: str, kind: str, name: str) -> KeptStream | None:
        """The stream with this name."""
        return self._by_name.get(StreamName(owner, kind, name))

    def of_owner(self, owner: str) -> list[KeptStream]:
        """The streams of an API key, the earliest first."""
        return list(self._by_owner.get(owner, ()))

    def check_room(self, owner: str) -> None:
        """Raise RequestError 429 if all streams that an API key may have are being written."""
        most = self._options.streams_per_key
        streams = self._by_owner.get(owner, {})
        if len(streams) >= most and all(stream.ended_at is None for stream in streams):
            raise RequestError(
                f"{len(streams)} responses that continue without their client are being written, "
                f"the limit is {most}; wait for one of them, or have the operator raise "
                "--max-kept-streams-per-key",
                status=429,
            )

    def start(
        self,
        names: tuple[StreamName, ...],
        run: StreamRun,
        state: Mapping[str, Any],
        digest: str = "",
        source: object = None,
        cancelled: Callable[[], Iterable[bytes]] | None = None,
    ) -> KeptStream:
        """Run a response, which sends its messages to the stream, in a task of its own.

        `cancelled` gives the last events of one that is cancelled, an error if None. A stream that
        has one of the names loses it; `cancel` it first. Raises RequestError 429.
        """
        stream = KeptStream(names, state, digest)
        stream.source = source
        self.check_room(stream.owner)
        streams = self._by_owner.setdefault(stream.owner, {})
        if len(streams) >= self._options.streams_per_key:
            self.forget(min(streams, key=_end))
        self._by_owner.setdefault(stream.owner, {})[stream] = None
        self.num_streams += 1
        for name in names:
            self._by_name[name] = stream
        self._count(stream, _STREAM_BYTES)
        self._tasks[stream] = self._owned.start(
            self._run(stream, run, cancelled or stream.cancellation)
        )
        return stream

    async def cancel(self, stream: KeptStream) -> None:
        """End a stream, with what it requested of an engine. Returns when it has ended."""
        task = self._tasks.get(stream)
        if task is None:
            return
        await asyncio.sleep(0)  # a task that has not begun would not clean up
        task.cancel()
        await asyncio.wait({task})

    def forget(self, stream: KeptStream) -> None:
        """Keep a stream no longer; readers that have it read on. Idempotent."""
        streams = self._by_owner.get(stream.owner, {})
        if stream not in streams:
            return
        del streams[stream]
        expiry = self._expiries.pop(stream, None)
        if expiry is not None:  # it would hold the stream in memory
            expiry.cancel()
        self.num_streams -= 1
        self._add_bytes(stream.owner, -_STREAM_BYTES - stream.num_kept)
        if not streams:
            del self._by_owner[stream.owner], self._bytes_of[stream.owner]
        for name in stream.names:
            if self._by_name.get(name) is stream:
                del self._by_name[name]

    async def stop(self) -> None:
        """Cancel what is still written."""
        await asyncio.gather(*(self.cancel(stream) for stream in list(self._tasks)))

    async def _run(
        self,
        stream: KeptStream,
        run: StreamRun,
        cancelled: Callable[[], Iterable[bytes]],
    ) -> None:
        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                stream.begin(message["status"], message.get("headers", ()))
            else:
                self._append(stream, message.get("body", b""))
                if stream.num_kept > self._options.stream_bytes:
                    await stream.wait_for_readers(self._options.stream_bytes)
                    self._drop(stream, self._options.stream_bytes)

        error: Exception | None = None
        try:
            await run(send)
        except asyncio.CancelledError:
            stream.has_failed = True
            if stream.status is None:
                error = RequestError(_CANCELLED, status=409)
            for frame in cancelled():
                self._append(stream, frame)
        except Exception as raised:  # the task's top: the request that began it raises it
            error = raised
            if stream.status is not None:
                _LOG.error("a response failed after it had begun", exc_info=raised)
        finally:
            self._tasks.pop(stream, None)
            stream.end(error)
            if error is not None or stream.num_kept > self._options.stream_bytes:
                self.forget(stream)
            elif stream in self._by_owner.get(stream.owner, ()):
                loop = asyncio.get_running_loop()
                self._expiries[stream] = loop.call_later(self._options.kept_s, self.forget, stream)

    def _append(self, stream: KeptStream, chunk: bytes) -> None:
        before = stream.num_bytes
        stream.append(chunk)
        if stream in self._by_owner.get(stream.owner, ()):
            self._count(stream, stream.num_bytes - before)

    def _drop(self, stream: KeptStream, num_kept: int) -> int:
        """Drop the first bytes of a stream; returns how many."""
        num_freed = stream.drop(num_kept)
        if stream in self._by_owner.get(stream.owner, ()):
            self._add_bytes(stream.owner, -num_freed)
        return num_freed

    def _count(self, stream: KeptStream, num_bytes: int) -> None:
        """Count new bytes of a stream, and make room for them."""
        self._add_bytes(stream.owner, num_bytes)
        while self.num_bytes > self._options.total_bytes:
            owners = sorted(self._bytes_of, key=self._bytes_of.__getitem__, reverse=True)
            if not any(map(self._free_some, owners)):
                return  # each stream is written and has its last chunk only

    def _free_some(self, owner: str) -> bool:
        """Forget the owner's stream that ended first, else drop half of its largest one; False if
        nothing of it can go.
        """
        streams = self._by_owner[owner]
        first = min(streams, key=_end)
        if first.ended_at is not None:
            self.forget(first)
            return True
        largest = max(streams, key=lambda each: each.num_kept)
        return self._drop(largest, largest.num_kept // 2) > 0

    def _add_bytes(self, owner: str, num_bytes: int) -> None:
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + num_bytes
        self.num_bytes += num_bytes


def _end(stream: KeptStream) -> float:
    return float("inf") if stream.ended_at is None else stream.ended_at


async def never(*_: object) -> Message:
    """A `receive` of a client that never leaves."""
    left: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await left
