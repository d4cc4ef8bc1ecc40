"""How the tests of the HTTP surface talk to an app: in memory, with its lifespan running."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(app: Starlette) -> AsyncGenerator[httpx.AsyncClient, None]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client,
    ):
        yield client


def frames(text: str) -> list[str]:
    """The data of each server-sent event; fails on anything else in the stream."""
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def chunks(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ends with `[DONE]`."""
    data = frames(text)
    assert data[-1] == "[DONE]"
    assert "[DONE]" not in data[:-1]
    return [json.loads(item) for item in data[:-1]]
