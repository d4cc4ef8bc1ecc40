"""A server in memory with a scripted engine, for tests of responses that are read again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from fake_engine import FakeEngine, Script
from starlette.applications import Starlette

from quickstep.server.app import app_of_models
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKey, ApiKeys

ANN, BOB = {"x-api-key": "a"}, {"x-api-key": "b"}
KEYS = ApiKeys([ApiKey("ann", "a"), ApiKey("bob", "b")])


class World:
    """The server, a client of it, and its kept streams."""

    def __init__(self, engine: FakeEngine, options: ServerOptions) -> None:
        self.engine = engine
        models = ModelRegistry.of_one(engine, options)
        self.app: Starlette = app_of_models(models, options)
        self.streams = models.server.kept_streams
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def call(self, method: str, url: str, headers: dict[str, str] | None = None) -> Any:
        """The response to a request without a body."""
        return await self.client.request(method, url, headers=headers)


def in_world(
    steps: Callable[[World], Awaitable[None]],
    script: Script | None = None,
    options: ServerOptions | None = None,
) -> None:
    """Run steps against a server that runs."""

    async def run() -> None:
        world = World(FakeEngine(script=script or Script()), options or ServerOptions())
        async with world.app.router.lifespan_context(world.app), world.client:
            await steps(world)

    asyncio.run(run())
