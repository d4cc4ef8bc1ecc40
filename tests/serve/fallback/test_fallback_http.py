"""Fallback chains over HTTP: what serves, what the response says, what the key is charged."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from client import CHAT, MESSAGES, chunks, client_of
from fake_engine import FakeEngine, Script
from msgspec.structs import replace
from upstream_double import ANSWER, CHUNK, UpstreamDouble, response, stream

from quickstep.core.fallback import read_routes
from quickstep.errors import ConfigError, EngineError, QueueFull, RequestError
from quickstep.server.app import app_of_models
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.models.server_state import ServerState
from quickstep.server.options import ServerOptions, UsageOptions
from quickstep.server.usage.api_keys import ApiKey, ApiKeys
from quickstep.server.usage.ledger import UsageTotals, usage_totals
from quickstep.server.usage.limits import KeyLimits
from quickstep.server.usage.price_book import PriceBook, PriceEntry
from quickstep.types import FinishReason

Use = Callable[[httpx.AsyncClient, list[FakeEngine]], Awaitable[Any]]
HEADER = "x-quickstep-fallback"
BODY = {"model": "large", "messages": MESSAGES}
FULL = QueueFull(9, 1, 9, 3.0)
FAILING = Script(reason=FinishReason.ERROR, error="the step failed", words=())


def served(
    use: Use, steps: list[dict[str, Any]] | None, options: ServerOptions | None = None
) -> Any:
    """What `use` returns for a server with the models `large`, which has these steps, and
    `small`.
    """

    async def run() -> Any:
        engines = [FakeEngine(), FakeEngine()]
        routes = {} if steps is None else read_routes({"large": steps})
        given = replace(options or ServerOptions(), routes=routes)
        server = ServerState.of(given)
        models = [
            ServedModel.of(engine, replace(given, served_model_names=(name,)), server)
            for name, engine in zip(("large", "small"), engines, strict=True)
        ]
        async with client_of(app_of_models(ModelRegistry(server, models), given)) as client:
            return await use(client, engines)

    return asyncio.run(run())


async def post(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post(CHAT, json=BODY | fields)


@pytest.mark.parametrize("is_stream", [False, True])
def test_full_queue_leads_to_the_other_model(is_stream: bool) -> None:
    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        engines[0].refusals.append(FULL)
        answer = await post(client, stream=is_stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers[HEADER] == "model=small"
        first = chunks(answer.text)[0] if is_stream else answer.json()
        assert first["model"] == "small"
        assert [len(engine.submitted) for engine in engines] == [0, 1]
        assert HEADER not in (await post(client)).headers
        labels = 'cause="overload",route="large",step="model=small"'
        metrics = (await client.get("/metrics")).text
        assert f"quickstep:fallbacks_total{{{labels}}} 1.0" in metrics

    served(use, [{"model": "small"}])


@pytest.mark.parametrize("is_stream", [False, True])
def test_failure_before_the_first_byte_leads_to_the_other_model(is_stream: bool) -> None:
    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        engines[0].script = FAILING
        answer = await post(client, stream=is_stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers[HEADER] == "model=small"
        assert "Hello" in answer.text
        assert not engines[0].open_streams

    served(use, [{"model": "small"}])


def test_stream_that_has_begun_ends_with_an_error() -> None:
    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        engines[0].script = Script(FinishReason.ERROR, "the step failed", words=("Hello",))
        answer = await post(client, stream=True)
        assert answer.status_code == 200
        assert HEADER not in answer.headers
        assert "the step failed" in answer.text
        assert not engines[1].submitted

    served(use, [{"model": "small"}])


def test_client_that_forbids_a_fallback_gets_the_refusal() -> None:
    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        for fallback, status in (("none", 429), ("same_model", 503)):
            engines[0].refusals[:] = [FULL]
            answer = await post(client, fallback=fallback)
            assert answer.status_code == status, answer.text
            assert int(answer.headers["retry-after"]) >= 1
        assert not engines[1].submitted
        assert (await post(client, fallback="maybe")).status_code == 400

    served(use, [{"model": "small"}])


def test_end_of_the_chain_is_503() -> None:
    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.refusals[:] = [FULL]
        answer = await post(client)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")

    served(use, [{"model": "small"}])


def test_error_of_the_client_is_answered_at_once() -> None:
    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        engines[0].refusals.append(RequestError("n is 7", param="n"))
        answer = await post(client)
        assert answer.status_code == 400
        assert not engines[1].submitted

    served(use, [{"model": "small"}])


def test_failed_request_is_repeated_without_drafts() -> None:
    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        engines[0].refusals.append(EngineError("no memory"))
        answer = await post(client)
        assert answer.headers[HEADER] == "speculation=off"
        assert answer.json()["model"] == "large"
        assert [item.speculation for item in engines[0].submitted] == [False]

    served(use, [{"speculation": False}])


def test_shorter_output_fits_the_limit_of_the_key_and_counts_once() -> None:
    limits = KeyLimits(tokens_per_minute=80, requests_per_minute=9)
    keys = ApiKeys((ApiKey("ann", "sk-ann", limits=limits),))

    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        client.headers["authorization"] = "Bearer sk-ann"
        warm = await post(client, max_tokens=4)
        assert warm.headers["x-ratelimit-remaining-requests"] == "8"
        answer = await post(client, max_tokens=4000)
        assert answer.status_code == 200, answer.text
        assert answer.headers[HEADER] == "max_tokens=3"
        assert answer.headers["x-ratelimit-remaining-requests"] == "7"
        assert answer.json()["usage"]["completion_tokens"] == 3

    served(use, [{"max_tokens": 3}], ServerOptions(api_keys=keys))


def test_routes_with_unknown_names_are_refused() -> None:
    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        """The server does not start."""

    with pytest.raises(ConfigError, match="there is no model 'huge'"):
        served(use, [{"model": "huge"}])
    with pytest.raises(ConfigError, match="NO_SUCH_KEY must have the API key"):
        served(use, [{"upstream": "http://x/v1", "model": "m", "key_env": "NO_SUCH_KEY"}])


def through(
    double: UpstreamDouble,
    use: Callable[[httpx.AsyncClient, list[FakeEngine]], Awaitable[None]],
    usage: UsageOptions | None = None,
) -> None:
    """Run `use` with a server whose model is full and whose chain leads to `double`."""

    async def run() -> None:
        async with double.running():
            engines = [FakeEngine()]
            steps = [{"upstream": double.url, "model": "remote", "key_env": "PATH_TO_KEY"}]
            options = ServerOptions(
                served_model_names=("large",),
                routes=read_routes({"large": steps}),
                usage=usage or UsageOptions(),
            )
            models = ModelRegistry.of_one(engines[0], options)
            async with client_of(app_of_models(models, options)) as client:
                engines[0].refusals[:] = [FULL] * 20
                await use(client, engines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH_TO_KEY", "sk-secret")
        asyncio.run(run())


def test_upstream_serves_with_its_tools() -> None:
    double = UpstreamDouble(response(json.dumps(ANSWER).encode()))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        answer = await post(client, tools=tools, priority=3)
        assert answer.status_code == 200, answer.text
        assert answer.json() == ANSWER
        assert answer.headers[HEADER] == "upstream=127.0.0.1/remote"
        assert double.bodies == [{"model": "remote", "messages": MESSAGES, "tools": tools}]
        assert "authorization: Bearer sk-secret" in double.heads[0]
        assert double.heads[0].startswith("POST /v1/chat/completions HTTP/1.1")
        assert not engines[0].submitted

    through(double, use)


@pytest.mark.parametrize("has_usage", [False, True])
def test_upstream_streams(has_usage: bool) -> None:
    usage = {"choices": [], "usage": ANSWER["usage"]}
    double = UpstreamDouble(stream(CHUNK, CHUNK, usage))

    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        more = {"stream_options": {"include_usage": True}} if has_usage else {}
        answer = await post(client, stream=True, **more)
        assert answer.status_code == 200, answer.text
        assert chunks(answer.text) == [CHUNK, CHUNK, *[usage] * has_usage]
        assert double.bodies[0]["stream_options"] == {"include_usage": True}

    through(double, use)


def test_invalid_body_is_not_sent_to_an_upstream() -> None:
    double = UpstreamDouble(response(json.dumps(ANSWER).encode()))

    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        answer = await post(client, n=1000)
        assert answer.status_code in (400, 429)
        assert not double.bodies

    through(double, use)


LONG = json.dumps(ANSWER).encode()
SAID = b'{"error": {"message": "sk-secret is no key of ours"}}'  # for operators only, if at all
FAILURES: dict[str, bytes | None] = {
    "hangs": None,
    "500": response(SAID, "500 No"),
    "401": response(SAID, "401 No"),
    "503": response(SAID, "503 No"),
    "shorter than it says": response(LONG)[:-9],
    "longer than it says": response(LONG).replace(str(len(LONG)).encode(), b"20"),
    "no json": response(b"<html>"),
    "no choices": response(SAID),
    "closes early": b"",
    "drips": b"HTTP/1.1 200 OK\r\ncontent-le",
    "redirects": response(b"", "302 Found", more="location: http://127.0.0.1:1/\r\n"),
    "too long": response(LONG).replace(b"content-length: ", b"content-length: 99999"),
    "429": response(SAID, "429 Slow", more="retry-after: 7\r\n"),
    "no http": b"SSH-2.0-x\r\n\r\n",
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("way", FAILURES)
def test_failed_upstream_ends_in_503(
    way: str, is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    double = UpstreamDouble(FAILURES[way])

    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        answer = await post(client, stream=is_stream, timeout_s=0.3)
        assert answer.status_code == 503, answer.text
        assert "sk-secret" not in answer.text + caplog.text
        assert int(answer.headers["retry-after"]) == (7 if way == "429" else 1)

    through(double, use)


@pytest.mark.parametrize(
    "reply", [stream(CHUNK, is_done=False), stream(CHUNK, "text"), stream(CHUNK, {"error": 1})]
)
def test_upstream_that_fails_in_its_stream_ends_it_with_an_error(reply: bytes) -> None:
    double = UpstreamDouble(reply)

    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        first, error = chunks((await post(client, stream=True)).text)
        assert first == CHUNK
        assert "the upstream 127.0.0.1" in error["error"]["message"]
        assert len(double.bodies) == 1

    through(double, use)


def test_failing_upstream_is_called_five_times_and_no_more() -> None:
    double = UpstreamDouble(response(b"{}", "400 No"))

    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        for _ in range(8):
            assert (await post(client)).status_code == 503
        assert len(double.bodies) == 5

    through(double, use)


def test_failed_call_is_repeated_within_the_budget() -> None:
    good, bad = response(LONG), response(b"{}", "502 No")
    double = UpstreamDouble([bad, good, bad, bad])

    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        assert (await post(client)).status_code == 200
        assert len(double.bodies) == 2
        assert (await post(client)).status_code == 503
        assert len(double.bodies) == 3

    through(double, use)


PRICES = PriceBook(
    default=PriceEntry(input_per_million=1e5, device_per_hour=3600.0),
    models={"remote": PriceEntry(input_per_million=2.0, output_per_million=10.0)},
)
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": ANSWER["usage"]}


@pytest.mark.parametrize(
    ("reply", "reason", "num_tokens"),
    [
        (response(LONG), "", (5, 7)),
        (stream(CHUNK, END, USAGE), "length", (5, 7)),
        (stream(CHUNK, CHUNK, END), "length", (0, 3)),  # without usage each chunk is a token
        (stream(CHUNK, is_done=False), "error", (0, 1)),
    ],
)
def test_an_upstreams_answer_is_a_row_of_the_ledger(
    tmp_path: Path, reply: bytes, reason: str, num_tokens: tuple[int, int]
) -> None:
    path = tmp_path / "usage.db"

    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        await post(client, stream=b"event-stream" in reply)

    through(UpstreamDouble(reply), use, UsageOptions(PRICES, path))
    (row,) = usage_totals(path, by=("model", "endpoint", "finish_reason"))
    num_prompt, num_output = num_tokens
    assert row == UsageTotals(
        group=("remote", CHAT, reason),
        num_sequences=1,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=0,
        num_output_tokens=num_output,
        queue_ns=0,
        prefill_ns=0,
        decode_ns=0,
        device_ns=0,
        cost_by_tokens_nusd=2_000 * num_prompt + 10_000 * num_output,
        cost_by_device_nusd=0,
    )


def test_a_failed_upstream_leaves_no_row(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"

    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        assert (await post(client)).status_code == 503

    through(UpstreamDouble(response(b"{}", "400 No")), use, UsageOptions(PRICES, path))
    assert [row.num_sequences for row in usage_totals(path)] == [0]


def test_why_names_the_steps_of_a_chain() -> None:
    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        engines[0].refusals[:] = [FULL]
        answer = await client.post(CHAT, json=BODY, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
        for name in ("mine", "chatcmpl-mine"):
            explained = (await client.get(f"/debug/requests/{name}")).json()
            (attempt,) = explained["fallbacks"]
            assert (attempt["step"], attempt["cause"]) == ("model=small", "overload")
            assert attempt["error"] == str(FULL)
        unknown = await client.get("/debug/requests/other")
        assert unknown.status_code == 404

    served(use, [{"model": "small"}])


def test_why_names_the_refusal_at_the_end_of_a_chain() -> None:
    async def use(client: httpx.AsyncClient, engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.refusals[:] = [FULL]
        answer = await client.post(CHAT, json=BODY, headers={"x-request-id": "mine"})
        assert answer.status_code == 503
        explained = (await client.get("/debug/requests/mine")).json()
        steps = [attempt["step"] for attempt in explained["fallbacks"]]
        assert steps == ["model=small", "refuse=503"]
        assert explained["sequences"] == []

    served(use, [{"model": "small"}])
