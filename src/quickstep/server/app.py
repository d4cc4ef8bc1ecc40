"""The ASGI app of one engine: routes, middleware, checks of bodies and error responses.

The engine starts and stops with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp

from quickstep.engine.interface import ServedEngine
from quickstep.server.batches.endpoint import LocalBatches
from quickstep.server.generate.adapter import Served
from quickstep.server.http.middleware import AccessMiddleware, CrossOriginMiddleware
from quickstep.server.http.route import (
    ApiRoute,
    BodyRules,
    with_admin_check,
    with_checked_body,
    with_key_limits,
)
from quickstep.server.metrics import Metrics, log_traffic
from quickstep.server.options import CorsOptions, ServerOptions
from quickstep.server.routes import api_routes
from quickstep.server.usage.price_book import Price, PriceBook
from quickstep.server.usage.recorder import UsageRecorder

_LOG = logging.getLogger("quickstep.server")
_EXPOSED_HEADERS = (
    *("x-request-id", "x-quickstep-ignored", "retry-after"),
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    *("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
)
_Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def create_app(engine: ServedEngine, options: ServerOptions | None = None) -> Starlette:
    """The app. Its lifespan starts the engine and, at the end, stops it."""
    options = options or ServerOptions()
    served = Served.of(engine, options)
    metrics = Metrics(engine, served.names[0], options.metrics)
    batches = LocalBatches(served, metrics, options)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        batches.start()
        async with _running_engine(served, metrics, options):
            try:
                yield
            finally:
                await batches.stop()

    return starlette_app(api_routes(served, metrics, options, batches), options, served, lifespan)


def starlette_app(
    routes: Sequence[ApiRoute],
    options: ServerOptions,
    served: Served,
    lifespan: _Lifespan | None = None,
) -> Starlette:
    """An app with these routes. Large bodies are checked in threads."""
    rules = BodyRules.of(options)
    app = _App(
        routes=[
            route
            for api_route in routes
            for route in replace(
                api_route,
                endpoint=with_admin_check(
                    api_route,
                    options.api_keys,
                    with_key_limits(
                        api_route,
                        served.limiter,
                        with_checked_body(api_route, rules, served.lanes, served.reception),
                    ),
                ),
            ).starlette()
        ],
        middleware=[
            *_cors(options.cors),
            Middleware(AccessMiddleware, routes=routes, options=options, limiter=served.limiter),
        ],
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # another path is another path: 404
    return app


class _App(Starlette):
    """Starlette without its middleware for exceptions: `AccessMiddleware` answers all of them."""

    def build_middleware_stack(self) -> ASGIApp:
        """The router within the middleware of `starlette_app`."""
        app: ASGIApp = self.router
        for middleware, args, kwargs in reversed(self.user_middleware):
            app = middleware(app, *args, **kwargs)
        return app


@asynccontextmanager
async def _running_engine(
    served: Served, metrics: Metrics, options: ServerOptions
) -> AsyncIterator[None]:
    """Run the engine, record its usage and log its traffic inside this context."""
    engine, recorder = served.engine, _recorder(served, options)
    recorder.open()
    engine.step_log.follow(recorder)
    await engine.start()
    logging_traffic = asyncio.create_task(log_traffic(engine, metrics))
    try:
        yield
    finally:
        logging_traffic.cancel()
        with suppress(asyncio.CancelledError):
            await logging_traffic
        await engine.stop()
        recorder.close()
        if metrics.tracer is not None:
            await asyncio.to_thread(metrics.tracer.close)


def _recorder(served: Served, options: ServerOptions) -> UsageRecorder:
    model, prices, ledger = served.names[0], served.price_book, None
    if prices is not None and prices.price(model) == Price():
        _LOG.warning("the price book has no price for %s: its requests cost nothing", model)
    if options.usage.ledger is not None:
        # few servers have a ledger, and SQLite takes time to import
        from quickstep.server.usage.ledger import Ledger

        ledger = Ledger(options.usage.ledger)
    return UsageRecorder(
        model,
        prices or PriceBook(),
        served.limiter,
        has_keys=bool(options.api_keys),
        ledger=ledger,
    )


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
            expose_headers=_EXPOSED_HEADERS,
        )
    ]
