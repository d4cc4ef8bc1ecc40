"""The app of `quickstep serve`: it listens before the modules of all APIs are imported.

Half of the import time of `app` is for APIs that most servers do not use. So the server starts with
the routes of `startup_routes`. `app` is imported in a thread at the first request for another path,
or else when the engine is idle. Both apps have the same `Served`, `Metrics` and middleware, so a
client sees no difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from quickstep.server.app_parts import running_engine, starlette_app
from quickstep.server.generate.adapter import Served
from quickstep.server.generate.engine_interface import ServedEngine
from quickstep.server.http.middleware import written_path
from quickstep.server.metrics import Metrics
from quickstep.server.options import ServerOptions
from quickstep.server.startup_routes import startup_routes

if TYPE_CHECKING:
    from quickstep.server.batches.endpoint import LocalBatches

__all__ = ["LazyApp"]

# The import holds the interpreter for a tenth of a second, which would delay running streams.
_IDLE_AFTER_S = 1.0
_MAX_WAIT_S = 30.0


class LazyApp:
    """ASGI. Its lifespan starts the engine and, at the end, stops it."""

    def __init__(self, engine: ServedEngine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._served = Served.of(engine, options)
        self._metrics = Metrics(engine, self._served.names[0], options.metrics)
        routes = startup_routes(self._served, self._metrics, options)
        self._startup_app = starlette_app(routes, options, self._served, self.lifespan)
        self._startup_paths = frozenset(
            (route.method, path.encode()) for route in routes for path in route.paths
        )
        self._root = options.root_path.encode()
        self._complete_app: Starlette | None = None
        self._batches: LocalBatches | None = None
        self._importing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a startup route, or import all routes first."""
        if scope["type"] != "http":
            await self._startup_app(scope, receive, send)
            return
        if self._complete_app is None and not self._is_startup_route(scope):
            await self.import_all()
        await (self._complete_app or self._startup_app)(scope, receive, send)

    async def import_all(self) -> None:
        """Import all routes. Raises ConfigError for a directory of files that cannot be used."""
        async with self._importing:
            if self._complete_app is not None:
                return
            await asyncio.to_thread(import_module, "quickstep.server.app")
            from quickstep.server.app import complete_app
            from quickstep.server.batches.endpoint import LocalBatches

            batches = LocalBatches(self._served, self._metrics, self._options)
            batches.start()
            self._batches = batches
            self._complete_app = complete_app(self._served, self._metrics, self._options, batches)

    def _is_startup_route(self, scope: Scope) -> bool:
        return (scope["method"], written_path(scope, self._root)) in self._startup_paths

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Run the engine. Starlette's argument is the startup app."""
        if self._options.files.directory is not None:  # a bad directory is reported at the start
            await self.import_all()
        async with running_engine(self._served, self._metrics, self._options):
            importing = asyncio.create_task(self._import_when_idle())
            try:
                yield
            finally:
                importing.cancel()
                with suppress(asyncio.CancelledError):
                    await importing
                if self._batches is not None:
                    await self._batches.stop()

    async def _import_when_idle(self) -> None:
        waited_s = 0.0
        while waited_s < _MAX_WAIT_S:
            await asyncio.sleep(_IDLE_AFTER_S)
            waited_s += _IDLE_AFTER_S
            if self._engine.stats().num_requests == 0:
                break
        await self.import_all()
