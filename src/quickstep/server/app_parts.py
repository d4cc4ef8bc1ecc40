"""What every app consists of: the front gate, the checks of bodies, the errors, the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from quickstep.errors import EngineError, RequestError
from quickstep.server.generate.engine_interface import ServedEngine
from quickstep.server.http.errors import error_response
from quickstep.server.http.middleware import AccessMiddleware, CrossOriginMiddleware
from quickstep.server.http.route import ApiRoute, BodyRules, with_checked_body
from quickstep.server.http.work_lanes import WorkLanes
from quickstep.server.metrics import Metrics, log_traffic
from quickstep.server.options import CorsOptions, ServerOptions

__all__ = ["Lifespan", "routed", "serving"]

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def routed(
    routes: Sequence[ApiRoute],
    options: ServerOptions,
    lanes: WorkLanes,
    lifespan: Lifespan | None = None,
) -> Starlette:
    """The app of these routes; `lanes` are where large bodies are looked at."""
    rules = BodyRules.of(options)
    app = Starlette(
        routes=[
            route
            for known in routes
            for route in replace(known, endpoint=with_checked_body(known, rules, lanes)).starlette()
        ],
        middleware=[
            *_cors(options.cors),
            Middleware(AccessMiddleware, routes=routes, options=options),
        ],
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


@asynccontextmanager
async def serving(engine: ServedEngine, metrics: Metrics) -> AsyncIterator[None]:
    """The engine runs, and its traffic is logged, until the end."""
    await engine.start()
    watching = asyncio.create_task(log_traffic(engine, metrics))
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await engine.stop()


def _cors(options: CorsOptions) -> list[Middleware]:
    if not options.origins:
        return []
    return [
        Middleware(
            CrossOriginMiddleware,
            allow_origins=options.origins,
            allow_methods=options.methods,
            allow_headers=options.headers,
            allow_credentials=options.credentials,
            expose_headers=("x-request-id", "x-quickstep-ignored", "retry-after"),
        )
    ]
