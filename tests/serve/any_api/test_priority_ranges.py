"""Which priorities a client may send: a range for each API key, and one without keys."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine

from quickstep.errors import ConfigError
from quickstep.server.app import create_app
from quickstep.server.batches.lines import BATCH_URLS, batch_endpoints
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.operate.metrics import ServerMetrics
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys, PriorityRange

KEYS = ApiKeys(["ann[-100..0]=secret-a", "bob=secret-b", "eve[5..5]:secret-e"])
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": MESSAGES},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}


def post(path: str, priority: int, key: str | None, engine: FakeEngine) -> httpx.Response:
    options = ServerOptions(api_keys=KEYS if key else ApiKeys())

    async def run() -> httpx.Response:
        async with client_of(create_app(engine, options)) as client:
            body = {**BODIES[path], "priority": priority}
            return await client.post(path, json=body, headers={"x-api-key": key} if key else None)

    return asyncio.run(run())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("key", "low", "high"),
    [
        (None, -10, 10),
        ("secret-a", -100, 0),
        ("secret-b", -10, 10),
        ("secret-e", 5, 5),
    ],
)
def test_a_priority_outside_the_range_is_refused_and_the_range_named(
    path: str, key: str | None, low: int, high: int
) -> None:
    for priority in (low, high):
        engine = FakeEngine()
        assert post(path, priority, key, engine).status_code == 200
        assert engine.submitted[0].priority == priority
    for priority in (low - 1, high + 1, -(2**40)):
        engine = FakeEngine()
        refused = post(path, priority, key, engine)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "priority"
        assert f"must be between {low} and {high}" in error["message"]
        assert not engine.submitted


@pytest.mark.parametrize("url", sorted(BATCH_URLS & BODIES.keys()))
def test_no_priority_of_a_key_takes_a_batchs_line_before_live_requests(url: str) -> None:
    engine = FakeEngine()

    async def run() -> None:
        options = ServerOptions(api_keys=KEYS)
        models = ModelRegistry.of_one(engine, options)
        endpoint = batch_endpoints(models, ServerMetrics(models, options.metrics))[url]
        await engine.start()
        for priority in (-100, -3, 0):
            body = json.dumps({**BODIES[url], "priority": priority}).encode()
            await endpoint(body, "ann", 1000)

    asyncio.run(run())
    assert [item.priority for item in engine.submitted] == [990, 997, 1000]


def test_the_document_has_the_widest_range_of_all_keys() -> None:
    assert KEYS.priorities == PriorityRange(-100, 10)
    assert ApiKeys().priorities == PriorityRange(-10, 10)


@pytest.mark.parametrize("given", ["", "1", "5..1", "a..b", "-99999999999..0", "1..2..3"])
def test_a_range_that_is_none_is_refused_at_the_start(given: str) -> None:
    with pytest.raises(ConfigError, match=r"API key ann .*LOW\.\.HIGH"):
        ApiKeys([f"ann[{given}]=secret"])
