"""A streaming response, of server-sent events or lines of JSON: sends frames as they come, until
the end or until the client disconnects.

An API's writer makes the frames. `close` always runs at the end.

Unread data of a client is bounded: when the connection's buffer is full, `send` waits and no frame
is read from the engine, which pauses a request with too much unread (`config.StreamConfig`). A
client that reads nothing for `slow_reader_s` loses its request and its connection. A stream without
data sends a comment from time to time, which clients skip, so that proxies keep it open during a
long prefill.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quickstep.json_line import json_line
from quickstep.server.http.body import ClientDisconnect, unless_disconnected
from quickstep.server.http.time_limits import NUM_SLICES, patient_timeout
from quickstep.server.options import ConnectionOptions

__all__ = ["DONE", "NDJSON", "SERVER_SENT_EVENTS", "EventStream", "data_frame", "event_frame"]

_LOG = logging.getLogger("quickstep.server")
DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
SERVER_SENT_EVENTS = "text/event-stream"
NDJSON = "application/x-ndjson"  # lines of JSON, which allow no comments


def data_frame(content: object) -> bytes:
    """An event without a name, as OpenAI's chat and completions send them."""
    return b"data: " + json_line(content) + b"\n\n"


def event_frame(name: str, content: object) -> bytes:
    """An event with a name, as OpenAI's responses and Anthropic send them."""
    return b"event: " + name.encode() + b"\ndata: " + json_line(content) + b"\n\n"


class SlowReader(Exception):
    """The client has not read for too long."""


class EventStream(Response):
    """A response of frames; each frame is sent as one message."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        media_type: str = SERVER_SENT_EVENTS,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until its end or until the client disconnects."""
        state = scope.get("state", {})
        connections = state.get("connections") or ConnectionOptions()
        if self.media_type != SERVER_SENT_EVENTS:
            connections = replace(connections, comment_every_s=0.0)
        paced = _PacedSend(send, connections)
        try:
            await unless_disconnected(receive, self._run(paced))
        except ClientDisconnect:
            pass
        except SlowReader:
            _LOG.warning("a client did not read its stream in time; its request is ended")
            abort: Callable[[], None] | None = state.get("abort_connection")
            if abort is not None:
                abort()
        finally:
            await self._close()

    async def _run(self, paced: _PacedSend) -> None:
        """Send the frames and watch for a slow reader; the first to end cancels the other."""
        sending = asyncio.ensure_future(self._send_all(paced))
        watching = asyncio.ensure_future(paced.watch())
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in (sending, watching):
                if task.done():
                    task.result()
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)

    async def _send_all(self, paced: _PacedSend) -> None:
        await paced.start(self.raw_headers)
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                await paced.body(frame)
        await paced.body(b"", more=False)


class _PacedSend:
    """`send` that measures how long it has been waiting, or how long nothing was sent."""

    def __init__(self, send: Send, connections: ConnectionOptions) -> None:
        self._send = send
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()
        self._is_sending = True  # until the start is out, nothing else may go

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """The status and the headers."""
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._sent()

    async def body(self, frame: bytes, more: bool = True) -> None:
        """A frame; returns when the connection takes more."""
        self._is_sending = True
        self._since_s = self._loop.time()
        await self._send({"type": "http.response.body", "body": frame, "more_body": more})
        self._sent()

    def _sent(self) -> None:
        self._is_sending = False
        self._since_s = self._loop.time()

    async def watch(self) -> None:
        """Send a comment when nothing was sent for a while. Raises SlowReader."""
        silence_s, patience_s = self._connections.comment_every_s, self._connections.slow_reader_s
        while True:
            waited_s = self._loop.time() - self._since_s
            if self._is_sending:
                if waited_s >= patience_s:
                    raise SlowReader
                await self._sleep(patience_s - waited_s)
            elif not silence_s:
                await self._sleep(patience_s)
            elif waited_s >= silence_s:
                await self._comment(patience_s)
            else:
                await self._sleep(min(silence_s - waited_s, patience_s))

    async def _sleep(self, seconds: float) -> None:
        """Sleep for at most a slice of the limit; a pause of this process does not count."""
        sleep_s = min(seconds, self._connections.slow_reader_s / NUM_SLICES)
        began_s = self._loop.time()
        await asyncio.sleep(sleep_s)
        self._since_s += max(0.0, self._loop.time() - began_s - sleep_s)

    async def _comment(self, patience_s: float) -> None:
        """Send a comment. `body` may send a frame at the same time; each message is complete."""
        self._since_s = self._loop.time()
        try:
            async with patient_timeout(patience_s):
                await self._send(
                    {"type": "http.response.body", "body": _COMMENT, "more_body": True}
                )
        except TimeoutError:
            raise SlowReader from None
