"""Heads, bodies and JSON that are too large, too deep or too slow, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import httpx
import openai
import pytest
from client import CHAT, COMPLETIONS, JSON, MESSAGES
from fake_engine import FakeEngine, FakeTemplate, Script
from hypothesis import given
from hypothesis import strategies as st
from live_server import DEADLINE_S, LiveServer, live_server, until

from quickstep.errors import RequestError
from quickstep.server.http.body import check_json
from quickstep.server.http.connection_limit import address_of
from quickstep.server.options import ConnectionOptions, RequestLimits, ServerOptions
from quickstep.text.tool_calls.formats import formats_of

PROMPT = b'{"prompt":"a"}'


async def exchange(server: LiveServer, *pieces: bytes) -> bytes:
    """What comes back for some bytes, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()
    except (ConnectionResetError, BrokenPipeError):
        return b""
    finally:
        writer.close()


def answer_to(*pieces: bytes, options: ServerOptions | None = None) -> tuple[int, dict[str, Any]]:
    """Status and error of an exchange; the server must still serve afterwards."""
    with live_server(FakeEngine(), options or ServerOptions(drain_s=0.0)) as server:
        answer = asyncio.run(asyncio.wait_for(exchange(server, *pieces), DEADLINE_S))
        assert httpx.get(f"{server.url}/health").status_code == 200
    head, _, body = answer.partition(b"\r\n\r\n")
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


def head(path: str = "/health", *headers: str, method: str = "GET") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize(
    "pieces",
    [
        (head("/health", "x-a: " + "b" * 33_000),),
        (head("/health", *[f"x-{number}: {'b' * 100}" for number in range(400)]),),
        (b"GET /health HTTP/1.1\r\nx-a: ", b"b" * 200_000),
        (b"GET /health HTTP/1.1\r\n", b"b" * 40_000),
        (b"GET /health HTTP/1.1\r\n", *[b"x-a: b\r\n" * 1000] * 9),
    ],
)
def test_headers_beyond_the_limit_are_431_before_they_end(pieces: tuple[bytes, ...]) -> None:
    status, error = answer_to(*pieces)
    assert (status, error["code"]) == (431, "headers_too_large")
    assert "the limit" in error["message"]


def test_a_url_beyond_the_limit_is_414() -> None:
    status, error = answer_to(head("/" + "a" * 9000))
    assert (status, error["code"]) == (414, "url_too_long")
    assert "9001 bytes, the limit is 8192" in error["message"]


@pytest.mark.parametrize(
    "garbage", [b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 99]
)
def test_what_is_no_http_is_400_in_openais_shape(garbage: bytes) -> None:
    status, error = answer_to(garbage)
    assert status == 400
    assert "not valid HTTP" in error["message"]


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"nonsense\r\n\r\n", b""),
        (head("/" + "a" * 9000, "x-request-id: mine"), b"mine\r\n"),
    ],
)
def test_what_never_became_a_request_is_answered_with_an_id(
    request_bytes: bytes, expected: bytes
) -> None:
    with live_server(FakeEngine(), ServerOptions(drain_s=0.0)) as server:
        answer = asyncio.run(asyncio.wait_for(exchange(server, request_bytes), DEADLINE_S))
    assert b"\r\nx-request-id: " + expected in answer


MALFORMED_CHUNK = b"ZZ\r\nx\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "body", [MALFORMED_CHUNK, b"1\r\nx\r\n" + MALFORMED_CHUNK, b"5\r\nhello" + MALFORMED_CHUNK]
)
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (COMPLETIONS, "application/json"),
        ("/tokenize", "application/json"),
        ("/v1/files", "multipart/form-data; boundary=B"),
    ],
)
def test_a_malformed_body_is_400_at_once(path: str, kind: str, body: bytes) -> None:
    fields = (f"content-type: {kind}", "transfer-encoding: chunked")
    line = f"POST {path} HTTP/1.1"
    head_bytes = "\r\n".join([line, "host: localhost", *fields, "", ""]).encode()
    with live_server(FakeEngine(), ServerOptions(drain_s=0.0)) as server:
        for pieces in ((head_bytes + body,), (head_bytes, body)):
            answer = asyncio.run(asyncio.wait_for(exchange(server, *pieces), DEADLINE_S))
            assert answer.startswith(b"HTTP/1.1 400 "), answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == (
                "the request is not valid HTTP/1.1"
            )


def test_a_malformed_body_is_answered_after_the_requests_before_it() -> None:
    good = head(COMPLETIONS, f"content-length: {len(PROMPT)}", method="POST") + PROMPT
    bad = head("/tokenize", "transfer-encoding: chunked", method="POST") + MALFORMED_CHUNK
    with live_server(FakeEngine(), ServerOptions(drain_s=0.0)) as server:
        answers = asyncio.run(asyncio.wait_for(exchange(server, good + good + bad), DEADLINE_S))
    assert [answer[:3] for answer in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]


@pytest.mark.parametrize("coding", ["xchunked", "gzip, chunked", "gzip", "identity", "deflate"])
def test_an_unknown_transfer_coding_is_501_at_once(coding: str) -> None:
    request = head(COMPLETIONS, f"transfer-encoding: {coding}", method="POST")
    status, error = answer_to(request + b"E\r\n" + PROMPT + b"\r\n0\r\n\r\n")
    assert (status, error["code"]) == (501, "unsupported_transfer_encoding")
    assert coding in error["message"]


def test_transfer_codings_in_two_headers_are_one_list() -> None:
    fields = ("transfer-encoding: gzip", "transfer-encoding: chunked")
    status, _ = answer_to(head(COMPLETIONS, *fields, method="POST") + b"0\r\n\r\n")
    assert status == 501


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages", "/api/chat", "/v1/files"])
def test_a_compressed_body_is_415(path: str) -> None:
    with live_server(FakeEngine(), ServerOptions(drain_s=0.0)) as server:
        for coding in ("gzip", "br", "identity, zstd"):
            fields = {**JSON, "content-encoding": coding}
            answer = httpx.post(f"{server.url}{path}", content=PROMPT, headers=fields)
            assert answer.status_code == 415
            assert coding in answer.text
        plain = {**JSON, "content-encoding": "identity"}
        answer = httpx.post(f"{server.url}{COMPLETIONS}", content=PROMPT, headers=plain)
        assert answer.status_code == 200


def test_headers_that_never_end_are_408() -> None:
    options = ServerOptions(connections=ConnectionOptions(header_s=0.05))
    status, error = answer_to(b"GET /health HTTP/1.1\r\nhost: localhost\r\n", options=options)
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_connection_that_says_nothing_is_closed() -> None:
    options = ServerOptions(connections=ConnectionOptions(header_s=0.05))
    with live_server(FakeEngine(), options) as server:
        assert asyncio.run(asyncio.wait_for(exchange(server), DEADLINE_S)) == b""


def test_a_connection_that_stays_open_may_rest_between_requests() -> None:
    options = ServerOptions(connections=ConnectionOptions(header_s=0.05, keep_alive_s=0.2))
    with live_server(FakeEngine(), options) as server:
        answer = asyncio.run(asyncio.wait_for(exchange(server, head()), DEADLINE_S))
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_long_answer_is_not_cut_by_the_clock_of_the_next_head() -> None:
    gate = asyncio.Event()
    engine = FakeEngine(Script(gate=gate))
    options = ServerOptions(connections=ConnectionOptions(header_s=0.05))

    async def run(server: LiveServer) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        first = head(COMPLETIONS, f"content-length: {len(PROMPT)}", method="POST") + PROMPT
        writer.write(first + b"GET /health HTTP/1.1\r\n")  # and the next one's beginning
        await writer.drain()
        while not engine.open_streams:
            await asyncio.sleep(0.001)
        assert engine.loop is not None
        engine.loop.call_soon_threadsafe(engine.loop.call_later, 0.2, gate.set)
        answer = await reader.readuntil(b'"usage"')
        writer.close()
        return answer

    with live_server(engine, options) as server:
        assert asyncio.run(asyncio.wait_for(run(server), DEADLINE_S)).startswith(b"HTTP/1.1 200")


def test_a_body_that_never_ends_is_408() -> None:
    options = ServerOptions(connections=ConnectionOptions(upload_s=0.05))
    request = head(COMPLETIONS, "content-length: 99", "connection: close", method="POST") + b'{"p'
    status, error = answer_to(request, options=options)
    assert (status, error["code"]) == (408, "request_timeout")


def nested(depth: int) -> bytes:
    value = b"[" * depth + b"]" * depth
    return b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":%s}}' % value


@pytest.mark.parametrize(("depth", "status"), [(62, 200), (63, 400), (5000, 400)])
def test_json_beyond_64_levels_is_400(depth: int, status: int) -> None:
    with live_server(FakeEngine()) as server:
        response = httpx.post(f"{server.url}{CHAT}", content=nested(depth), headers=JSON)
    assert response.status_code == status, response.text
    if status == 400:
        assert "nested more than 64 levels" in response.json()["error"]["message"]


def test_limits_of_a_body_are_the_operators() -> None:
    options = ServerOptions(limits=RequestLimits(body_bytes=200, json_depth=3))
    with live_server(FakeEngine(), options) as server:
        url = f"{server.url}{CHAT}"
        assert httpx.post(url, json={"messages": MESSAGES}).status_code == 200
        assert httpx.post(url, content=nested(2), headers=JSON).status_code == 400
        assert httpx.post(url, content=b" " * 201, headers=JSON).status_code == 413


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


NASTY = st.text('[]{}"\\,:a', max_size=6)
VALUES = st.recursive(
    st.one_of(NASTY, st.none(), st.integers()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NASTY, inner, max_size=3)),
    max_leaves=12,
)


@given(value=VALUES, limit=st.integers(0, 6), indent=st.sampled_from([None, 1]))
def test_the_depth_is_counted_outside_of_strings(
    value: Any, limit: int, indent: int | None
) -> None:
    body = json.dumps(value, indent=indent).encode()
    limits = RequestLimits(json_depth=limit)
    if depth_of(value) <= limit:
        check_json(body, limits)
    else:
        with pytest.raises(RequestError, match=f"nested more than {limit} levels"):
            check_json(body, limits)


def num_containers(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return 1 + sum(map(num_containers, inner)) if isinstance(value, dict | list) else 0


def num_commas(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return max(0, len(inner) - 1) + sum(map(num_commas, inner))


@given(value=VALUES, limit=st.integers(1, 6), indent=st.sampled_from([None, 1]))
def test_values_and_containers_are_counted_outside_of_strings(
    value: Any, limit: int, indent: int | None
) -> None:
    body = json.dumps(value, indent=indent).encode()
    for limits, is_within in (
        (RequestLimits(json_values=limit), num_commas(value) < limit),
        (RequestLimits(json_containers=limit, json_depth=1), num_containers(value) <= limit),
    ):
        try:
            check_json(body, limits)
        except RequestError as error:
            assert not is_within or "nested" in str(error)
        else:
            assert is_within


def test_strings_longer_than_a_slice_do_not_count() -> None:
    text = '",[{' * 40_000
    body = json.dumps({"prompt": text, "stop": [text[:9]]}).encode()
    check_json(body, RequestLimits(json_values=3, json_depth=2))
    with pytest.raises(RequestError, match="more than 1 values"):
        check_json(body, RequestLimits(json_values=1, json_depth=2))


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([1] * 300_001, "the body's JSON has more than 300000 values"),
        ([[1]] * 50_001, "the body's JSON has more than 50000 objects and lists"),
    ],
)
def test_more_values_than_decode_in_one_go_are_400(prompt: list[Any], problem: str) -> None:
    with live_server(FakeEngine()) as server:
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400, response.text
    assert problem in response.json()["error"]["message"]


def unread_stream(server: LiveServer) -> asyncio.Task[None]:
    """A client that asks for an endless stream and never reads."""

    async def run() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        body = b'{"prompt":"a","stream":true}'
        writer.write(head(COMPLETIONS, f"content-length: {len(body)}", method="POST") + body)
        await writer.drain()
        writer.transport.pause_reading()
        await asyncio.sleep(DEADLINE_S)

    return asyncio.ensure_future(run())


def test_a_client_that_reads_nothing_loses_its_request() -> None:
    engine = FakeEngine(Script(endless=True, words=("word " * 2000,)))
    options = ServerOptions(connections=ConnectionOptions(slow_reader_s=0.2))

    async def run(server: LiveServer) -> int:
        reading = unread_stream(server)
        while not engine.open_streams:
            await asyncio.sleep(0.001)
        while engine.open_streams:
            await asyncio.sleep(0.001)
        reading.cancel()
        return engine.num_steps

    with live_server(engine, options) as server:
        steps = asyncio.run(asyncio.wait_for(run(server), DEADLINE_S))
        until(lambda: not engine.open_streams)
        until(lambda: engine.num_steps == steps)
        until(lambda: not server.server.server_state.connections)


def let_go(engine: FakeEngine, gate: asyncio.Event) -> None:
    """Open the gate after some comments."""
    assert engine.loop is not None
    engine.loop.call_soon_threadsafe(engine.loop.call_later, 0.1, gate.set)


def test_a_silent_stream_gets_comments_that_clients_skip() -> None:
    gate = asyncio.Event()
    engine = FakeEngine(Script(gate=gate))
    options = ServerOptions(connections=ConnectionOptions(comment_every_s=0.02))

    with live_server(engine, options) as server:
        with httpx.stream(
            "POST", f"{server.url}{CHAT}", json={"messages": MESSAGES, "stream": True}
        ) as response:
            lines = response.iter_lines()
            seen = [line for line in (next(lines) for _ in range(12)) if line.startswith(":")]
        assert len(seen) > 1
        assert set(seen) == {": keep-alive"}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            stream = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
            let_go(engine, gate)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == "Hello world, this is a test."
        gate.clear()
        with (
            anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as claude,
            claude.messages.stream(model="fake", max_tokens=9, messages=MESSAGES) as events,
        ):
            let_go(engine, gate)
            assert "".join(events.text_stream) == text


WITHHELD = {
    CHAT: {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "find_it"}}]},
    "/v1/responses": {"input": "a", "tools": [{"type": "function", "name": "find_it"}]},
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 10**6,
        "messages": MESSAGES,
        "tools": [{"name": "find_it", "input_schema": {"type": "object"}}],
    },
}


@pytest.mark.parametrize("path", WITHHELD)
def test_a_stream_gets_comments_while_tokens_come_and_their_call_is_withheld(path: str) -> None:
    """The arguments come before the name, so nothing of the call can be sent."""
    words = ("<tool_call>", '{"arguments": {"a": "', *("x" * 1_000_000))  # more than are read
    template = FakeTemplate(formats_of("{{ tools }}<tool_call>{{ message.tool_calls }}"))
    engine = FakeEngine(Script(words=words, endless=True), chat_template=template)
    options = ServerOptions(drain_s=0.0, connections=ConnectionOptions(comment_every_s=0.02))
    with live_server(engine, options) as server:
        body = {**WITHHELD[path], "stream": True}
        with httpx.stream("POST", f"{server.url}{path}", json=body) as response:
            lines = response.iter_lines()
            num_steps = []
            while len(num_steps) < 4:
                if next(lines).startswith(":"):
                    num_steps.append(engine.num_steps)
        assert num_steps[0] < num_steps[-1], "no token came between the comments"
        until(lambda: not engine.open_streams)


def test_a_server_without_comments_sends_none() -> None:
    engine = FakeEngine()
    options = ServerOptions(connections=ConnectionOptions(comment_every_s=0))
    with live_server(engine, options) as server:
        body = {"messages": MESSAGES, "stream": True}
        text = httpx.post(f"{server.url}{CHAT}", json=body).text
    assert text.endswith("data: [DONE]\n\n")
    assert not any(line.startswith(":") for line in text.splitlines())


def test_a_connection_too_many_is_refused_in_words_and_the_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One address has three of four; a client of another one is served."""
    options = ServerOptions(connections=ConnectionOptions(max_connections=4), drain_s=0.0)

    async def run(port: int) -> list[bytes]:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for reader, writer in held:  # each is there, and is answered
            writer.write(head("/ping"))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        refused = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            refused.append(await reader.read())
            writer.close()
        for reader, writer in held:
            writer.write(head("/ping"))
            assert await reader.readuntil(b"HTTP/1.1 200")
            writer.close()
        return refused

    with live_server(FakeEngine(), options) as server:
        refused = asyncio.run(asyncio.wait_for(run(server.port), DEADLINE_S))
        until(lambda: len(server.server.server_state.connections) < 3)
        assert httpx.get(f"{server.url}/ping").status_code == 200
    for answer in refused:
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"3 connections of your address are open, its share" in answer
        assert b"retry-after: 1" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == (
            "too_many_connections"
        )
    told = [record for record in caplog.records if "--max-connections" in record.getMessage()]
    assert len(told) == 1


def test_half_heads_of_one_address_leave_room_for_another_address() -> None:
    options = ServerOptions(connections=ConnectionOptions(max_connections=90), drain_s=0.0)

    def connected(port: int, source: str) -> socket.socket:
        return socket.create_connection(
            ("127.0.0.1", port), timeout=DEADLINE_S, source_address=(source, 0)
        )

    with live_server(FakeEngine(), options) as server, ExitStack() as opened:
        for _ in range(100):
            flood = opened.enter_context(connected(server.port, "127.0.0.2"))
            flood.sendall(b"GET /ping HTTP/1.1\r\nhost: local")
        for _ in range(3):  # more than once: nothing of it is kept for the flood
            with connected(server.port, "127.0.0.3") as client:
                client.sendall(head("/ping", "connection: close"))
                assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")
        with connected(server.port, "127.0.0.2") as client:
            assert client.recv(65536).startswith(b"HTTP/1.1 503 ")
        opened.close()
        until(lambda: not server.server.server_state.connections)
        with connected(server.port, "127.0.0.2") as client:
            client.sendall(head("/ping", "connection: close"))
            assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("127.0.0.1", 5), "127.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::9", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        (("::1", 5, 0, 0), "::/64"),
        (("::ffff:192.0.2.7", 5, 0, 0), "192.0.2.7"),
        ("/run/socket", ""),
        (b"", ""),
        (None, ""),
    ],
)
def test_an_address_is_what_one_client_has(peer: object, address: str) -> None:
    transport = asyncio.BaseTransport(extra={"peername": peer})
    assert address_of(transport) == address


BODY = b'{"prompt":"a","max_tokens":2}'
FRAMINGS = {
    "content-length": b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY),
    "chunked": b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
}


@pytest.mark.parametrize("offer", ["h2c", "websocket", "TLS/1.0", "h2c, websocket"])
@pytest.mark.parametrize(
    "connection", ["Upgrade, HTTP2-Settings", "Upgrade", "keep-alive, upgrade"]
)
@pytest.mark.parametrize("framing", list(FRAMINGS))
@pytest.mark.parametrize("piece", [10_000, 7])
def test_another_protocol_that_a_client_offers_is_ignored(
    upgrades: LiveServer, offer: str, connection: str, framing: str, piece: int
) -> None:
    """Two requests of one connection, of which the first two offer it, in pieces of any size."""
    start = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    offered = f"upgrade: {offer}\r\nhttp2-settings: AAEAAEAA\r\nconnection: {connection}\r\n"
    sent = (start + offered).encode() + FRAMINGS[framing]
    sent = sent + sent + (start + "connection: close\r\n").encode() + FRAMINGS[framing]
    with socket.create_connection(("127.0.0.1", upgrades.port), timeout=DEADLINE_S) as client:
        for at in range(0, len(sent), piece):
            client.sendall(sent[at : at + piece])
        answer = b""
        while data := client.recv(65536):
            answer += data
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b'"object":"text_completion"') == 3


@pytest.fixture(scope="module")
def upgrades() -> Iterator[LiveServer]:
    with live_server(FakeEngine()) as server:
        yield server
