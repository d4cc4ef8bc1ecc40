"""A client has one request in hand while others come, too: not one that the engine answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine, Script

from quickstep.server.app import create_app
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

DEADLINE_S = 30.0
OPTIONS = ServerOptions(api_keys=ApiKeys(["ann=AAAA", "bob=BBBB"]))
ANN, BOB = {"x-api-key": "AAAA"}, {"x-api-key": "BBBB"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (COMPLETIONS, {"prompt": ["a", "b"], "stream": True}),
        (CHAT, {"messages": MESSAGES}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "model": "fake"}),
        ("/v1/responses", {"input": "a"}),
        ("/api/generate", {"model": "fake", "prompt": "a"}),
        ("/completion", {"prompt": "a"}),
    ],
)
def test_what_waits_for_the_engine_holds_back_none_of_its_client(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quickstep.server.http.turns._IN_HAND_S", DEADLINE_S)

    async def run() -> None:
        engine = FakeEngine(script=Script(gate=asyncio.Event()))
        async with client_of(create_app(engine, OPTIONS)) as client:
            for headers in (BOB, ANN):
                assert (await client.get("/v1/models", headers=headers)).status_code == 200
            posts = [
                asyncio.create_task(client.post(path, json=body, headers=ANN)) for _ in range(4)
            ]
            per_request = 2 if isinstance(body.get("prompt"), list) else 1
            while len(engine.submitted) < 4 * per_request:
                await asyncio.sleep(0.001)
            assert engine.script.gate is not None
            engine.script.gate.set()
            assert {(await post).status_code for post in posts} == {200}

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
