"""A server on an ephemeral port of 127.0.0.1, in a thread, for tests that need real sockets."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quickstep.engine.interface import ServedEngine
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.options import ServerOptions
from quickstep.server.run import DrainingServer, bind, server_for

DEADLINE_S = 30.0


@dataclass(frozen=True)
class LiveServer:
    """Where it listens, and the server itself."""

    port: int
    server: DrainingServer
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def live_server(engine: ServedEngine, options: ServerOptions | None = None) -> Iterator[LiveServer]:
    """Serve `engine` until the block ends."""

    async def opened() -> ServedEngine:
        return engine

    with live_server_of(opened, options) as server:
        yield server


@contextmanager
def live_server_of(
    open_engine: Callable[[], Awaitable[ServedEngine]], options: ServerOptions | None = None
) -> Iterator[LiveServer]:
    """Serve the engine that `open_engine` opens in the server's loop, until the block ends."""
    started: Future[DrainingServer] = Future()
    with bind("127.0.0.1", 0) as sock:

        async def run() -> None:
            try:
                given = options or ServerOptions(drain_s=0.0)
                models = ModelRegistry.of_one(await open_engine(), given)
                server = server_for(models, given)
                serving = asyncio.create_task(server.serve([sock]))
                while not server.started and not serving.done():
                    await asyncio.sleep(0.001)
                started.set_result(server)
            except BaseException as error:
                started.set_exception(error)
                raise
            await serving

        thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
        thread.start()
        server = started.result(60)
        assert server.started
        try:
            yield LiveServer(sock.getsockname()[1], server, thread)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    """Poll; the test fails if it takes longer than any slow machine would."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


async def connect(
    server: LiveServer, body: dict[str, Any], path: str = "/v1/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request by hand, so that the connection can be dropped at any byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer
