"""Every route that works for a client counts for the limits of its key."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from client import CHAT, MESSAGES, client_of
from fake_engine import FakeEngine

from quickstep.server.app import create_app
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.operate.metrics import ServerMetrics
from quickstep.server.options import ServerOptions
from quickstep.server.routes import api_routes
from quickstep.server.usage.api_keys import ApiKey, ApiKeys
from quickstep.server.usage.limits import KeyLimits

ANN, BOB = {"x-api-key": "a"}, {"x-api-key": "b"}
KEYS = [ApiKey("ann", "a", limits=KeyLimits(requests_per_minute=2)), ApiKey("bob", "b")]
ROUTES: list[tuple[str, dict[str, object]]] = [
    (CHAT, {"messages": MESSAGES}),
    ("/tokenize", {"prompt": "a b"}),
    ("/detokenize", {"tokens": [1]}),
    ("/apply-template", {"messages": MESSAGES}),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": MESSAGES}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/v2/rerank", {"query": "a", "documents": ["b"]}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/classify", {"input": "a"}),
    ("/v1/completions", {"prompt": "a"}),
    ("/invocations", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"model": "fake", "messages": MESSAGES, "max_tokens": 2}),
    ("/completion", {"prompt": "a"}),
    ("/api/chat", {"model": "fake", "messages": MESSAGES, "stream": False}),
    ("/api/generate", {"model": "fake", "prompt": "a", "stream": False}),
    ("/api/embed", {"model": "fake", "input": "a"}),
    ("/api/embeddings", {"model": "fake", "prompt": "a"}),
]
STORING = {"/v1/files", "/v1/batches"}  # limited by what a key may store, see test_file_quotas
FREE = {  # short and of a bounded time
    *("/ping", "/v1/batches/{batch_id}/cancel", "/api/show"),
    *("/v1/responses/{response_id}/cancel", "/v1/streams/lookup"),
}
REFUSED = {"/api/pull", "/api/push", "/api/create", "/api/copy"}


def test_every_route_that_takes_a_body_counts_or_is_free_for_a_reason() -> None:
    options = ServerOptions()
    engine = FakeEngine()
    models = ModelRegistry.of_one(engine, options)
    routes = api_routes(models, ServerMetrics(models, options.metrics), options)
    posts = {route.path for route in routes if route.method == "POST" and not route.needs_admin}
    assert posts == {path for path, _ in ROUTES} | STORING | FREE | REFUSED


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
def test_each_route_counts_and_another_key_is_not_concerned(
    path: str, body: dict[str, object]
) -> None:
    async def run() -> list[httpx.Response]:
        options = ServerOptions(api_keys=ApiKeys(KEYS))
        async with client_of(create_app(FakeEngine(), options)) as client:
            found = [await client.post(path, json=body, headers=ANN) for _ in range(3)]
            return [*found, await client.post(path, json=body, headers=BOB)]

    first, second, third, other = asyncio.run(run())
    assert first.status_code == second.status_code == other.status_code == 200, first.text
    assert third.status_code == 429
    assert "requests per minute" in third.text


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/api/embed", "/v1/responses"])
def test_a_key_at_its_limit_is_refused_before_its_body_is_parsed(path: str) -> None:
    async def run() -> list[int]:
        options = ServerOptions(api_keys=ApiKeys(KEYS))
        async with client_of(create_app(FakeEngine(), options)) as client:
            malformed = {"content": b"{", "headers": {**ANN, "content-type": "application/json"}}
            before = await client.post(path, **malformed)
            for _ in range(2):
                await client.post("/tokenize", json={"prompt": "a"}, headers=ANN)
            return [before.status_code, (await client.post(path, **malformed)).status_code]

    assert asyncio.run(run()) == [400, 429]
