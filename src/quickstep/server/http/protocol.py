"""HTTP/1.1 with bounds: uvicorn's protocol itself waits without limit and accepts headers of any
size.

The head of a request has to arrive in time and within its size. A refusal before there is a request
is answered here, in OpenAI's shape, and so is a connection beyond the limit of open ones. A
connection is cut if its client does not read what was written in time, whatever the response is.
Routes find `received_s` in the request's state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from quickstep.errors import RequestError
from quickstep.server.http.connection_limit import ConnectionLimit, address_of
from quickstep.server.http.errors import error_of
from quickstep.server.http.middleware import check_head, request_id
from quickstep.server.http.time_limits import PatientTimer
from quickstep.server.http.tls import Certificates, TlsHandshake
from quickstep.server.options import ConnectionOptions, RequestLimits

_LOG = logging.getLogger("quickstep.server")
_TLS_HELLO = b"\x16\x03"
_STATUS, _HEAD_END = b"HTTP/1.1 ", b"\r\n\r\n"
_LINGER_S = 2.0


class _Http1Parser:
    """httptools' parser, which stops where a client offers another protocol (`Upgrade: h2c`). A
    server may ignore that (RFC 9110, 7.8): the request is parsed again without the offer.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._parser = httptools.HttpRequestParser(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        """Parse bytes, which call the protocol back."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self.offers_upgrade():
                raise
            head = self._protocol.head_without_upgrade()
            self._parser = httptools.HttpRequestParser(self._protocol)
            self._parser.feed_data(head)
            self.feed_data(data[offer.args[0] :])

    def offers_upgrade(self) -> bool:
        """Whether the request whose head is complete is to be parsed again."""
        is_offer = self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"
        return bool(is_offer)


class JoinedWrites:
    """A transport that writes the head of a response with the part of its body that comes at once:
    one call of the system, after which the client wakes up once. A head without one is written by
    the next run of the loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write bytes after a head that was held; hold a head."""
        if not self._head and data.startswith(_STATUS) and data.endswith(_HEAD_END):
            self._head = data
            self._loop.call_soon(self._release)
        else:
            data, self._head = self._head + data, b""
            self._transport.write(data)

    def writelines(self, parts: Iterable[bytes]) -> None:
        """Write parts one after another."""
        self.write(b"".join(parts))

    def _release(self) -> None:
        if self._head and not self._transport.is_closing():
            self.write(b"")

    def write_eof(self) -> None:
        """Write what is held, and no more after it."""
        self._release()
        self._transport.write_eof()

    def close(self) -> None:
        """Write what is held, and close."""
        self._release()
        self._transport.close()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Made through `bounded_protocol`. `address` is for which the connection is
    counted already, as one after a handshake.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        limits: RequestLimits,
        connections: ConnectionOptions,
        connection_limit: ConnectionLimit,
        address: str | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._http1 = self.parser = _Http1Parser(self)  # type: ignore[assignment]
        self._limits = limits
        self._connections = connections
        self._connection_limit = connection_limit
        self._address = address  # None while it is not counted
        self._is_refused = False
        self._head_timer: PatientTimer | None = None
        self._reader_timer: PatientTimer | None = None  # while the client has to read
        self._head_bytes = 0
        self._in_head = True
        self._received_any = False
        self._refusal: RequestError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first request, or refuse the connection."""
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        if self._address is None:
            address = address_of(transport)
            try:
                self._connection_limit.enter(address, self.loop.time())
            except RequestError as refusal:
                self._refuse(refusal)
                return
            self._address = address
        self._await_head()

    def _refuse(self, refusal: RequestError) -> None:
        self._is_refused = self._connection_limit.begin_answer()
        if self._is_refused:
            self._answer(refusal)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers; the connection counts no more."""
        if self._address is not None:
            self._connection_limit.leave(self._address)
            self._address = None
        if self._is_refused:
            self._connection_limit.end_answer()
            self._is_refused = False
        self._stop_awaiting_head()
        self._stop_awaiting_reader()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; refuse a head that is too long even before its end."""
        if self._refusal is not None or self.transport.is_closing():
            return
        if not self._received_any and data.startswith(_TLS_HELLO):
            self._connection_limit.report(
                self.loop.time(), "a client speaks https to this http port"
            )
        self._received_any = True
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
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

    def on_header(self, name: bytes, value: bytes) -> None:
        """Skip headers after a body (trailers)."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request unless its head is too long."""
        if self._http1.offers_upgrade():
            return
        self._in_head = False
        self._head_bytes = 0
        self._stop_awaiting_head()
        if self._refusal is not None:
            return
        scope = {"raw_path": self.url, "query_string": b"", "headers": self.headers}
        try:
            _check_transfer_encoding(self.headers)
            check_head(scope, self._limits)
        except RequestError as error:
            self._refusal = error
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._refusal is None and not self._http1.offers_upgrade():
            super().on_message_complete()

    def head_without_upgrade(self) -> bytes:
        """The head that was parsed, as of a client that offers no other protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b" ".join((self.parser.get_method(), self.url, b"HTTP/" + version))]
        lines += [
            name + b": " + value
            for name, value in self.headers
            if name not in (b"upgrade", b"http2-settings")
        ]
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        """The bytes are not HTTP; `data_received` answers."""
        if self._refusal is None:
            self._refusal = RequestError("the request is not valid HTTP/1.1")

    def pause_writing(self) -> None:
        """So much of a response is unread that the rest has to wait."""
        super().pause_writing()
        self._stop_awaiting_reader()
        patience_s = self._connections.slow_reader_s
        self._reader_timer = PatientTimer(self.loop, patience_s, self._reader_is_slow)

    def resume_writing(self) -> None:
        """Most of what was written has been read."""
        super().resume_writing()
        self._stop_awaiting_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close, and cut a client that does not read the response."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._connections.slow_reader_s, self.transport.abort)

    def _stop_awaiting_reader(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _reader_is_slow(self) -> None:
        self._reader_timer = None
        _LOG.warning("a client did not read its response in time; its connection is cut")
        self.transport.abort()

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
            self.cycle.keep_alive = False  # the latest request is answered, then this ends
            if self.cycle.more_body:  # it is the one at fault: who reads its body gets the error
                self.cycle.scope["state"]["broken_body"] = error
                self.cycle.more_body = False
                self.cycle.message_event.set()
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


def _check_transfer_encoding(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise RequestError 501 for a transfer coding that is not undone here."""
    given = b",".join(value for name, value in headers if name == b"transfer-encoding")
    if given and given.strip().lower() != b"chunked":
        raise RequestError(
            f"the transfer-encoding is {given[:100].decode('latin-1')!a}; send `chunked` or a "
            "content-length",
            status=501,
        )


def bounded_protocol(
    limits: RequestLimits,
    connections: ConnectionOptions,
    certificates: Certificates | None = None,
) -> type[asyncio.Protocol]:
    """What uvicorn makes for each accepted connection: the protocol with its bounds, or with
    `certificates` the handshake before it.
    """
    limit = ConnectionLimit(connections.max_connections)

    def opener(
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        def open_http(address: str | None = None) -> asyncio.Protocol:
            return BoundedProtocol(
                config,
                server_state,
                app_state,
                limits=limits,
                connections=connections,
                connection_limit=limit,
                address=address,
            )

        if certificates is None:
            return open_http()
        return TlsHandshake(open_http, certificates, limit, connections.header_s)

    return opener  # type: ignore[return-value]
