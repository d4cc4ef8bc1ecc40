"""A streaming response, of server-sent events or lines of JSON: sends frames as they come, until
the end or until the client disconnects.

An API's writer makes the frames. `close` always runs at the end.

Unread data of a client is bounded: when the connection's buffer is full, `send` waits and no frame
is read from the engine, which pauses a request with too much unread (`config.StreamConfig`). The
connection of a client that reads nothing is cut (`http.protocol`), which ends its request. A stream
without data sends a comment from time to time, which clients skip, so that proxies keep it open
during a long prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quickstep.json_line import json_line
from quickstep.server.http.body import unless_disconnected
from quickstep.server.options import ConnectionOptions

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

    async def close(self) -> None:
        """End what makes the frames."""
        await self._close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until its end or until the client disconnects."""
        connections = scope.get("state", {}).get("connections") or ConnectionOptions()
        silence_s = connections.comment_every_s if self.media_type == SERVER_SENT_EVENTS else 0.0
        try:
            await unless_disconnected(receive, self._run(_PacedSend(send, silence_s)))
        except ClientDisconnect:
            pass
        finally:
            await self._close()

    async def _run(self, paced: _PacedSend) -> None:
        """Send the frames, and comments when there are none."""
        commenting = asyncio.ensure_future(paced.comment())
        try:
            await paced.start(self.raw_headers)
            async with aclosing(self._frames) as frames:
                async for frame in frames:  # once a token, so it calls little
                    paced.is_sending = True
                    await paced.send(
                        {"type": "http.response.body", "body": frame, "more_body": True}
                    )
                    paced.is_sending = False
                    paced.since_s = paced.now()
            paced.is_sending = True
            await paced.send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            commenting.cancel()
            await asyncio.gather(commenting, return_exceptions=True)


async def close_response(response: Response) -> None:
    """Close a response that is not sent, so that nothing is generated for it."""
    if isinstance(response, EventStream):
        await response.close()


class _PacedSend:
    """`send`, and comments while nothing is sent.

    Attributes:
        since_s: When something was sent last, by `now`.
        is_sending: Something is being sent; until the start is out, nothing else may go.
    """

    def __init__(self, send: Send, silence_s: float) -> None:
        self.send = send
        self.now = asyncio.get_running_loop().time
        self._silence_s = silence_s
        self.since_s = self.now()
        self.is_sending = True

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """The status and the headers."""
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        self.is_sending = False
        self.since_s = self.now()

    async def comment(self) -> None:
        """Send a comment whenever nothing was sent for a while; never ends. A frame may be sent at
        the same time; each message is complete.
        """
        if not self._silence_s:
            return
        while True:
            silent_s = 0.0 if self.is_sending else self.now() - self.since_s
            if silent_s < self._silence_s:
                await asyncio.sleep(self._silence_s - silent_s)
                continue
            self.since_s = self.now()
            await self.send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
