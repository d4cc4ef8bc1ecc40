"""A client in memory that leaves in the middle of a response, as one whose connection is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.applications import Starlette
from starlette.types import Message

EVENT_END = b"\n\n"


class Steps:
    """A gate for a scripted engine's deltas: each takes one step, which the test lets it make."""

    def __init__(self, num_steps: int = 0) -> None:
        self._steps = asyncio.Semaphore(num_steps)
        self._is_open = False

    def let(self, num_steps: int) -> None:
        """Allow so many more deltas."""
        for _ in range(num_steps):
            self._steps.release()

    def set(self) -> None:
        """Allow all."""
        self._is_open = True
        self._steps.release()

    async def wait(self) -> None:
        """Take one step."""
        await self._steps.acquire()
        if self._is_open:
            self._steps.release()


class Cut:
    """What a client got: the status, and the body up to where it left."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False


async def cut_call(
    app: Starlette,
    method: str,
    url: str,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    num_events: int | None = None,
    leave: asyncio.Event | None = None,
) -> Cut:
    """Call the app; leave after so many events, or when `leave` is set, or else at the end."""
    content = b"" if body is None else json.dumps(body).encode()
    parts = urlsplit(url)
    given = {"host": "localhost", "content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(parts.path),
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    cut, left = Cut(), leave or asyncio.Event()
    if num_events == 0:
        left.set()
    received = False

    async def receive() -> Message:
        nonlocal received
        if not received:
            received = True
            return {"type": "http.request", "body": content, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            cut.status = message["status"]
            pairs = message.get("headers", ())
            cut.headers = {name.decode(): value.decode() for name, value in pairs}
            return
        if left.is_set():
            return
        cut.body += message.get("body", b"")
        cut.is_complete = not message.get("more_body", False)
        if num_events is not None and cut.body.count(EVENT_END) >= num_events:
            left.set()

    await app(scope, receive, send)
    return cut


async def settled(streams: Any) -> None:
    """Wait until no stream is written any more."""
    while streams.tasks:
        await asyncio.wait(streams.tasks)
