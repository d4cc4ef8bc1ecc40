"""The ASGI app: routes, middleware, checks of bodies and error responses.

The engines of its models start and stop with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from quickstep.core.fallback import check_names
from quickstep.engine.interface import ServedEngine
from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.server.batches.endpoint import LocalBatches
from quickstep.server.http.middleware import AccessMiddleware, CrossOriginMiddleware
from quickstep.server.http.route import (
    ApiRoute,
    BodyRules,
    with_admin_check,
    with_checked_body,
    with_key_limits,
)
from quickstep.server.kept_streams.kept_request import with_repeats
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.models.server_state import ServerState
from quickstep.server.operate.metrics import ServerMetrics, log_traffic
from quickstep.server.options import CorsOptions, ServerOptions
from quickstep.server.responses.store import ResponseStore
from quickstep.server.routes import api_routes
from quickstep.server.usage.price_book import Price, PriceBook
from quickstep.server.usage.recorder import UsageRecorder, record_upstream, restore_limits

if TYPE_CHECKING:
    from quickstep.server.usage.ledger import Ledger

_LOG = logging.getLogger("quickstep.server")
_EXPOSED_HEADERS = (
    *("x-request-id", "x-quickstep-ignored", "x-quickstep-fallback", "retry-after"),
    "idempotent-replayed",
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    *("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
)
_Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def create_app(engine: ServedEngine, options: ServerOptions | None = None) -> Starlette:
    """The app of one model. Its lifespan starts the engine and, at the end, stops it."""
    options = options or ServerOptions()
    return app_of_models(ModelRegistry.of_one(engine, options), options)


def app_of_models(models: ModelRegistry, options: ServerOptions) -> Starlette:
    """The app. Its lifespan starts the engines of the models and, at the end, stops them."""
    check_names(options.routes, (*models.names, *options.adapter_names))
    metrics = ServerMetrics(models, options.metrics)
    batches = LocalBatches(models, metrics, options)
    responses = ResponseStore(
        options.stored_responses,
        options.stored_response_bytes,
        options.stored_response_age_s,
        options.response_store,
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if responses.has_file:
            await asyncio.to_thread(responses.open)
        try:
            batches.start()
            async with _running_engines(models, metrics, options):
                try:
                    yield
                finally:
                    await batches.stop()
                    await models.server.kept_streams.stop()
        finally:
            if responses.has_file:
                await asyncio.to_thread(responses.close)

    routes = api_routes(models, metrics, options, batches, responses)
    return starlette_app(routes, options, models.server, lifespan)


def starlette_app(
    routes: Sequence[ApiRoute],
    options: ServerOptions,
    server: ServerState,
    lifespan: _Lifespan | None = None,
) -> Starlette:
    """An app with these routes. Large bodies are checked in threads."""
    rules = BodyRules.of(options)
    app = _App(
        [_checked(route, options, server, rules) for route in routes],
        middleware=[
            *_cors(options.cors),
            Middleware(AccessMiddleware, routes=routes, options=options, limiter=server.limiter),
        ],
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # another path is another path: 404
    return app


def _checked(
    route: ApiRoute, options: ServerOptions, server: ServerState, rules: BodyRules
) -> ApiRoute:
    """The route with its checks, the outermost first: the operator, limits, body, repeats."""
    endpoint = with_repeats(route, server.kept_streams)
    endpoint = with_checked_body(route, endpoint, rules, server.lanes, server.reception)
    endpoint = with_key_limits(route, server.limiter, endpoint)
    return replace(route, endpoint=with_admin_check(route, options.api_keys, endpoint))


class _App(Starlette):
    """Starlette without its middleware for exceptions: `AccessMiddleware` answers all of them."""

    def __init__(
        self,
        api_routes: Sequence[ApiRoute],
        middleware: Sequence[Middleware],
        lifespan: _Lifespan | None,
    ) -> None:
        super().__init__(middleware=middleware, lifespan=lifespan)
        self._api_routes = api_routes

    def build_middleware_stack(self) -> ASGIApp:
        """The router within the middleware of `starlette_app`."""
        app: ASGIApp = _PathLookup(self._api_routes, self)
        for middleware, args, kwargs in reversed(self.user_middleware):
            app = middleware(app, *args, **kwargs)
        return app

    @property
    def routes(self) -> list[BaseRoute]:
        """Starlette's routes, made when one is needed: they take as long as the rest of an app."""
        if not self.router.routes:
            self.router.routes.extend(
                route for api_route in self._api_routes for route in api_route.starlette()
            )
        return self.router.routes


class _PathLookup:
    """Finds the route of a path without parameters at once. Starlette's router would try a hundred
    routes one after the other, and has what is left.
    """

    def __init__(self, routes: Sequence[ApiRoute], app: Starlette) -> None:
        self._app = app
        self._endpoints = {
            (method, path): endpoint
            for route in reversed(routes)  # the first one of a path counts
            for endpoint in [route.asgi()]
            for path in route.paths
            if "{" not in path
            for method in route.methods
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            endpoint = self._endpoints.get((scope["method"], path))
            if endpoint is None:
                _ = self._app.routes  # they are there now
        await (endpoint or self._app.router)(scope, receive, send)


@asynccontextmanager
async def _running_engines(
    models: ModelRegistry, metrics: ServerMetrics, options: ServerOptions
) -> AsyncIterator[None]:
    """Run the engines, record their usage and log their traffic inside this context."""
    ledger = _open_ledger(models.server, options)
    if ledger is not None:
        models.server.fallbacks.follow_answers(partial(record_upstream, ledger))
    tasks = OwnedTasks(_LOG)

    async def start(model: ServedModel) -> None:
        model.engine.step_log.follow_sequences(_recorder(model, options, ledger))
        await model.engine.start()
        tasks.start(log_traffic(model.engine, metrics.of(model)))

    async def opened(model: ServedModel) -> None:
        metrics.add(model)
        await start(model)

    for model in models:
        await start(model)
    models.follow(opened)
    if models.residents is not None:
        tasks.start(models.residents.run(), "models")
    try:
        yield
    finally:
        await tasks.end()
        for model in models:
            await model.engine.stop()
        if ledger is not None:
            ledger.close()
        if metrics.tracer is not None:
            await asyncio.to_thread(metrics.tracer.close)


def _open_ledger(server: ServerState, options: ServerOptions) -> Ledger | None:
    """The ledger, open, after what is spent of the budgets was read from it. Raises ConfigError."""
    if options.usage.ledger is None:
        return None
    # few servers have a ledger, and SQLite takes time to import
    from quickstep.server.usage.ledger import Ledger

    ledger = Ledger(options.usage.ledger)
    ledger.open()
    restore_limits(server.limiter, ledger)
    return ledger


def _recorder(model: ServedModel, options: ServerOptions, ledger: Ledger | None) -> UsageRecorder:
    prices, name = model.server.price_book, model.name
    if prices is not None and prices.price(name) == Price():
        _LOG.warning("the price book has no price for %s: its requests cost nothing", name)
    return UsageRecorder(
        name,
        prices or PriceBook(),
        model.server.limiter,
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
