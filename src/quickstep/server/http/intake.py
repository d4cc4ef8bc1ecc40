"""A request's body on its way to its route: JSON by its type, read in time and within the limit,
not too deep.

`taken_in` wraps the endpoint of every route with a JSON body; the endpoint then reads from a
request whose body is there already. So no route can forget a check.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from quickstep.errors import RequestError
from quickstep.server.http.body import read_body
from quickstep.server.http.json_depth import check_json_depth
from quickstep.server.http.route import ApiRoute
from quickstep.server.http.work_lanes import WorkLanes
from quickstep.server.options import ServerOptions

__all__ = ["Intake", "taken_in", "with_body"]

_CLIENT_CLOSED = 499
_JSON = "application/json"

Endpoint = Callable[[Request], Awaitable[Response]]


class Intake(msgspec.Struct, frozen=True):
    """What bodies are checked against."""

    body_bytes: int
    json_depth: int
    root_path: str

    @classmethod
    def of(cls, options: ServerOptions) -> Intake:
        """The operator's rules."""
        limits = options.limits
        return cls(
            body_bytes=limits.body_bytes,
            json_depth=limits.json_depth,
            root_path=options.root_path,
        )

    def check_type(self, request: Request) -> None:
        """Raise RequestError 415 unless the body is said to be JSON.

        A page may send other types without its browser asking first. Clients of llama.cpp and
        Ollama leave the type out, so their routes take any type, but from no page.
        """
        path = str(request.scope["path"]).removeprefix(self.root_path)
        if not path.startswith("/v1/") and "origin" not in request.headers:
            return
        given = request.headers.get("content-type", "")
        kind = given.partition(";")[0].strip().lower()
        is_json = kind == _JSON or (kind.startswith("application/") and kind.endswith("+json"))
        if not is_json:
            shown = (
                f"the content type is {given[:100]!r}" if given else "the content type is missing"
            )
            raise RequestError(f"{shown}; send the header `content-type: {_JSON}`", status=415)


def taken_in(route: ApiRoute, intake: Intake, lanes: WorkLanes) -> Endpoint:
    """The route's endpoint behind the checks; as it is if the route takes no JSON."""
    endpoint = route.endpoint
    if route.request is None and not route.requests:
        return endpoint

    async def answer(request: Request) -> Response:
        intake.check_type(request)
        try:
            body = await read_body(request, intake.body_bytes)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_CLOSED)
        await lanes.parse(len(body), lambda: check_json_depth(body, intake.json_depth))
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
