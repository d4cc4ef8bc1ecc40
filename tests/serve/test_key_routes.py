"""Every route that works for a client counts for the limits of its key."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from client import CHAT, MESSAGES, client_of
from fake_engine import FakeEngine

from quickstep.server.api_keys import ApiKey, ApiKeys
from quickstep.server.app import create_app
from quickstep.server.options import ServerOptions
from quickstep.server.usage.limits import KeyLimits

ANN, BOB = {"x-api-key": "a"}, {"x-api-key": "b"}
KEYS = [ApiKey("ann", "a", limits=KeyLimits(requests_per_minute=2)), ApiKey("bob", "b")]
ROUTES = [
    (CHAT, {"messages": MESSAGES}),
    ("/tokenize", {"prompt": "a b"}),
    ("/detokenize", {"tokens": [1]}),
    ("/apply-template", {"messages": MESSAGES}),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": MESSAGES}),
    ("/v1/embeddings", {"input": "a"}),
]


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
