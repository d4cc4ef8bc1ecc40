"""Clients that go away: their requests end and nothing of theirs stays, streamed or not."""

import asyncio
import random

import pytest
from fake_engine import FakeEngine, Script
from live_server import DEADLINE_S, LiveServer, connect, live_server, until

from quickstep.server.options import ServerOptions


async def stream_once(server: LiveServer, leave_after: int | None) -> bytes:
    """Read a stream to its end, or leave after so many bytes."""
    reader, writer = await connect(server, {"prompt": "abc", "max_tokens": 8, "stream": True})
    try:
        if leave_after is not None:
            return await reader.read(leave_after) if leave_after else b""
        return await reader.readuntil(b"data: [DONE]\n\n")
    finally:
        writer.transport.abort()


def test_leaving_a_stream_ends_its_request() -> None:
    engine = FakeEngine(Script(endless=True))

    async def leave(server: LiveServer) -> None:
        reader, writer = await connect(server, {"prompt": "a", "stream": True})
        await reader.readuntil(b"Hello")
        assert len(engine.open_streams) == 1
        writer.close()

    with live_server(engine) as server:
        asyncio.run(leave(server))
        until(lambda: not engine.open_streams)


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_ends_its_request(stream: bool, prompts: int) -> None:
    engine = FakeEngine(Script(gate=asyncio.Event()))

    async def leave(server: LiveServer) -> None:
        body = {"prompt": ["a"] * prompts, "stream": stream}
        _, writer = await connect(server, body)
        while len(engine.open_streams) < prompts:
            await asyncio.sleep(0.001)
        writer.close()

    with live_server(engine) as server:
        asyncio.run(asyncio.wait_for(leave(server), DEADLINE_S))
        until(lambda: not engine.open_streams)


def test_leaving_within_the_body_submits_nothing() -> None:
    engine = FakeEngine()

    async def leave(server: LiveServer) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        await writer.drain()
        writer.close()

    with live_server(engine) as server:
        asyncio.run(leave(server))
    assert not engine.submitted


def test_200_streams_with_a_third_leaving_at_random_leave_nothing() -> None:
    engine = FakeEngine()
    rng = random.Random(0)
    leaves = [rng.randrange(0, 2000) if rng.random() < 0.3 else None for _ in range(200)]

    async def run(server: LiveServer) -> list[bytes]:
        return await asyncio.gather(*(stream_once(server, leave) for leave in leaves))

    with live_server(engine) as server:
        answers = asyncio.run(asyncio.wait_for(run(server), DEADLINE_S))
        until(lambda: not engine.open_streams)
    stayed = [answer for answer, leave in zip(answers, leaves, strict=True) if leave is None]
    assert len(stayed) > 100
    assert all(answer.count(b'"finish_reason":"length"') == 1 for answer in stayed)


def test_a_draining_server_lets_streams_end_and_takes_no_new_ones() -> None:
    gate = asyncio.Event()
    engine = FakeEngine(Script(gate=gate))

    async def run(server: LiveServer) -> bytes:
        reader, writer = await connect(server, {"prompt": "a", "stream": True})
        while not engine.open_streams:
            await asyncio.sleep(0.001)
        server.server.should_exit = True
        while server.server.servers and server.server.servers[0].is_serving():
            await asyncio.sleep(0.001)
        with pytest.raises(OSError, match=r"."):
            await asyncio.open_connection("127.0.0.1", server.port)
        assert engine.loop is not None
        engine.loop.call_soon_threadsafe(gate.set)
        answer = await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()
        return answer

    with live_server(engine, ServerOptions(drain_s=DEADLINE_S)) as server:
        answer = asyncio.run(asyncio.wait_for(run(server), DEADLINE_S))
    assert b'"finish_reason":"stop"' in answer
