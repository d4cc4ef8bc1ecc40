"""A request's body on its way to its route: read in time and within the limit, not too deep.

`taken_in` wraps the endpoint of every route with a JSON body; the endpoint then reads from a
request whose body is there already. So no route can forget a check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from quickstep.dataclass import dataclass
from quickstep.server.api_route import ApiRoute
from quickstep.server.body import read_body
from quickstep.server.json_depth import check_json_depth
from quickstep.server.options import ServerOptions

__all__ = ["Intake", "taken_in", "with_body"]

_CLIENT_CLOSED = 499
# Shorter bodies are looked at on the event loop: a thread hop costs more.
_INLINE_BYTES = 64 * 1024

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Intake:
    """What bodies are checked against."""

    body_bytes: int
    json_depth: int

    @classmethod
    def of(cls, options: ServerOptions) -> Intake:
        """The operator's rules."""
        limits = options.limits
        return cls(body_bytes=limits.body_bytes, json_depth=limits.json_depth)


def taken_in(route: ApiRoute, intake: Intake) -> Endpoint:
    """The route's endpoint behind the checks; as it is if the route takes no JSON."""
    endpoint = route.endpoint
    if route.request is None and not route.requests:
        return endpoint

    async def answer(request: Request) -> Response:
        try:
            body = await read_body(request, intake.body_bytes)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_CLOSED)
        if len(body) <= _INLINE_BYTES:
            check_json_depth(body, intake.json_depth)
        else:
            await asyncio.to_thread(check_json_depth, body, intake.json_depth)
        return await endpoint(with_body(request, body))

    return answer


def with_body(request: Request, body: bytes) -> Request:
    """The request with a body that was read already."""
    return Request(request.scope, _replay(body, request.receive))


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body again, then what comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again
