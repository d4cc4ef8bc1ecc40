"""An upstream on loopback that behaves as a test says: a raw HTTP/1.1 server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

Send = Callable[[bytes], Awaitable[None]]
ANSWER = {
    "id": "up-1",
    "object": "chat.completion",
    "model": "remote",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "far"}}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
}
CHUNK = {
    "id": "up-1",
    "model": "remote",
    "choices": [{"index": 0, "delta": {"content": "far"}}],
}


def response(
    body: bytes, status: str = "200 OK", kind: str = "application/json", more: str = ""
) -> bytes:
    """A complete response."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def events(*contents: Any, is_done: bool = True) -> bytes:
    """The body of a stream."""
    lines = [f"data: {json.dumps(content)}\n\n" for content in contents]
    return "".join([*lines, "data: [DONE]\n\n" * is_done]).encode()


def stream(*contents: Any, is_done: bool = True) -> bytes:
    """A stream that is as long as its connection is open."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    return head + events(*contents, is_done=is_done)


class UpstreamDouble:
    """Sends `reply` to each request, or what `reply` is a list of, one after the other; without a
    reply it stays silent.

    Attributes:
        bodies: What it received.
        heads: The request lines and headers.
    """

    def __init__(self, reply: bytes | list[bytes | None] | None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.url = ""
        self._reply = reply
        self._ended = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            self.heads.append(head)
            self.bodies.append(json.loads(await reader.readexactly(length)))
            reply = self._reply
            if isinstance(reply, list):
                reply = reply[min(len(self.bodies), len(reply)) - 1]
            if reply is None:
                await self._ended.wait()
            else:
                writer.write(reply)
                await writer.drain()
        writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[UpstreamDouble, None]:
        """The double, listening."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        try:
            yield self
        finally:
            self._ended.set()
            server.close()
            await server.wait_closed()
