"""A listening engine: servers on this host or others connect to it, each with an `EngineService`.

The engine is open before anything connects. When a connection ends, its requests end; weights and
prefix cache stay for the next one. All servers' requests are in one scheduler, so the same limits
and the same fairness hold for them together. The process ends when the engine has failed, or after
it has drained (`quickstep engine`, which a service manager starts again).
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from quickstep.engine.remote.connection import Connection
from quickstep.engine.remote.hello import Hello, NoHello, receive_hello
from quickstep.engine.remote.host import EngineAddress, notice_silence
from quickstep.engine.remote.messages import TextDigests
from quickstep.engine.remote.service import EngineService
from quickstep.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine

_LOGGER = logging.getLogger(__name__)
# Peers that have not sent their hello; more are closed at once.
_MAX_STRANGERS = 32
_CLOSE_S = 2.0


def bind(address: EngineAddress, flag: str) -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError."""
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"{flag} {address} is not an address: {error.strerror}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(name)
    except OSError as error:
        sock.close()
        why = error.strerror
        if error.errno == errno.EADDRINUSE:
            why = "the port is in use; choose another (0 takes a free one)"
        raise ConfigError(f"cannot listen on {address}: {why}") from None
    return sock


class EngineListener:
    """Serves an open, started engine to all servers that connect and know the token."""

    def __init__(self, engine: Engine, hello: Hello, text_digests: TextDigests) -> None:
        self._engine = engine
        self._hello = hello
        self._text_digests = text_digests
        self._numbers = itertools.count(1)
        self._services: set[EngineService] = set()
        self._num_strangers = 0
        self._server: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> None:
        """Listen on a bound socket."""
        self._server = await asyncio.start_server(self._connected, sock=sock)

    async def stop(self, drain_s: float) -> None:
        """Take no more connections, let requests continue for `drain_s` seconds, and close all
        connections: what still runs then continues on another engine of its server.
        """
        if self._server is not None:
            self._server.close()
        services = tuple(self._services)
        for service in services:
            service.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await asyncio.gather(*(service.wait_until_idle() for service in services))
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):  # a server may not read
                await asyncio.gather(*(service.close() for service in services))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = "a peer that has gone"
        if (name := writer.get_extra_info("peername")) is not None:
            peer = f"the server at {EngineAddress(*name[:2])}"
        connection = Connection(reader, writer, peer)
        try:
            if await self._is_welcome(connection, reader, writer):
                await self._serve(connection)
        except EngineError as error:
            is_probe = isinstance(error, NoHello)
            _LOGGER.log(logging.DEBUG if is_probe else logging.WARNING, "%s", error)
        except OSError as error:
            _LOGGER.warning("%s has gone: %s", peer, error)
        except Exception:  # the task's top: this connection ends, the others continue
            _LOGGER.exception("the connection of %s failed", connection.peer)
        finally:
            connection.close()

    async def _is_welcome(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if self._num_strangers >= _MAX_STRANGERS:
            return False
        self._num_strangers += 1
        try:
            notice_silence(writer)
            await receive_hello(reader, writer, connection.peer, self._hello)
        finally:
            self._num_strangers -= 1
        return True

    async def _serve(self, connection: Connection) -> None:
        prefix = f"{next(self._numbers)}/"
        service = EngineService(
            connection, engine=self._engine, prefix=prefix, text_digests=self._text_digests
        )
        self._services.add(service)
        _LOGGER.info("%s has connected", connection.peer)
        try:
            await service.run()
        finally:
            self._services.discard(service)
            _LOGGER.info("%s has gone", connection.peer)
