"""The app of `quickstep serve`: it answers the first routes at once, all of them soon.

Half of what the routes import is for APIs of which most servers use none. So the server
listens with the routes of `first_routes`; the whole app is imported in a thread when nothing is
generated any more, or when somebody asks for another path. Both know one `Served` and one
`Metrics`, and what a request meets on its way is the same in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from quickstep.server.app_parts import routed, serving
from quickstep.server.first_routes import first_routes
from quickstep.server.generate.adapter import Served
from quickstep.server.generate.engine_interface import ServedEngine
from quickstep.server.http.middleware import written_path
from quickstep.server.metrics import Metrics
from quickstep.server.options import ServerOptions

if TYPE_CHECKING:
    from quickstep.server.batches.endpoint import LocalBatches

__all__ = ["EarlyApp"]

# Importing the rest takes a tenth of a second of the interpreter, which live streams would feel.
_IDLE_AFTER_S = 1.0
_MAX_WAIT_S = 30.0


class EarlyApp:
    """ASGI. Its lifespan starts the engine and, at the end, stops it."""

    def __init__(self, engine: ServedEngine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._served = Served.of(engine, options)
        self._metrics = Metrics(engine, self._served.names[0])
        routes = first_routes(self._served, self._metrics, options)
        self._first = routed(routes, options, self._served.lanes, self.lifespan)
        self._first_paths = frozenset(
            (route.method, path.encode()) for route in routes for path in route.paths
        )
        self._root = options.root_path.encode()
        self._whole: Starlette | None = None
        self._batches: LocalBatches | None = None
        self._completing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the routes that are there, or complete them first."""
        if scope["type"] != "http":
            await self._first(scope, receive, send)
            return
        if self._whole is None and not self._is_first(scope):
            await self.complete()
        await (self._whole or self._first)(scope, receive, send)

    async def complete(self) -> None:
        """Have all routes. Raises ConfigError for a directory of files that cannot be used."""
        async with self._completing:
            if self._whole is not None:
                return
            await asyncio.to_thread(import_module, "quickstep.server.app")
            from quickstep.server.app import whole_app
            from quickstep.server.batches.endpoint import LocalBatches

            batches = LocalBatches(self._served, self._metrics, self._options)
            batches.start()
            self._batches = batches
            self._whole = whole_app(self._served, self._metrics, self._options, batches)

    def _is_first(self, scope: Scope) -> bool:
        return (scope["method"], written_path(scope, self._root)) in self._first_paths

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """The engine's life; the app that Starlette passes is ours."""
        if self._options.files.directory is not None:  # a bad one is told at the start
            await self.complete()
        async with serving(self._engine, self._metrics):
            completing = asyncio.create_task(self._complete_when_idle())
            try:
                yield
            finally:
                completing.cancel()
                with suppress(asyncio.CancelledError):
                    await completing
                if self._batches is not None:
                    await self._batches.stop()

    async def _complete_when_idle(self) -> None:
        waited_s = 0.0
        while waited_s < _MAX_WAIT_S:
            await asyncio.sleep(_IDLE_AFTER_S)
            waited_s += _IDLE_AFTER_S
            if self._engine.stats().num_requests == 0:
                break
        await self.complete()
