"""`POST /reset_prefix_cache`, for operators: empty the prefix cache. The path is vLLM's."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.engine.interface import ServedEngine
from quickstep.server.http.errors import json_response
from quickstep.server.http.route import ApiRoute


class PrefixCacheReset(msgspec.Struct, frozen=True):
    """How many cached blocks were freed. Blocks of running sequences stay cached."""

    num_blocks: int


def prefix_cache_routes(engine: ServedEngine) -> list[ApiRoute]:
    """The routes, all of which need an admin key."""

    async def reset(_: Request) -> Response:
        return json_response(PrefixCacheReset(await engine.reset_prefix_cache()))

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
