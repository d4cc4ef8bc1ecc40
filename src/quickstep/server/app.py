"""The ASGI app of one engine with all its routes; the engine starts and stops with it.

`early_app` serves the first requests while this module and all it needs are not imported yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from quickstep.server.app_parts import Lifespan, routed, serving
from quickstep.server.batches.endpoint import LocalBatches
from quickstep.server.generate.adapter import Served
from quickstep.server.generate.engine_interface import ServedEngine
from quickstep.server.metrics import Metrics
from quickstep.server.options import ServerOptions
from quickstep.server.route_list import api_routes

__all__ = ["create_app", "whole_app"]


def create_app(engine: ServedEngine, options: ServerOptions | None = None) -> Starlette:
    """The app. Its lifespan starts the engine and, at the end, stops it."""
    options = options or ServerOptions()
    served = Served.of(engine, options)
    metrics = Metrics(engine, served.names[0])
    batches = LocalBatches(served, metrics, options)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        batches.start()
        async with serving(engine, metrics):
            try:
                yield
            finally:
                await batches.stop()

    return whole_app(served, metrics, options, batches, lifespan)


def whole_app(
    served: Served,
    metrics: Metrics,
    options: ServerOptions,
    batches: LocalBatches,
    lifespan: Lifespan | None = None,
) -> Starlette:
    """All routes. Who calls this starts and stops `batches`."""
    routes = api_routes(served, metrics, options, batches)
    return routed(routes, options, served.lanes, lifespan)
