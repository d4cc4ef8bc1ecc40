"""One route of the HTTP API with its properties, and the checks before its endpoint.

`app` makes Starlette's routes of it, the middleware reads which routes need no key, `/openapi.json`
and the reference page are generated from it. `with_checked_body` wraps the endpoint of every route
with a JSON body, so that no route can forget a check; the endpoint gets the body from the request's
state. `with_admin_check` wraps the operator's routes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quickstep.errors import RequestError
from quickstep.server.http.body import Reception, check_json, read_body, unless_disconnected
from quickstep.server.http.errors import CLIENT_CLOSED, ErrorShape, openai_shape
from quickstep.server.http.event_stream import SERVER_SENT_EVENTS, close_response
from quickstep.server.http.work_lanes import INLINE_BYTES, WorkLanes
from quickstep.server.options import RequestLimits, ServerOptions
from quickstep.server.usage.api_keys import ApiKeys
from quickstep.server.usage.limits import KeyLimiter

_JSON = "application/json"
# Headers that proxies add; some add none, so that their absence proves nothing.
_PROXY_HEADERS = ("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip")
_PROXY_PREFIXES = ("x-forwarded-", "x-envoy-", "cf-connecting-")

Endpoint = Callable[[Request], Awaitable[Response]]


class ApiRoute(msgspec.Struct, frozen=True):
    """A path, its method and its endpoint.

    Attributes:
        summary: One sentence for the reference.
        request: The schema of the JSON body, None for no body.
        response: The schema of the JSON answer with status 200: a struct or a list of them; None
            for an answer that is no JSON.
        streams: The answer may be a stream of server-sent events, or of `stream_type`.
        events: The schemas of the events' data, in addition to that of an error.
        stream_type: The media type of the stream.
        query: The schema of the query's parameters, None for none.
        request_type: The media type of the body.
        content_type: The media type of an answer that is no JSON.
        is_probe: Answered without an API key: liveness and readiness.
        needs_admin: For the operator: an admin key, or a client on this machine if there are no
            keys.
        aliases: Further paths of the same endpoint.
        error_shape: The body of its errors.
        is_limited: Counts as a request for the limits of its key; routes that generate are
            counted by what they may need.
        takes_list: The body is a list of `request`.
        requests: Instead of `request`, the schemas of which the body matches one.
        open_paths: Values of `path` that are answered without an API key, byte for byte.
        status: Of a good response; 204 has no content.
        is_repeatable: Honours the headers that name a request whose client may come back
            (`kept_streams.kept_request`).
    """

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    request: type[msgspec.Struct] | None = None
    response: Any = None
    streams: bool = False
    events: tuple[type[msgspec.Struct], ...] = ()
    query: type[msgspec.Struct] | None = None
    request_type: str = "application/json"
    content_type: str = "text/plain"
    is_probe: bool = False
    needs_admin: bool = False
    aliases: tuple[str, ...] = ()
    error_shape: ErrorShape = openai_shape
    is_limited: bool = False
    takes_list: bool = False
    requests: tuple[type[msgspec.Struct], ...] = ()
    stream_type: str = SERVER_SENT_EVENTS
    open_paths: tuple[str, ...] = ()
    status: int = 200
    is_repeatable: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The path and its aliases."""
        return (self.path, *self.aliases)

    @property
    def methods(self) -> tuple[str, ...]:
        """The method, and what HTTP has answered with it."""
        return (self.method, "HEAD") if self.method == "GET" else (self.method,)

    def asgi(self) -> ASGIApp:
        """The endpoint as an app. Its exceptions are `AccessMiddleware`'s."""
        return _AsgiEndpoint(self.endpoint)

    def starlette(self) -> list[Route]:
        """The route of every path."""
        endpoint = self.asgi()
        routes = [Route(path, endpoint, methods=[self.method]) for path in self.paths]
        for route in routes:  # a name may have a line break, which Starlette's `.*` does not match
            route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
        return routes


class _AsgiEndpoint:
    """A route's endpoint as an ASGI app. Exceptions go to `AccessMiddleware`, without the handlers
    that Starlette puts around a function.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._answer = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)


class BodyRules(msgspec.Struct, frozen=True):
    """The operator's rules for bodies."""

    limits: RequestLimits
    root_path: str

    @classmethod
    def of(cls, options: ServerOptions) -> BodyRules:
        """The rules in `options`."""
        return cls(limits=options.limits, root_path=options.root_path)

    def check_type(self, request: Request) -> None:
        """Raise RequestError 415 unless the content type is JSON.

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
            problem = (
                f"the content type is {given[:100]!r}" if given else "the content type is missing"
            )
            raise RequestError(f"{problem}; send the header `content-type: {_JSON}`", status=415)


def with_checked_body(
    route: ApiRoute, endpoint: Endpoint, rules: BodyRules, lanes: WorkLanes, reception: Reception
) -> Endpoint:
    """`endpoint` after the checks of the body; unchanged if the route takes no JSON."""
    if route.request is None and not route.requests:
        return endpoint

    async def answer(request: Request) -> Response:
        rules.check_type(request)
        room = reception.room(request)
        try:
            body = await read_body(request, rules.limits.body_bytes, room)
            request.scope["state"].update(body=body, body_room=room)
            return await answer_to(request, body)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        finally:
            room.leave()

    async def answer_to(request: Request, body: bytes) -> Response:
        if len(body) <= INLINE_BYTES:
            check_json(body, rules.limits)
            return await endpoint(request)
        # work of a client that has left ends, which for a large body is much
        return await unless_disconnected(
            request.receive, checked(request, body), close=close_response
        )

    async def checked(request: Request, body: bytes) -> Response:
        of_key = lanes.of(request.scope["state"]["api_key_name"])
        await of_key.run(len(body), lambda: check_json(body, rules.limits))
        return await endpoint(request)

    return answer


def with_key_limits(route: ApiRoute, limiter: KeyLimiter, endpoint: Endpoint) -> Endpoint:
    """`endpoint` after the limits of the client's key, if the route counts as a request."""
    if not route.is_limited:
        return endpoint

    async def answer(request: Request) -> Response:
        reservation = limiter.admit(request.scope["state"]["api_key_name"], 0)
        try:
            return await endpoint(request)
        finally:
            reservation.release()

    return answer


def with_admin_check(route: ApiRoute, keys: ApiKeys, endpoint: Endpoint) -> Endpoint:
    """`endpoint` after the check that the client is an operator, if the route needs one."""
    if not route.needs_admin:
        return endpoint

    async def answer(request: Request) -> Response:
        if keys and not keys.is_admin(request.scope["state"]["api_key_name"]):
            raise RequestError(
                f"{route.path} needs an admin key: one of the server's --admin-api-key",
                status=403,
                code="admin_key_required",
            )
        if not keys and not _is_local(request):
            raise RequestError(
                f"{route.path} is only for clients on the server's machine while the server has no "
                "keys; start it with --admin-api-key",
                status=403,
                code="admin_key_required",
            )
        return await endpoint(request)

    return answer


def _is_local(request: Request) -> bool:
    """Whether the client is on this machine and is no proxy for another one."""
    names = request.headers.keys()
    if request.client is None or any(
        name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIXES) for name in names
    ):
        return False
    try:
        return ip_address(request.client.host).is_loopback
    except ValueError:
        return False
