"""The ASGI app of one engine: the routes, their errors, and the engine's start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from quickstep.errors import EngineError, RequestError
from quickstep.server.api_errors import error_response
from quickstep.server.chat import Chat
from quickstep.server.completions import Completions
from quickstep.server.engine_face import ServedEngine
from quickstep.server.metrics import Metrics
from quickstep.server.options import ServerOptions
from quickstep.server.probes import Probes
from quickstep.server.routes import GeneratingRoute
from quickstep.server.surface import Served, output_formats
from quickstep.server.traffic_log import watch

__all__ = ["create_app"]


def create_app(engine: ServedEngine, options: ServerOptions | None = None) -> Starlette:
    """The app. Its lifespan starts the engine and, at the end, stops it."""
    options = options or ServerOptions()
    names = options.served_model_names or (engine.model_name,)
    served = Served(engine, names, options.limits, output_formats(engine, options))
    metrics = Metrics(engine, names[0])
    probes = Probes(served, metrics, options.stall_s)
    chat = GeneratingRoute(Chat(), served, metrics)
    completions = GeneratingRoute(Completions(), served, metrics)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        watching = asyncio.create_task(watch(engine))
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await engine.stop()

    return Starlette(
        routes=[
            Route("/v1/completions", completions.answer, methods=["POST"]),
            Route("/v1/chat/completions", chat.answer, methods=["POST"]),
            Route("/v1/models", probes.models),
            Route("/v1/models/{model:path}", probes.model),
            Route("/health", probes.health),
            Route("/ready", probes.ready),
            Route("/metrics", probes.metrics),
            Route("/version", probes.version),
            Route("/ping", probes.ping, methods=["GET", "POST"]),
        ],
        exception_handlers={
            HTTPException: error_response,
            RequestError: error_response,
            EngineError: error_response,
            Exception: error_response,
        },
        lifespan=lifespan,
    )
