"""Deadlines over HTTP: a first token that cannot come in time, and the end at a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest
from client import COMPLETIONS, client_of
from fake_engine import FakeEngine, Script
from live_server import live_server, until

from quickstep.core.admission import AdmissionState
from quickstep.errors import FirstTokenTooLate
from quickstep.server.app import create_app
from quickstep.server.options import ConnectionOptions, Deadlines, ServerOptions
from quickstep.types import FinishReason


def post(
    fields: dict[str, Any], engine: FakeEngine, options: ServerOptions | None = None
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine, options or ServerOptions())) as client:
            return await client.post(COMPLETIONS, json={"prompt": "ab", **fields})

    return asyncio.run(run())


def test_a_first_token_that_comes_too_late_is_503_with_the_time_to_come_back() -> None:
    error = FirstTokenTooLate(deadline_s=0.5, wait_s=7.0, first_token_s=0.25)
    response = post({"ttft_deadline_ms": 500}, FakeEngine(script=Script(raises=error)))
    assert response.status_code == 503
    assert response.headers["retry-after"] == "7"
    refusal = response.json()["error"]
    assert (refusal["code"], refusal["param"]) == ("deadline_unreachable", "ttft_deadline_ms")
    assert "the predicted wait is 7.00 s" in refusal["message"]


def test_a_request_without_a_chance_is_refused_before_its_prompt_is_tokenised() -> None:
    state = AdmissionState(
        num_free_slots=0, waiting=((0, 20), (1000, 20)), running=((1000, 8),), interval_s=0.25
    )
    engine = FakeEngine(admission=state)
    late = {"prompt": "x" * 10_000, "ttft_deadline_ms": 900}  # more than the model's context
    response = post(late, engine)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "7"
    assert "the predicted wait is 7.88 s" in response.json()["error"]["message"]
    assert not engine.submitted
    assert post({"ttft_deadline_ms": 900, "priority": -1}, engine).status_code == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"ttft_deadline_ms": 900, "temperature": -1}, 503),
        ({"ttft_deadline_ms": 0}, 400),
        ({"ttft_deadline_ms": "soon"}, 400),
        ({"ttft_deadline_ms": 900, "priority": -1, "temperature": -1}, 400),
        ({"temperature": -1}, 400),
    ],
)
def test_other_fields_are_parsed_only_if_the_request_could_be_served_in_time(
    fields: dict[str, Any], status: int
) -> None:
    state = AdmissionState(
        20, num_free_slots=0, waiting=((0, 20),), running=((1000, 8),), interval_s=0.25
    )
    assert post(fields, FakeEngine(admission=state)).status_code == status


def test_a_full_queue_of_batch_requests_takes_interactive_ones() -> None:
    engine = FakeEngine(admission=AdmissionState(8, 0, max_waiting=8, num_free_slots=0))
    refused = post({"request_class": "batch"}, engine)
    assert refused.status_code == 429
    assert "8 sequences wait, the limit is 8" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert post({}, engine).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_shed_while_it_waits_is_503_too(stream: bool) -> None:
    script = Script(FinishReason.SHED, error="the first token cannot come", words=())
    response = post({"ttft_deadline_ms": 500, "stream": stream}, FakeEngine(script=script))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "deadline_unreachable"
    assert response.headers["retry-after"] == "1"


def test_a_stream_with_a_deadline_loses_no_delta() -> None:
    def texts(fields: dict[str, Any]) -> list[str]:
        response = post({"stream": True, "prompt": ["a", "b"], "n": 2, **fields}, FakeEngine())
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return sorted(f"{choice['index']}{choice['text']}" for choice in choices)

    assert texts({"ttft_deadline_ms": 5000}) == texts({})


def test_a_stream_with_a_long_deadline_is_kept_open_until_its_first_token() -> None:
    gate = asyncio.Event()
    engine = FakeEngine(Script(gate=gate))
    options = ServerOptions(connections=ConnectionOptions(comment_every_s=0.02))
    body = {"prompt": "ab", "stream": True, "ttft_deadline_ms": 60_000}
    with (
        live_server(engine, options) as server,
        httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=body) as response,
    ):
        lines = response.iter_lines()
        assert response.status_code == 200
        assert next(lines) == ": keep-alive"
        assert engine.loop is not None
        engine.loop.call_soon_threadsafe(gate.set)
        text = "".join(lines)
    assert '"finish_reason":"stop"' in text
    assert not engine.open_streams


def test_a_client_that_leaves_before_the_first_token_aborts_its_request() -> None:
    engine = FakeEngine(Script(gate=asyncio.Event()))
    options = ServerOptions(connections=ConnectionOptions(comment_every_s=0.02))
    body = {"prompt": "ab", "stream": True, "ttft_deadline_ms": 60_000}
    with live_server(engine, options) as server:
        with httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=body) as response:
            lines = response.iter_lines()  # its end would close the response
            assert next(lines) == ": keep-alive"
            assert engine.open_streams
        until(lambda: not engine.open_streams)


def test_a_client_that_leaves_as_the_stream_begins_aborts_all_of_its_prompts() -> None:
    """The first delta is waited for by a task, and nothing has read the stream yet."""
    engine = FakeEngine(Script(gate=asyncio.Event()))
    options = ServerOptions(connections=ConnectionOptions(comment_every_s=0.02))
    fields = {"prompt": ["a", "b"], "stream": True, "ttft_deadline_ms": 60_000}
    body = json.dumps(fields).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": COMPLETIONS,
        "raw_path": COMPLETIONS.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }

    async def run() -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert len(engine.open_streams) == 2
                raise OSError("the client has gone")

        app = create_app(engine, options)
        async with client_of(app):
            with contextlib.suppress(OSError):
                await app(scope, receive, send)
            assert not engine.open_streams

    asyncio.run(run())


def test_clients_that_know_only_openais_values_get_length_at_the_time_limit() -> None:
    engine = FakeEngine(script=Script(FinishReason.DEADLINE))
    options = ServerOptions(deadlines=Deadlines(finish_reason="length"))
    for stream in (False, True):
        response = post({"timeout_s": 5, "stream": stream}, engine, options)
        assert '"finish_reason":"length"' in response.text
        assert '"finish_reason":"timeout"' not in response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ttft_deadline_ms": 0}, "ttft_deadline_ms"),
        ({"ttft_deadline_ms": -1}, "ttft_deadline_ms"),
        ({"request_class": "urgent"}, "request_class"),
    ],
)
def test_bad_values_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    response = post(fields, FakeEngine())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
