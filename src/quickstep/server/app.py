"""The ASGI app of one engine: the routes, their errors, and the engine's start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from quickstep.errors import EngineError, RequestError
from quickstep.server.api_errors import error_response
from quickstep.server.batches import LocalBatches
from quickstep.server.engine_face import ServedEngine
from quickstep.server.metrics import Metrics
from quickstep.server.options import ServerOptions
from quickstep.server.route_list import api_routes
from quickstep.server.surface import Served
from quickstep.server.traffic_log import watch

__all__ = ["create_app"]


def create_app(engine: ServedEngine, options: ServerOptions | None = None) -> Starlette:
    """The app. Its lifespan starts the engine and, at the end, stops it."""
    options = options or ServerOptions()
    served = Served.of(engine, options)
    metrics = Metrics(engine, served.names[0])
    batches = LocalBatches(served, metrics, options)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        batches.start()
        await engine.start()
        watching = asyncio.create_task(watch(engine))
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await batches.stop()
            await engine.stop()

    return Starlette(
        routes=[
            route
            for known in api_routes(served, metrics, options, batches)
            for route in known.starlette()
        ],
        exception_handlers={
            HTTPException: error_response,
            RequestError: error_response,
            EngineError: error_response,
            Exception: error_response,
        },
        lifespan=lifespan,
    )
