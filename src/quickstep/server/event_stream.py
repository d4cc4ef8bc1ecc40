"""Server-sent events on the wire: frames out as they come, until the end or the client is gone.

A surface writes the frames (`routes`), this sends them. Whatever happens, `close` runs at the end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quickstep.server.body import ClientDisconnect, unless_disconnected

__all__ = ["EventStream"]


class EventStream(Response):
    """A response of frames; each frame is sent whole, as one message."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        )
        del self.headers["content-length"]
        self._frames = frames
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until its end or until the client is gone."""
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
