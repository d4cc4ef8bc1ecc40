"""What `app` and `lazy_app` are built from: middleware, checks of bodies, error responses, and the
engine's start and stop.
"""

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
from quickstep.server.http.route import ApiRoute, BodyRules, with_admin_check, with_checked_body
from quickstep.server.http.work_lanes import WorkLanes
from quickstep.server.metrics import Metrics, log_traffic
from quickstep.server.options import CorsOptions, ServerOptions

__all__ = ["Lifespan", "running_engine", "starlette_app"]

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def starlette_app(
    routes: Sequence[ApiRoute],
    options: ServerOptions,
    lanes: WorkLanes,
    lifespan: Lifespan | None = None,
) -> Starlette:
    """An app with these routes. Large bodies are checked in the threads of `lanes`."""
    rules = BodyRules.of(options)
    app = Starlette(
        routes=[
            route
            for api_route in routes
            for route in replace(
                api_route,
                endpoint=with_admin_check(
                    api_route, options.api_keys, with_checked_body(api_route, rules, lanes)
                ),
            ).starlette()
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
async def running_engine(engine: ServedEngine, metrics: Metrics) -> AsyncIterator[None]:
    """Run the engine and log its traffic inside this context."""
    await engine.start()
    logging_traffic = asyncio.create_task(log_traffic(engine, metrics))
    try:
        yield
    finally:
        logging_traffic.cancel()
        with suppress(asyncio.CancelledError):
            await logging_traffic
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
