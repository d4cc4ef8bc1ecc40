"""What every request passes before its route: size of its head, origin, API key; and its log line.

Any web page can have its browser send requests here, so a request that names its origin is refused
unless the operator allows that origin, or the page is this server's own. A page is also this
server's own if its name was made to point here (DNS rebinding): so without keys a request has to
call the server by an address, localhost, a name without a dot, which nobody can publish, or a name
that the operator allows.

It compares the path as the client wrote it, so that no other spelling (`//health`, `%2e`, a slash
at the end, another case) counts as a probe: a path that is not a probe's path byte for byte needs a
key, unknown paths included. The request's state then holds for the routes:

    state["api_key_name"]   the name of the client's key, "" if there are no keys: the tenant of
                            its requests, and the owner of what the server stores for it
    state["error_shape"]    how the API writes errors (see `errors`)
    state["connections"]    how long clients may take (see `options`)
    state["request_id"]     the request's id, see below
    state["received_s"]     when its first bytes were read, by the monotonic clock
    state["broken_body"]    the error of a body that is malformed; reading the body raises it
    state["ignored"]        fields of the request that have no effect; routes add to it

Every response has the request's id (the client's own, else a new one) in `x-request-id`, the
fields without effect in `x-quickstep-ignored`, the fallback step that served it (or failed last)
in `x-quickstep-fallback`, and what is left of the key's rate limits in `x-ratelimit-*`.
`CrossOriginMiddleware` runs before it where the operator allows other origins: a browser asks for
permission without a key.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quickstep.errors import RequestError
from quickstep.server.http.connection_limit import client_of_host
from quickstep.server.http.errors import ErrorShape, error_body, error_response, json_response
from quickstep.server.http.route import ApiRoute
from quickstep.server.http.turns import Turns, leave_turn
from quickstep.server.options import RequestLimits, ServerOptions
from quickstep.server.usage.limits import KeyLimiter

_LOG = logging.getLogger("quickstep.server")
_ACCESS_LOG = logging.getLogger("quickstep.access")
_REQUEST_ID_CHARS = 128
_ID_DIGITS, _NUM_IDS = 32, 64
_IGNORED_CHARS = 1024
_MAX_REPORTED = 4096
_REFUSED = (429, 503)  # for too many requests
_CHALLENGE = {"www-authenticate": "Bearer"}
_BEARER = b"bearer "
_PLAIN = (b"", b"identity", b"utf-8")  # the last is a charset, which clients confuse with it
_LOCAL_NAME = re.compile(r"[a-z0-9_-]+")  # of a machine or a container
_PORTS = {b"http": b":80", b"https": b":443"}


class AccessMiddleware:
    """ASGI middleware around all routes."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Iterable[ApiRoute],
        options: ServerOptions,
        limiter: KeyLimiter,
    ) -> None:
        known = tuple(routes)
        self._app = app
        self._keys = options.api_keys
        self._limits = options.limits
        self._connections = options.connections
        self._hosts = frozenset(name.lower().encode() for name in options.allowed_hosts)
        self._origins = frozenset(origin.lower().encode() for origin in options.cors.origins)
        self._root = options.root_path.encode()
        self._access_log = options.access_log
        self._limiter = limiter
        self._reported = _Reported()
        self._turns = Turns()
        self._probes = frozenset(_probes(known))
        self._shapes: Mapping[bytes, ErrorShape] = {
            path.encode(): route.error_shape for route in known for path in route.paths
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["ignored"] = []
        watched = _Watched(scope, send, self._limiter, self._reported)
        try:
            await self._pass(scope, receive, watched)
        except Exception as error:  # the request's top: nothing below knows what it is
            if watched.status is not None:
                raise
            await (await error_response(Request(scope), error))(scope, receive, watched)
        finally:
            if self._access_log:
                watched.log()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = written_path(scope, self._root)
        state = scope["state"]
        state["api_key_name"] = ""
        state["connections"] = self._connections
        shape = self._shapes.get(path)
        if shape is not None:
            state["error_shape"] = shape
        try:
            _check_content_encoding(scope)
            check_head(scope, self._limits)
            _check_origin(scope, self._origins)
            if (scope["method"], path) in self._probes:
                pass
            elif self._keys:
                state["api_key_name"] = self._owner(scope)
            else:
                _check_host(scope, self._hosts)
            turn = await self._turns.take(state["api_key_name"] or _address(scope))
        except RequestError as error:
            response = await error_response(Request(scope), error)
            if error.status == 401:
                response.headers.update(_CHALLENGE)
            await response(scope, receive, send)
            return
        try:
            await self._app(scope, _Receive(scope, receive), send)
        except RequestError as error:
            if error.status in _REFUSED:
                turn.refused()
            raise
        finally:
            turn.leave()

    def _owner(self, scope: Scope) -> str:
        presented = list(_presented(scope))
        owner = self._keys.owner(presented)
        if owner is not None:
            return owner
        if presented:
            raise RequestError("the API key is not one of this server's", status=401)
        raise RequestError(
            "an API key is missing; send `Authorization: Bearer KEY` or `x-api-key: KEY`",
            status=401,
        )


def _address(scope: Scope) -> str:
    """Which client a request without a key is of."""
    client = scope.get("client")
    return client_of_host(client[0]) if client else ""


def written_path(scope: Scope, root: bytes) -> bytes:
    """The path as the client wrote it, below the root path that the operator set."""
    path: bytes = scope["raw_path"].partition(b"?")[0]
    return path.removeprefix(root)


def key_name(request: Request) -> str:
    """The name of the client's API key, "" if the server has no keys."""
    name: str = request.scope["state"]["api_key_name"]
    return name


def check_head(scope: Scope, limits: RequestLimits) -> None:
    """Raise RequestError for a URL or headers that are too long."""
    url_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    if url_bytes > limits.url_bytes:
        raise RequestError(
            f"the URL has {url_bytes} bytes, the limit is {limits.url_bytes}", status=414
        )
    num_bytes = url_bytes + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if num_bytes > limits.header_bytes:
        raise RequestError(
            f"the headers have {num_bytes} bytes, the limit is {limits.header_bytes}", status=431
        )


def _check_content_encoding(scope: Scope) -> None:
    """Raise RequestError 415 for a body that would have to be decoded before it is parsed."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in _PLAIN:
            raise RequestError(
                f"the content-encoding is {value[:100].decode('latin-1')!a}; send the body "
                "without it",
                status=415,
            )


class _Receive:
    """A `receive` that raises the error of a body that is malformed."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._state = scope["state"]
        self._receive = receive

    async def __call__(self) -> Message:
        message = await self._receive()
        broken: RequestError | None = self._state.get("broken_body")
        if broken is not None:
            raise broken
        return message


def _check_origin(scope: Scope, allowed: Collection[bytes]) -> None:
    """Raise RequestError 403 for a page of another origin, unless it is one of `allowed`."""
    origins = [value.strip().lower() for name, value in scope["headers"] if name == b"origin"]
    if not origins or b"*" in allowed:
        return
    hosts = [value.strip().lower() for name, value in scope["headers"] if name == b"host"]
    for origin in origins:
        if origin not in allowed and [_authority(origin)] != [_with_port(origin, h) for h in hosts]:
            origin_text = ascii(origin[:100].decode("latin-1"))
            raise RequestError(
                f"pages of the origin {origin_text} may not call; the operator may allow it with "
                "--allowed-origins",
                status=403,
            )


def _check_host(scope: Scope, allowed: Collection[bytes]) -> None:
    """Raise RequestError 403 for a host that anybody may have given a name to."""
    if b"*" in allowed:
        return
    for name, value in scope["headers"]:
        if name != b"host":
            continue
        host = _without_port(value.strip().lower())
        if host not in allowed and not _is_own_name(host):
            raise RequestError(
                f"the host {host[:100].decode('latin-1')!a} is not a name of this server, "
                "which has no API keys; call it by its address or localhost, or have the operator "
                "allow the name with --allowed-hosts or set an API key",
                status=403,
            )


def _without_port(authority: bytes) -> bytes:
    host, colon, port = authority.rpartition(b":")
    has_port = bool(colon) and port.isdigit() and (b":" not in host or host.endswith(b"]"))
    return host if has_port else authority


def _is_own_name(host: bytes) -> bool:
    """Whether no page of another server can have this name."""
    text = host.decode("latin-1").removesuffix(".")
    if _LOCAL_NAME.fullmatch(text) or text.endswith(".localhost"):
        return True
    try:
        ip_address(text[1:-1] if text.startswith("[") and text.endswith("]") else text)
    except ValueError:
        return False
    return True


def _authority(origin: bytes) -> bytes | None:
    """Host and port of `http://host`; None for what is no such origin, such as `null`."""
    scheme, separator, authority = origin.partition(b"://")
    return _with_port(origin, authority) if separator and scheme in _PORTS else None


def _with_port(origin: bytes, authority: bytes) -> bytes:
    """A host with its port, which browsers leave out if it is the scheme's own."""
    has_port = authority.rpartition(b":")[2].isdigit() and not authority.endswith(b"]")
    return authority if has_port else authority + _PORTS.get(origin.partition(b":")[0], b"")


def _probes(routes: Iterable[ApiRoute]) -> Iterable[tuple[str, bytes]]:
    for route in routes:
        paths = (*(route.paths if route.is_probe else ()), *route.open_paths)
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        yield from ((method, path.encode()) for method in methods for path in paths)


def _presented(scope: Scope) -> Iterable[bytes]:
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            yield value[len(_BEARER) :].strip()


def report_ignored(request: Request, paths: Iterable[str]) -> None:
    """Have the answer and the log name fields of the request that have no effect."""
    ignored: list[str] = request.scope["state"]["ignored"]
    ignored.extend(path for path in paths if path not in ignored)


class _Reported:
    """The fields logged per client; the oldest are forgotten. Owned by the middleware."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    def new(self, client: str, paths: Iterable[str]) -> list[str]:
        """The `paths` that were not logged for this client yet."""
        fresh = [path for path in paths if (client, path[:_REQUEST_ID_CHARS]) not in self._seen]
        for path in fresh:
            self._seen[client, path[:_REQUEST_ID_CHARS]] = None
        while len(self._seen) > _MAX_REPORTED:
            self._seen.popitem(last=False)
        return fresh


class _RandomIds:
    """Of 32 hexadecimal digits. The bytes of many come from the system at once: in each of its
    calls another thread may take the interpreter, for which this one then waits.
    """

    def __init__(self) -> None:
        self._digits = ""

    def next(self) -> str:
        """Another one, which cannot be guessed."""
        if not self._digits:
            self._digits = secrets.token_hex(_ID_DIGITS // 2 * _NUM_IDS)
        found, self._digits = self._digits[:_ID_DIGITS], self._digits[_ID_DIGITS:]
        return found


_IDS = _RandomIds()


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's id, without what a header may not hold; a new one if it sent none."""
    given = dict(headers).get(b"x-request-id", b"")[:_REQUEST_ID_CHARS]
    text = "".join(char for char in given.decode("latin-1") if " " <= char <= "~").strip()
    return text or _IDS.next()


class _Watched:
    """A `send` that remembers the status, and adds the headers that every answer has."""

    def __init__(self, scope: Scope, send: Send, limiter: KeyLimiter, reported: _Reported) -> None:
        self._scope = scope
        self._send = send
        self._limiter = limiter
        self._reported = reported
        self._request_id = request_id(scope["headers"])
        self.status: int | None = None
        # the protocol sets it; other ASGI servers do not
        self._since_s: float = scope["state"].setdefault("received_s", time.monotonic())
        scope["state"]["request_id"] = self._request_id

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            leave_turn()
            headers = [*message.get("headers", ()), *self._headers()]
            message = {**message, "headers": headers}
        await self._send(message)

    def log(self) -> None:
        """Log client, route, status and duration."""
        scope = self._scope
        client = scope.get("client")
        _ACCESS_LOG.info(
            "%s %s %s %s %.3f s key=%s id=%s",
            client[0] if client else "-",
            scope["method"],
            ascii(scope["path"])[1:-1],
            self.status or "-",
            time.monotonic() - self._since_s,
            scope["state"]["api_key_name"] or "-",
            self._request_id,
        )

    def _headers(self) -> Iterable[tuple[bytes, bytes]]:
        yield b"x-request-id", self._request_id.encode()
        yield from self._limiter.headers(self._scope["state"].get("api_key_name", ""))
        if fallback := self._scope["state"].get("fallback"):
            yield b"x-quickstep-fallback", fallback.encode("unicode_escape")
        ignored = self._scope["state"]["ignored"]
        if ignored:
            self._log_ignored(ignored)
            # names are the client's own: escaped, so that none ends the header
            names = ", ".join(ignored).encode("unicode_escape")
            yield b"x-quickstep-ignored", names[:_IGNORED_CHARS]

    def _log_ignored(self, ignored: Iterable[str]) -> None:
        scope = self._scope
        host = scope["client"][0] if scope.get("client") else "-"
        client = scope["state"].get("api_key_name") or host
        fresh = self._reported.new(client, ignored)
        if fresh:
            _LOG.warning(
                "fields without effect in a request of %s to %s: %s",
                client,
                ascii(scope["path"])[1:-1],
                ascii(", ".join(fresh))[1:-1][:_IGNORED_CHARS],
            )


class CrossOriginMiddleware(CORSMiddleware):
    """Starlette's CORS middleware, with refusals in OpenAI's shape."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Permission, or a refusal that says what is not allowed: 403 for the origin, else 400."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        what = bytes(response.body).decode().removeprefix("Disallowed CORS ")
        message = f"pages of other origins may not call like this: {what} is not allowed"
        status = 403 if "origin" in what else response.status_code
        refused = json_response(error_body(message, status), status)
        for name, value in response.headers.items():
            if name not in ("content-length", "content-type"):
                refused.headers[name] = value
        return refused
