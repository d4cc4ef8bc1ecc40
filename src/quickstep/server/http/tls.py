"""TLS in front of the HTTP protocol.

A connection counts from the moment it is accepted, and its handshake has to end in time: uvicorn
counts after the handshake, for which asyncio gives a minute. The certificate can be read again
while connections are open.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.errors import ConfigError, RequestError
from quickstep.server.http.connection_limit import ConnectionLimit, address_of
from quickstep.server.options import TlsOptions

_LOG = logging.getLogger("quickstep.server")


class Certificates:
    """The server's certificate and key; `reload` reads the files again, for new connections."""

    def __init__(self, options: TlsOptions) -> None:
        self._options = options
        self.context = _context(options)

    def reload(self) -> None:
        """Read the files again. Raises ConfigError, and then keeps what it has."""
        self.context = _context(self._options)


def check_tls(options: TlsOptions) -> None:
    """Raise ConfigError if the files are no certificate and key, before a model is loaded."""
    if options.certfile is not None:
        _context(options)


def _context(options: TlsOptions) -> ssl.SSLContext:
    """Raises ConfigError if the files are no certificate and key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert options.certfile is not None, "called with a certificate"
    try:
        context.load_cert_chain(options.certfile, options.keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        names = " and ".join(name for name in (options.certfile, options.keyfile) if name)
        raise ConfigError(
            f"no certificate with its key can be read from {names}: {error}"
        ) from None
    if options.ca_certs is None:
        return context
    try:
        context.load_verify_locations(options.ca_certs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ssl-ca-certs {options.ca_certs} cannot be read: {error}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; decrypt it first")


class TlsHandshake(asyncio.Protocol):
    """An accepted connection until its handshake is over; then `open_http` makes its protocol, for
    the address as which the connection counts.
    """

    def __init__(
        self,
        open_http: Callable[[str], asyncio.Protocol],
        certificates: Certificates,
        limit: ConnectionLimit,
        limit_s: float,
    ) -> None:
        self._open_http = open_http
        self._certificates = certificates
        self._limit = limit
        self._limit_s = limit_s
        self._early: list[bytes] = []  # requests that came with the last part of the handshake
        self._is_lost = False
        self._tasks = OwnedTasks(_LOG)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, or cut one connection too many."""
        assert isinstance(transport, asyncio.Transport), "an accepted connection is a stream"
        loop = asyncio.get_running_loop()
        address = address_of(transport)
        try:
            self._limit.enter(address, loop.time())
        except RequestError:
            transport.abort()
            return
        transport.pause_reading()
        self._tasks.start(self._open(loop, transport, address), "TLS handshake")

    def data_received(self, data: bytes) -> None:
        """A request before `connection_made` of its protocol."""
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended before it had a protocol."""
        self._is_lost = True

    async def _open(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, address: str
    ) -> None:
        """Shake hands, then let the HTTP protocol own the connection and its place."""
        secured = None
        try:
            secured = await self._shake_hands(loop, transport)
        finally:
            if secured is None:
                self._limit.leave(address)
        if secured is None:
            return
        protocol = self._open_http(address)
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        for data in self._early:
            protocol.data_received(data)

    async def _shake_hands(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport
    ) -> asyncio.Transport | None:
        """The connection with TLS; None if it ended before."""
        try:
            secured = await loop.start_tls(
                transport,
                self,
                self._certificates.context,
                server_side=True,
                ssl_handshake_timeout=self._limit_s,
            )
        except OSError as error:  # also errors of TLS, and the limit of time
            if isinstance(error, ssl.SSLError) and error.reason == "HTTP_REQUEST":
                self._limit.report(loop.time(), "a client speaks http to this https port")
            transport.abort()
            return None
        return None if self._is_lost else secured
