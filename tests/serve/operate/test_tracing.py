"""OpenTelemetry: the spans of requests, and what is said without the extra."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httpx
import pytest
from client import CHAT, MESSAGES, client_of
from fake_engine import FakeEngine

from quickstep.cli.main import main
from quickstep.errors import ConfigError
from quickstep.server.app import create_app
from quickstep.server.operate import tracing
from quickstep.server.operate.tracing import RequestTracer, check_tracing
from quickstep.server.options import MetricsOptions, ServerOptions

URL = "http://127.0.0.1:4318/v1/traces"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        check_tracing(URL)


def test_a_url_that_is_not_http_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTLP over HTTP"):
        check_tracing("grpc://localhost:4317")
    check_tracing(None)


def test_serve_says_so_before_it_loads(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--otlp-traces-endpoint", "localhost", "--port", "0"]) == 2
    assert "--otlp-traces-endpoint is 'localhost'" in capfd.readouterr().err


def spans_of(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], **body: Any
) -> tuple[Any, ...]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "open_tracer", lambda _: RequestTracer(exporter))
    options = ServerOptions(metrics=MetricsOptions(otlp_traces_endpoint=URL))

    async def run() -> httpx.Response:
        async with client_of(create_app(FakeEngine(), options)) as client:
            return await client.post(CHAT, json={"messages": MESSAGES, **body}, headers=headers)

    assert asyncio.run(run()).status_code == 200
    return exporter.get_finished_spans()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_activities_as_children(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    headers = {"traceparent": PARENT, "x-request-id": "web-1"}
    *children, span = spans_of(monkeypatch, headers, max_tokens=5, stream=stream)
    assert span.name == "llm_request"
    assert format(span.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(span.parent.span_id, "016x") == PARENT.split("-")[2]
    attributes = span.attributes
    assert attributes["gen_ai.request.id"] == "web-1"
    assert attributes["gen_ai.request.max_tokens"] == 5
    assert attributes["gen_ai.usage.completion_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    for child in children:
        assert child.parent.span_id == span.context.span_id
        assert child.start_time <= child.end_time
    assert children[0].end_time == children[1].start_time
    assert span.resource.attributes["service.name"] == "quickstep"


def test_a_request_without_a_trace_begins_one(monkeypatch: pytest.MonkeyPatch) -> None:
    *children, span = spans_of(monkeypatch, {"traceparent": "what"}, n=2)
    assert span.parent is None
    assert [child.attributes["quickstep.choice"] for child in children] == [0, 0, 0, 1, 1, 1]
