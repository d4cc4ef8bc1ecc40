"""Bytes of bodies that are being received: bounded together, shared by keys or by addresses."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from client import CHAT, COMPLETIONS, JSON, MESSAGES, client_of
from fake_engine import FakeEngine, Script
from live_server import DEADLINE_S, LiveServer, live_server, until

from quickstep.core.shares import Shares
from quickstep.errors import ConfigError
from quickstep.server.app import create_app
from quickstep.server.http.body import BodyRoom
from quickstep.server.http.errors import ServerBusy
from quickstep.server.options import ConnectionOptions, RequestLimits, ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

SIZE = 1000  # of a body, the largest
KEYS = ApiKeys(["ann=AAAA", "bob=BBBB"])
ROUTES = ["/v1/completions", "/tokenize", "/v1/messages", "/api/embed", "/v1/batches"]


def options(num_bodies: int = 9, api_keys: ApiKeys = KEYS) -> ServerOptions:
    return ServerOptions(
        limits=RequestLimits(body_bytes=SIZE),
        connections=ConnectionOptions(max_reception_bytes=num_bodies * SIZE),
        api_keys=api_keys,
        drain_s=0.0,
    )


def body(**fields: object) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 2, **fields}).encode().ljust(SIZE)


def head(key: str, *headers: str, path: str = COMPLETIONS) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"x-api-key: {key}", *headers]
    return "\r\n".join([*lines, "content-type: application/json", "", ""]).encode()


@contextmanager
def begun(server: LiveServer, sent: bytes, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(
        ("127.0.0.1", server.port), timeout=DEADLINE_S, source_address=(source, 0)
    ) as client:
        client.sendall(sent)
        yield client


def answer(client: socket.socket) -> tuple[bytes, bytes]:
    """The status line of the next response, and the rest of it."""
    with client.makefile("rb") as lines:
        status, rest, length = lines.readline().rstrip(), b"", 0
        while (line := lines.readline()).rstrip():
            rest += line
            name, _, value = line.partition(b":")
            length = int(value) if name == b"content-length" else length
        return status, rest + lines.read(length)


ANNOUNCED = f"content-length: {SIZE}"
FULL = b"HTTP/1.1 503 Service Unavailable"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("expect", [(), ("expect: 100-continue",)])
def test_unfinished_bodies_of_a_key_leave_room_and_end_with_their_clients(
    path: str, expect: tuple[str, ...]
) -> None:
    expecting = head("AAAA", "expect: 100-continue", ANNOUNCED)
    with live_server(FakeEngine(), options()) as server, ExitStack() as flood:
        for _ in range(8):
            client = flood.enter_context(begun(server, expecting))
            assert answer(client)[0] == b"HTTP/1.1 100 Continue"
        with begun(server, head("AAAA", ANNOUNCED, *expect, path=path)) as client:
            status, rest = answer(client)
        if path == "/v1/messages":
            assert status.startswith(b"HTTP/1.1 529")
        else:
            assert status == FULL
            assert b"retry-after: 1" in rest
        assert b"8000 bytes of request bodies of your API key" in rest
        assert b"its share of 9000" in rest
        with begun(server, head("BBBB", ANNOUNCED) + body()) as client:
            assert answer(client)[0] == b"HTTP/1.1 200 OK"
        flood.close()
        with httpx.Client(base_url=server.url, headers={"x-api-key": "AAAA", **JSON}) as client:
            until(lambda: client.post(COMPLETIONS, content=body()).status_code == 200)


def test_without_a_length_bytes_count_as_they_arrive() -> None:
    chunked = head("AAAA", "transfer-encoding: chunked")
    part = b"%x\r\n%s\r\n" % (SIZE - 10, b" " * (SIZE - 10))
    with live_server(FakeEngine(), options()) as server, ExitStack() as flood:
        for _ in range(8):
            flood.enter_context(begun(server, chunked + part))
        with begun(server, chunked) as client:
            until(lambda: _refused(server))
            client.sendall(part)
            assert answer(client)[0] == FULL
        with begun(server, head("BBBB", ANNOUNCED) + body()) as client:
            assert answer(client)[0] == b"HTTP/1.1 200 OK"


def _refused(server: LiveServer) -> bool:
    with begun(server, head("AAAA", ANNOUNCED, "expect: 100-continue")) as client:
        return answer(client)[0] == FULL


def test_without_keys_addresses_share_the_bytes() -> None:
    expecting = head("", "expect: 100-continue", ANNOUNCED)
    with (
        live_server(FakeEngine(), options(api_keys=ApiKeys())) as server,
        ExitStack() as flood,
    ):
        for _ in range(8):
            client = flood.enter_context(begun(server, expecting, "127.0.0.2"))
            assert answer(client)[0] == b"HTTP/1.1 100 Continue"
        with begun(server, expecting, "127.0.0.2") as client:
            status, rest = answer(client)
            assert status == FULL and b"of your address" in rest
        with begun(server, head("", ANNOUNCED) + body(), "127.0.0.3") as client:
            assert answer(client)[0] == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": MESSAGES, "stream": True}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/api/embed", {"input": "a", "model": "fake"}),
    ],
)
def test_a_body_counts_until_it_is_parsed_only(path: str, fields: dict[str, object]) -> None:
    """The bytes of one body suffice for any number of requests that generate."""

    async def run() -> list[httpx.Response]:
        gate = asyncio.Event()
        engine = FakeEngine(Script(gate=gate))
        headers = {"x-api-key": "AAAA", **JSON}
        content = json.dumps(fields).encode().ljust(SIZE)
        async with client_of(create_app(engine, options(num_bodies=1))) as client:
            posts = []
            for count in range(1, 4):
                posts.append(
                    asyncio.ensure_future(client.post(path, content=content, headers=headers))
                )
                while len(engine.submitted) < count and not posts[-1].done():
                    await asyncio.sleep(0.001)
            gate.set()
            return await asyncio.gather(*posts)

    async def bounded() -> list[httpx.Response]:
        async with asyncio.timeout(DEADLINE_S):
            return await run()

    assert [response.status_code for response in asyncio.run(bounded())] == [200] * 3


def test_bodies_that_are_too_large_malformed_or_late_give_their_room_back() -> None:
    async def run() -> None:
        headers = {"x-api-key": "AAAA", **JSON}

        async def endless() -> object:
            for _ in range(3):
                yield b" " * SIZE

        async with client_of(create_app(FakeEngine(), options(num_bodies=1))) as client:
            for _ in range(3):
                sent = [
                    await client.post(COMPLETIONS, content=content, headers=headers)
                    for content in (b" " * (SIZE + 1), endless(), b"{".ljust(SIZE), body(n=0))
                ]
                assert [response.status_code for response in sent] == [413, 413, 400, 400]
            good = await client.post(COMPLETIONS, content=body(), headers=headers)
            assert good.status_code == 200

    asyncio.run(run())


def test_less_than_one_body_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="--max-reception-bytes is 999, it must be at least"):
        ServerOptions(
            limits=RequestLimits(body_bytes=SIZE),
            connections=ConnectionOptions(max_reception_bytes=999),
        )
    assert options().reception_bytes == 9 * SIZE
    assert ServerOptions().reception_bytes == 64 * RequestLimits().body_bytes


def test_a_body_that_is_kept_has_its_room_after_the_response() -> None:
    """A client that has left may come back for an answer whose body waits to be parsed."""
    shares = Shares(10)
    kept, other = (BodyRoom(shares, owner, 1.0, has_key=True) for owner in ("ann", "bob"))
    kept.reserve(8)
    kept.keep()
    kept.leave()
    with pytest.raises(ServerBusy):
        other.reserve(8)
    kept.release()
    other.reserve(8)
    other.leave()
    kept.reserve(8)
