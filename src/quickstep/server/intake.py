"""A request's body on its way to its route: JSON by its type, read in time and within the limit,
not too deep, and, where the operator wants it so, without the fields that nobody knows.

`taken_in` wraps the endpoint of every route with a JSON body; the endpoint then reads from a
request whose body is there already. So no route can forget a check.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from quickstep.dataclass import dataclass
from quickstep.errors import RequestError
from quickstep.server.api_route import ApiRoute
from quickstep.server.body import read_body
from quickstep.server.json_depth import check_json_depth
from quickstep.server.options import ServerOptions
from quickstep.server.unknown_fields import Parts, known_part
from quickstep.server.work_lanes import WorkLanes

__all__ = ["Intake", "taken_in"]

_LOG = logging.getLogger("quickstep.server")
_CLIENT_CLOSED = 499
_HEADER_CHARS = 1024
_JSON = "application/json"

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Intake:
    """What bodies are checked against."""

    body_bytes: int
    json_depth: int
    ignores_unknown: bool
    root_path: str

    @classmethod
    def of(cls, options: ServerOptions) -> Intake:
        """The operator's rules."""
        limits = options.limits
        return cls(
            body_bytes=limits.body_bytes,
            json_depth=limits.json_depth,
            ignores_unknown=options.ignore_unknown_fields,
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

    def checked(
        self, body: bytes, schema: type[msgspec.Struct], parts: Parts
    ) -> tuple[bytes, tuple[str, ...]]:
        """The body to decode, and what was left out of it. Raises RequestError."""
        check_json_depth(body, self.json_depth)
        return known_part(body, schema, parts) if self.ignores_unknown else (body, ())


def taken_in(route: ApiRoute, intake: Intake, lanes: WorkLanes) -> Endpoint:
    """The route's endpoint behind the checks; as it is if the route takes no JSON."""
    schema, endpoint = route.request, route.endpoint
    if schema is None:
        return endpoint

    async def answer(request: Request) -> Response:
        intake.check_type(request)
        try:
            given = await read_body(request, intake.body_bytes)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_CLOSED)
        body, ignored = await lanes.parse(
            len(given), lambda: intake.checked(given, schema, route.parts)
        )
        response = await endpoint(Request(request.scope, _replay(body, request.receive)))
        if ignored:
            _LOG.warning("ignored unknown fields of a %s request: %s", route.path, ignored)
            names = ",".join(ignored).encode("unicode_escape").decode()
            response.headers["x-quickstep-ignored-fields"] = names[:_HEADER_CHARS]
        return response

    return answer


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body again, then what comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again
