"""Bodies, routes and models that do not exist, and the probes, over the scripted engine."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, JSON, client_of
from fake_engine import FakeEngine, FakeStream, Script, Submitted
from live_server import live_server
from msgspec.structs import replace

from quickstep.engine.stats import EngineState, EngineStats
from quickstep.model.decoder_spec import LongContext
from quickstep.model.sizing import MemoryPlan
from quickstep.server.app import create_app
from quickstep.server.options import RequestLimits, ServerOptions
from quickstep.types import Request, SamplingParams


def ask(
    method: str,
    path: str,
    engine: FakeEngine | None = None,
    options: ServerOptions | None = None,
    **more: Any,
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine(), options)) as client:
            return await client.request(method, path, **more)

    return asyncio.run(run())


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"nonsense",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a"} x',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"logit_bias": ' + b'{"a":' * 100_000,
    ],
)
def test_a_body_that_is_not_the_schemas_json_is_400(body: bytes) -> None:
    response = ask("POST", COMPLETIONS, content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("half", ["\\ud800", "\\udc00", "\\uDBFFx", "\\ude00\\ud83d"])
@pytest.mark.parametrize(
    ("body", "path"),
    [
        ('{"messages":[{"role":"user","content":"HALF"}]}', "messages[0].content"),
        (
            '{"messages":[{"role":"user","content":[{"type":"text","text":"HALF"}]}]}',
            "messages[0].content[0].text",
        ),
        ('{"messages":[{"role":"user","content":"a"}],"stop":["b","HALF"]}', "stop[1]"),
        ('{"messages":[],"metadata":{"a":{"HALF":1}}}', "metadata.a"),
        ('{"messages":[],"user":"HALF"}', "user"),
    ],
)
def test_half_a_surrogate_pair_is_400_with_its_path(body: str, path: str, half: str) -> None:
    content = body.replace("HALF", half).encode()
    response = ask("POST", CHAT, content=content, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["param"] == path
    assert f"{path} holds half a surrogate pair" in error_of(response)["message"]


def test_deeply_nested_json_in_a_free_field_is_400() -> None:
    nested = b"[" * 100_000 + b"]" * 100_000
    body = b'{"messages": [{"role": "user", "content": "a"}], "tools": %s}' % nested
    assert ask("POST", CHAT, content=body, headers=JSON).status_code == 400


@pytest.mark.parametrize("size", [1001, 5000, 16_001, 100_000])
def test_a_body_beyond_the_limit_is_413(size: int) -> None:
    options = ServerOptions(limits=RequestLimits(body_bytes=1000))
    response = ask("POST", CHAT, options=options, content=b"x" * size, headers=JSON)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


def test_a_body_of_unknown_length_is_limited_as_well() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    options = ServerOptions(limits=RequestLimits(body_bytes=1000))
    assert ask("POST", CHAT, options=options, content=pieces(), headers=JSON).status_code == 413


@pytest.mark.parametrize("path", ["/api", "/v1", "/v1/images", "/v1/chat/completions/x"])
def test_an_unknown_route_is_404(path: str) -> None:
    response = ask("GET", path)
    assert response.status_code == 404
    assert path in error_of(response)["message"]


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_a_path_without_parameters_takes_no_search_of_all_routes(
    monkeypatch: pytest.MonkeyPatch, root_path: str
) -> None:
    async def searches(*_: object) -> None:
        raise AssertionError("the router searches")

    async def run() -> tuple[int, int]:
        app = create_app(FakeEngine(), ServerOptions(root_path=root_path))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found = await client.get(f"{root_path}/v1/models")
            other = await client.get(f"{root_path}/v1/models/a")
        return found.status_code, other.status_code

    monkeypatch.setattr("starlette.routing.Router.__call__", searches)
    assert asyncio.run(run()) == (200, 500)


def test_a_wrong_method_is_405_and_names_the_right_one() -> None:
    response = ask("GET", CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "use POST" in error_of(response)["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_model_is_404(path: str) -> None:
    body = {"model": "gpt-9", "prompt": "a"}
    if path == CHAT:
        body = {"model": "gpt-9", "messages": [{"role": "user", "content": "a"}]}  # type: ignore
    error = error_of(ask("POST", path, json=body))
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"


def test_models_are_listed_under_their_served_names() -> None:
    options = ServerOptions(served_model_names=("a/b", "c"))
    listed = ask("GET", "/v1/models", options=options).json()
    assert [model["id"] for model in listed["data"]] == ["a/b", "c"]
    one = ask("GET", "/v1/models/a/b", options=options).json()
    assert one["id"] == "a/b"
    assert (one["max_model_len"], one["rope_scaling"]) == (4096, None)
    for name in ("d", "a%0Ab", "a%0A"):
        missing = ask("GET", f"/v1/models/{name}", options=options)
        assert missing.status_code == 404
        assert error_of(missing)["code"] == "model_not_found"


def test_models_say_how_a_context_beyond_their_limit_is_scaled() -> None:
    scaling = LongContext("yarn", 2.0, 2048)
    plan = MemoryPlan(1, 4096, 1, 1, rows=(), notes=(), long_context=scaling)
    (one,) = ask("GET", "/v1/models", FakeEngine(memory_plan=plan)).json()["data"]
    assert one["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
    }


def test_the_first_served_name_answers_for_requests_without_one() -> None:
    options = ServerOptions(served_model_names=("a/b", "c"))
    answer = ask("POST", COMPLETIONS, options=options, json={"prompt": "a"}).json()
    assert answer["model"] == "a/b"


def test_a_clients_request_id_is_echoed() -> None:
    headers = {"x-request-id": "mine"}
    for stream in (False, True):
        body = {"prompt": "a", "stream": stream}
        response = ask("POST", COMPLETIONS, json=body, headers=headers)
        assert response.headers["x-request-id"] == "mine"


def test_a_prompt_beyond_the_context_is_400() -> None:
    response = ask("POST", COMPLETIONS, json={"prompt": "a" * 5000})
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"


def test_an_engine_that_does_not_run_is_503_and_not_ready() -> None:
    async def run() -> list[httpx.Response]:
        engine = FakeEngine()
        async with client_of(create_app(engine)) as client:
            ready = await client.get("/ready")
            engine.state = EngineState.FAILED
            engine.failure = "RuntimeError: broken"
            return [
                ready,
                await client.post(COMPLETIONS, json={"prompt": "a"}),
                await client.get("/ready"),
                await client.get("/health"),
            ]

    ready, refused, not_ready, unhealthy = asyncio.run(run())
    assert ready.json() == {"ready": True}
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert error_of(refused)["code"] == "engine_unavailable"
    assert not_ready.status_code == 503
    assert unhealthy.status_code == 503
    assert unhealthy.json()["status"] == "failed"


def test_a_fault_of_the_server_is_500_in_openais_shape_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(FakeEngine):
        def stream(self, request: Request) -> FakeStream:
            raise ZeroDivisionError("a secret of the inside")

    with live_server(Broken()) as server:
        response = httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a"})
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
    traces = [record for record in caplog.records if record.exc_info]
    assert len(traces) == 1


def test_a_panic_below_one_of_many_prompts_is_answered() -> None:
    """What pyo3 raises for a panic in Rust is no Exception."""

    class Panic(BaseException):
        pass

    with live_server(FakeEngine(Script(raises=Panic("planted")))) as server:
        body = {"prompt": ["a", "b"]}
        response = httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60)
    assert response.status_code == 500


def test_health_fails_when_work_is_pending_and_no_step_finishes() -> None:
    async def run() -> list[str]:
        engine = FakeEngine(now_s=1000.0)
        told = []
        async with client_of(create_app(engine, ServerOptions(stall_s=10.0))) as client:

            async def health() -> None:
                response = await client.get("/health")
                status = response.json()["status"]
                assert (response.status_code == 200) == (status == "ok")
                told.append(status)

            await health()
            item = Submitted((1,), SamplingParams(), 0, "", "")
            engine.open_streams.add(FakeStream(engine, item, "r"))
            for engine.now_s, engine.last_step_s in ((9, None), (11, None), (11, 5), (16, 5)):
                await health()
            engine.open_streams.clear()
            await health()
        return told

    assert asyncio.run(run()) == ["ok", "ok", "stalled", "ok", "stalled", "ok"]


@pytest.mark.parametrize(
    ("silent_s", "busy_for_s", "state", "is_ready"),
    [
        (0.0, 1.0, EngineState.RUNNING, True),
        (0.0, 11.0, EngineState.RUNNING, False),
        (2.0, 2.0, EngineState.RUNNING, True),
        (3.0, 3.0, EngineState.RUNNING, False),
        (0.0, 1.0, EngineState.RESTARTING, False),
    ],
)
def test_a_stalled_or_silent_engine_is_not_ready(
    silent_s: float, busy_for_s: float, state: EngineState, is_ready: bool
) -> None:
    async def run() -> None:
        class Engine(FakeEngine):
            def stats(self) -> EngineStats:
                told = super().stats()
                return replace(told, silent_s=silent_s, busy_since_s=0.0, state=state)

        app = create_app(Engine(now_s=busy_for_s), ServerOptions(stall_s=10.0))
        async with client_of(app) as client:
            response = await client.get("/ready")
        assert (response.status_code, response.json()["ready"]) == (
            200 if is_ready else 503,
            is_ready,
        )

    asyncio.run(run())


def test_metrics_carry_vllms_names() -> None:
    async def run() -> str:
        async with client_of(create_app(FakeEngine())) as client:
            await client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 2})
            await client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 20, "stream": True})
            return (await client.get("/metrics")).text

    lines = dict(
        line.rsplit(" ", 1) for line in asyncio.run(run()).splitlines() if line[:1] not in ("#", "")
    )
    model = 'engine="0",model_name="fake"'
    assert lines[f"quickstep:prompt_tokens_total{{{model}}}"] == "8.0"
    assert lines[f"quickstep:generation_tokens_total{{{model}}}"] == "11.0"
    ends = "quickstep:request_success_total"
    assert lines[f'{ends}{{engine="0",finished_reason="length",model_name="fake"}}'] == "1.0"
    assert lines[f'{ends}{{engine="0",finished_reason="stop",model_name="fake"}}'] == "1.0"
    for name, count in (
        ("time_to_first_token_seconds", 2),
        ("inter_token_latency_seconds", 9),
        ("e2e_request_latency_seconds", 2),
        ("request_queue_time_seconds", 2),
    ):
        assert lines[f"quickstep:{name}_count{{{model}}}"] == f"{count}.0"
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
    ):
        assert f"quickstep:{name}{{{model}}}" in lines


def test_embeddings_are_measured_as_well() -> None:
    async def run() -> str:
        async with client_of(create_app(FakeEngine())) as client:
            await client.post("/v1/embeddings", json={"input": ["abc", "de"]})
            await client.post("/v1/embeddings", json={"input": []})
            return (await client.get("/metrics")).text

    text, model = asyncio.run(run()), 'engine="0",model_name="fake"'
    for line in (
        f"quickstep:prompt_tokens_total{{{model}}} 7.0",
        'quickstep:request_success_total{engine="0",finished_reason="stop",model_name="fake"} 2.0',
        f"quickstep:request_prompt_tokens_count{{{model}}} 2.0",
        f"quickstep:e2e_request_latency_seconds_count{{{model}}} 1.0",
        f"quickstep:generation_tokens_total{{{model}}} 0.0",
    ):
        assert line in text


@pytest.mark.parametrize("path", ["/ping", "/version", "/health", "/ready"])
def test_probes_answer(path: str) -> None:
    assert ask("GET", path).status_code == 200
