"""Posts to any route of an app over a scripted engine, for the field tables of the surfaces."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from client import client_of
from fake_engine import FakeEngine, Script

from quickstep.server.app import create_app

RESPONSES = "/v1/responses"
ANTHROPIC = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"


def post_to(path: str, body: dict[str, Any], engine: FakeEngine | None = None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine())) as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


def pieces(text: str, size: int = 3) -> tuple[str, ...]:
    return tuple(text[at : at + size] for at in range(0, len(text), size))


def saying(text: str, size: int = 3, **script: Any) -> Script:
    return Script(words=pieces(text, size), **script)


def events(text: str) -> list[tuple[str, str]]:
    """Name and data of each event; fails on anything else in the stream."""
    assert text.endswith("\n\n")
    found = []
    for event in text[:-2].split("\n\n"):
        name, data = event.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        found.append((name.removeprefix("event: "), data.removeprefix("data: ")))
    return found
