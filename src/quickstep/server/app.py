"""The ASGI app of one engine: the routes, their errors, and the engine's start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from quickstep.errors import EngineError, RequestError
from quickstep.server.api_errors import error_response
from quickstep.server.batches import LocalBatches
from quickstep.server.cross_origin import CrossOriginGate
from quickstep.server.engine_face import ServedEngine
from quickstep.server.front_gate import FrontGate
from quickstep.server.intake import Intake, taken_in
from quickstep.server.metrics import Metrics
from quickstep.server.options import CorsOptions, ServerOptions
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
        watching = asyncio.create_task(watch(engine, metrics))
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await batches.stop()
            await engine.stop()

    routes = api_routes(served, metrics, options, batches)
    intake = Intake.of(options)
    app = Starlette(
        routes=[
            route
            for known in routes
            for route in replace(known, endpoint=taken_in(known, intake)).starlette()
        ],
        middleware=[*_cors(options.cors), Middleware(FrontGate, routes=routes, options=options)],
        exception_handlers={
            HTTPException: error_response,
            RequestError: error_response,
            EngineError: error_response,
            Exception: error_response,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # another path is another path: 404
    return app


def _cors(options: CorsOptions) -> list[Middleware]:
    """Outside the gate: a browser asks for permission without a key."""
    if not options.origins:
        return []
    return [
        Middleware(
            CrossOriginGate,
            allow_origins=options.origins,
            allow_methods=options.methods,
            allow_headers=options.headers,
            allow_credentials=options.credentials,
            expose_headers=("x-request-id", "x-quickstep-ignored-fields", "retry-after"),
        )
    ]
