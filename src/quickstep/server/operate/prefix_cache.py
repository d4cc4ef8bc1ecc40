"""`POST /reset_prefix_cache`, for operators: empty the prefix cache. The path is vLLM's."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.server.generate.endpoint import caller_of
from quickstep.server.http.errors import json_response
from quickstep.server.http.route import ApiRoute
from quickstep.server.http.turns import Places
from quickstep.server.models.registry import ModelRegistry


class PrefixCacheReset(msgspec.Struct, frozen=True):
    """How many cached blocks were freed. Blocks of running sequences stay cached."""

    num_blocks: int


def prefix_cache_routes(models: ModelRegistry) -> list[ApiRoute]:
    """The routes, all of which need an admin key."""
    places = Places()

    async def reset(request: Request) -> Response:
        async with places.place(caller_of(request)):
            num_blocks = [await model.engine.reset_prefix_cache() for model in models]
        return json_response(PrefixCacheReset(sum(num_blocks)))

    return [
        ApiRoute(
            "POST",
            "/reset_prefix_cache",
            reset,
            "Free every cached block that no running sequence uses.",
            response=PrefixCacheReset,
            needs_admin=True,
        )
    ]
