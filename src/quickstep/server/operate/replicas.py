"""`POST /admin/replicas/{replica}/drain` and `/restart`, for operators: an engine is taken out of
service, or gets a new process, while the streams of clients continue.

An answer comes when the change is done. It is completed even if the client leaves before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.engine.interface import ReplicatedEngine
from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.engine.stats import ReplicaChange
from quickstep.errors import RequestError
from quickstep.server.fields.decode import decode_values
from quickstep.server.http.errors import RouteNotFound, json_response
from quickstep.server.http.route import ApiRoute
from quickstep.server.models.registry import ModelRegistry

_LOG = logging.getLogger("quickstep.server")
_Change = Callable[[int, float], Coroutine[Any, Any, ReplicaChange]]


class DrainQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of both routes: how long requests may continue there before they move."""

    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class ReplicaRoutes:
    """The routes, all of which need an admin key."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._changes = OwnedTasks(_LOG)

    def routes(self) -> list[ApiRoute]:
        """Drain and restart."""
        return [
            ApiRoute(
                "POST",
                "/admin/replicas/{replica}/drain",
                self.drain,
                "Give a replica no more requests until it is restarted; its streams move.",
                response=ReplicaChange,
                query=DrainQuery,
                needs_admin=True,
            ),
            ApiRoute(
                "POST",
                "/admin/replicas/{replica}/restart",
                self.restart,
                "Drain a replica and start it again, with the weights that are on disk now.",
                response=ReplicaChange,
                query=DrainQuery,
                needs_admin=True,
            ),
        ]

    async def drain(self, request: Request) -> Response:
        """Answer when the replica has no requests."""
        return await self._answer(request, lambda engine: engine.drain_replica)

    async def restart(self, request: Request) -> Response:
        """Answer when the replica serves again."""
        return await self._answer(request, lambda engine: engine.restart_replica)

    async def _answer(
        self, request: Request, change_of: Callable[[ReplicatedEngine], _Change]
    ) -> Response:
        drain_s = decode_values(request.query_params, DrainQuery).drain_s
        if not math.isfinite(drain_s):
            raise RequestError(f"drain_s is {drain_s:g}, it must be finite", param="drain_s")
        engine, place = self._models.default.engine, request.path_params["replica"]
        is_number = place.isascii() and place.isdecimal() and len(place) <= len("999")
        if not (is_number and isinstance(engine, ReplicatedEngine)):
            raise RouteNotFound(
                f"there is no replica {place[:100]!r}", param=None, code="replica_not_found"
            )
        return json_response(await self._changes.finish(change_of(engine)(int(place), drain_s)))
