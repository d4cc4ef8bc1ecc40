"""HTTP/1.1 with bounds: uvicorn's protocol itself waits without limit and accepts headers of any
size.

The head of a request has to arrive in time and within its size. A refusal before there is a request
is answered here, in OpenAI's shape, and so is a connection beyond the limit of open ones. A
connection that the server has closed is cut if its client reads nothing. Routes find
`abort_connection` and `received_s` in the request's state. An `Upgrade` to another protocol is
ignored (RFC 9110, 7.8): the request is parsed and answered as HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from quickstep.errors import RequestError
from quickstep.server.http.errors import error_of
from quickstep.server.http.middleware import check_head, request_id
from quickstep.server.http.time_limits import PatientTimer
from quickstep.server.options import ConnectionOptions, RequestLimits

__all__ = ["BoundedProtocol", "bounded_protocol"]

_LOG = logging.getLogger("quickstep.server")
_LINGER_S = 2.0
_LOG_EVERY_S = 10.0
_OF_UPGRADES = frozenset({b"upgrade", b"http2-settings"})  # header names and options of Connection
_MAX_REFUSED = 256  # connections at a time that get an error response; the others are cut


class _ConnectionLimit:
    """The limit of open connections; one object for all connections of a server."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._num_refused = 0
        self._logged_s = -_LOG_EVERY_S

    def refused(self, now: float) -> RequestError:
        """The error for one connection too many; logged at most every ten seconds."""
        self._num_refused += 1
        if now - self._logged_s >= _LOG_EVERY_S:
            _LOG.warning(
                "refused %d connections: %d are open, which is --max-connections",
                self._num_refused,
                self.max_connections,
            )
            self._logged_s, self._num_refused = now, 0
        return RequestError(
            f"{self.max_connections} connections are open, which is the limit; try again later",
            status=503,
            code="too_many_connections",
        )


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Made through `bounded_protocol`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        limits: RequestLimits,
        connections: ConnectionOptions,
        connection_limit: _ConnectionLimit,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._limits = limits
        self._connections = connections
        self._connection_limit = connection_limit
        self._head_timer: PatientTimer | None = None
        self._head_bytes = 0
        self._in_head = True
        self._received_any = False
        self._refusal: RequestError | None = None
        self._ignores_upgrade = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first request, or refuse the connection."""
        super().connection_made(transport)
        num_over = len(self.connections) - self._connection_limit.max_connections
        if num_over <= 0:
            self._await_head()
            return
        refusal = self._connection_limit.refused(self.loop.time())
        if num_over > _MAX_REFUSED:
            self.transport.abort()
        else:
            self._answer(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._stop_awaiting_head()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; refuse a head that is too long even before its end."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._received_any = True
        if self._in_head:
            self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._refusal is None and self._in_head:
            limit = self._limits.header_bytes
            if self._head_bytes > limit:
                self._refusal = RequestError(
                    f"the headers have more than {limit} bytes, the limit", status=431
                )
            else:
                self._await_head()  # most heads are complete and need no timer
        if self._refusal is not None:
            self._answer(self._refusal)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = True
        self.scope["state"]["received_s"] = time.monotonic()
        self.scope["state"]["abort_connection"] = self.transport.abort

    def on_header(self, name: bytes, value: bytes) -> None:
        """Skip headers after a body (trailers)."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request unless its head is too long."""
        self._in_head = False
        self._head_bytes = 0
        self._stop_awaiting_head()
        if self._refusal is not None:
            return
        scope = {"raw_path": self.url, "query_string": b"", "headers": self.headers}
        try:
            check_head(scope, self._limits)
        except RequestError as error:
            self._refusal = error
            return
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._ignores_upgrade = True  # the parser stops here; `_parse` repeats the head
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._refusal is None and not self._ignores_upgrade:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The bytes are not HTTP; `data_received` answers."""
        if self._refusal is None:
            self._refusal = RequestError("the request is not valid HTTP/1.1")

    def timeout_keep_alive_handler(self) -> None:
        """Close, and cut a client that does not read the response."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._connections.slow_reader_s, self.transport.abort)

    def _parse(self, data: bytes) -> None:
        """Give bytes to the parser. It takes what follows a head that offers an upgrade for another
        protocol; such a head is repeated without the offer, to a parser that reads on.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._ignores_upgrade or self._refusal is not None:
                    return
                self._ignores_upgrade = False
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self.send_400_response("")
                return
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        """The head of the current request, as if it offered no other protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name in _OF_UPGRADES:
                continue
            if name == b"connection":
                options = (option.strip() for option in value.split(b","))
                value = b", ".join(each for each in options if each.lower() not in _OF_UPGRADES)
                if not value:
                    continue
            lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _await_head(self) -> None:
        if self._head_timer is None:
            header_s = self._connections.header_s
            self._head_timer = PatientTimer(self.loop, header_s, self._head_is_late)

    def _stop_awaiting_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # an earlier request of this connection is still answered
        elif not self._received_any:
            self.transport.abort()  # connected in advance, and never used
        else:
            seconds = self._connections.header_s
            self._answer(
                RequestError(f"the headers did not arrive within {seconds:g} s", status=408)
            )

    def _answer(self, error: RequestError) -> None:
        """Send an error before there is a request, and close."""
        self._refusal = error
        self._stop_awaiting_head()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # the request before it is answered, then this ends
            return
        body = msgspec.json.encode(error_of(error)[1])
        retry = "retry-after: 1\r\n" if error.status == 503 else ""
        head = (
            f"content-type: application/json\r\n{retry}"
            f"x-request-id: {request_id(self.headers or ())}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[error.status] + head.encode() + body)
        # closing at once, with bytes unread, would lose the response of a client that still sends
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
        self.loop.call_later(_LINGER_S, self.transport.abort)


def bounded_protocol(
    limits: RequestLimits, connections: ConnectionOptions
) -> type[asyncio.Protocol]:
    """The protocol class for uvicorn, with its bounds."""
    connection_limit = _ConnectionLimit(connections.max_connections)

    class Protocol(BoundedProtocol):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(
                config,
                server_state,
                app_state,
                limits=limits,
                connections=connections,
                connection_limit=connection_limit,
            )

    return Protocol
