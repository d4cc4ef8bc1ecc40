"""Two models in one server: a request reaches the one that it names, and is counted there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from client import CHAT, MESSAGES, client_of
from fake_engine import FakeEngine
from msgspec.structs import replace

from quickstep.server.app import app_of_models
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.models.server_state import ServerState
from quickstep.server.options import ServerOptions

Use = Callable[[httpx.AsyncClient], Awaitable[Any]]


def two_models(use: Use) -> tuple[Any, list[FakeEngine]]:
    """What `use` returns for a server with the models `small` and `large`, and their engines."""
    engines = [FakeEngine(), FakeEngine()]

    async def run() -> Any:
        options = ServerOptions()
        server = ServerState.of(options)
        models = [
            ServedModel.of(engine, replace(options, served_model_names=(name,)), server)
            for name, engine in zip(("small", "large"), engines, strict=True)
        ]
        async with client_of(app_of_models(ModelRegistry(server, models), options)) as client:
            return await use(client)

    return asyncio.run(run()), engines


BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
    ("/completion", {"prompt": "a"}),
    ("/api/chat", {"messages": MESSAGES, "stream": False}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/api/embed", {"input": "a"}),
    ("/invocations", {"prompt": "a"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_a_request_reaches_the_model_that_it_names(path: str, body: dict[str, Any]) -> None:
    async def use(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json={"model": "large", **body})

    response, (small, large) = two_models(use)
    assert response.status_code == 200, response.text
    assert (len(small.submitted), len(large.submitted)) == (0, 1)


def test_without_a_name_the_first_model_answers() -> None:
    async def use(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(CHAT, json={"messages": MESSAGES})

    response, (small, large) = two_models(use)
    assert response.json()["model"] == "small"
    assert (len(small.submitted), len(large.submitted)) == (1, 0)


def test_an_unknown_name_is_refused_with_all_names() -> None:
    async def use(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(CHAT, json={"messages": MESSAGES, "model": "huge"})

    response, _ = two_models(use)
    assert response.status_code == 404
    assert "this server has small, large" in response.json()["error"]["message"]


def test_a_name_that_is_no_text_is_refused_as_such() -> None:
    async def use(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(CHAT, json={"messages": MESSAGES, "model": 7})

    response, _ = two_models(use)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"


def test_each_model_is_listed_and_has_its_own_metrics() -> None:
    async def use(client: httpx.AsyncClient) -> tuple[list[str], str]:
        for _ in range(2):
            await client.post(CHAT, json={"messages": MESSAGES, "model": "large"})
        listed = (await client.get("/v1/models")).json()["data"]
        return [model["id"] for model in listed], (await client.get("/metrics")).text

    (names, metrics), _ = two_models(use)
    assert names == ["small", "large"]
    count = 'quickstep:e2e_request_latency_seconds_count{engine="0",model_name="%s"}'
    assert f"{count % 'small'} 0.0" in metrics
    assert f"{count % 'large'} 2.0" in metrics
    assert metrics.count("# TYPE quickstep:num_requests_running gauge") == 1


def test_the_own_name_of_a_model_comes_before_an_adapter_of_another_model() -> None:
    server = ServerState.of(ServerOptions())
    options = ServerOptions(adapter_names=("large",))
    first = ServedModel.of(FakeEngine(), replace(options, served_model_names=("small",)), server)
    second = ServedModel.of(FakeEngine(), ServerOptions(served_model_names=("large",)), server)
    models = ModelRegistry(server, [first, second])
    assert models.find("large") is second
    assert models.find("small:latest", optional_tag=":latest") is first
