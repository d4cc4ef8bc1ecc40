"""Bytes that are almost HTTP: each exchange ends, with an answer of ours, and nothing breaks."""

from __future__ import annotations

import asyncio
import logging
import random

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import DEADLINE_S, live_server

from quickstep.server.options import ConnectionOptions, ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

BODY = b'{"prompt":"a"}'
POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: k\r\n"
    b"content-type: application/json\r\n"
)
REQUESTS = (
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\n\r\n",
    POST + b"content-length: 14\r\n\r\n" + BODY,
    POST + b"transfer-encoding: chunked\r\n\r\ne\r\n" + BODY + b"\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\ne\r\n" + BODY + b"\r\n0\r\nx-trailer: 1\r\n\r\n",
    POST + b"expect: 100-continue\r\ncontent-length: 14\r\n\r\n" + BODY,
    b"GET http://x/health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET //x/health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    b"GET /v1/models/%ff%fe HTTP/1.1\r\nx-api-key: k\r\n\r\n",
    b"GET /v1/models/\xc3\xa9 HTTP/1.1\r\nx-api-key: k\r\n\r\n",
    b"GET /health?\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)
PIECES = (b"\r\n", b"\0", b" ", b"%2e", b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n")
# clients that send half a request are waited for, so not for long
OPTIONS = ServerOptions(
    api_keys=ApiKeys(["a=k"]),
    connections=ConnectionOptions(header_s=0.3, upload_s=0.3, keep_alive_s=0.3),
    drain_s=0.0,
)


def garbled(rng: random.Random) -> bytes:
    """A request with a few bytes changed, or another one behind it."""
    data = bytearray(rng.choice(REQUESTS))
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                data[place:place] = bytes([rng.randrange(256)]) * rng.choice([1, 100])
            case 2:
                del data[place : place + rng.randrange(min(6, len(data) - 1))]
            case 3:
                data += rng.choice(REQUESTS)
            case _:
                data[place:place] = rng.choice(PIECES)
    return bytes(data)


async def answer(port: int, data: bytes) -> bytes:
    """All that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def answers(port: int, requests: list[bytes]) -> list[bytes]:
    return await asyncio.gather(*(answer(port, data) for data in requests))


def test_almost_http_is_answered_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(0)
    requests = [*REQUESTS, *(garbled(rng) for _ in range(500))]
    with live_server(FakeEngine(), OPTIONS) as server:
        found = asyncio.run(asyncio.wait_for(answers(server.port, requests), 4 * DEADLINE_S))
        assert httpx.get(f"{server.url}/health").status_code == 200
    statuses = {text.split()[1] for text in found if text}
    refused = {b"400", b"401", b"404", b"405", b"408", b"413", b"415", b"501"}
    assert statuses <= {b"100", b"200", *refused}
    for text in found:
        head, _, body = text.partition(b"\r\n\r\n")
        if head and b" 200 " not in head and b" 100 " not in head and body:
            assert body.startswith((b'{"error":', b"HTTP/1.1 "))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_request_is_answered_though_garbage_follows_it() -> None:
    data = POST + b"content-length: 14\r\n\r\n" + BODY + b"garbage\r\n\r\n"
    with live_server(FakeEngine(), OPTIONS) as server:
        text = asyncio.run(asyncio.wait_for(answer(server.port, data), DEADLINE_S))
    assert text.startswith(b"HTTP/1.1 200 ")
    assert b"this is a test" in text or b'"text"' in text
