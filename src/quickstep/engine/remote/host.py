"""An engine that listens on another host, as the server sees it: connect, receive, end.

`EngineHost` is an `EngineLink` as a child is: its start is a connection, its end is the end of the
connection, and the engine keeps its weights and its prefix cache for the next one. A host may
vanish without a message (no power, no cable, a stopped process), so both ends send something at
least once a second: after `_SILENCE_S` without it this end closes the connection, and after
`USER_TIMEOUT_S` without an acknowledgement the kernel of either end does.

Times of messages are converted here, and nowhere else, between the engine's clock and ours.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.engine.remote.clock_offset import ClockOffset, shifted
from quickstep.engine.remote.connection import Connection
from quickstep.engine.remote.hello import Hello, greet
from quickstep.engine.remote.messages import (
    FROM_ENGINE,
    ClockNote,
    FromEngine,
    Message,
    Opened,
    ReadClock,
    StatsNote,
    StepNote,
)
from quickstep.engine.remote.supervisor import EngineConnector, LoadProgress, RestartLimits
from quickstep.errors import ConfigError, EngineError
from quickstep.types import Request

_LOGGER = logging.getLogger(__name__)
USER_TIMEOUT_S = 5
_READ_CLOCK_S = 1.0
_SILENCE_S = 4.0
_CHECK_S = 0.5  # between two looks at the silence
_NUM_FIRST_READINGS = 8
_CONNECT_S = 3.0
_WAIT_STEP_S = 1.0
_OPEN_S = 10.0  # from the welcome to the first estimate of the clock
# A host that is away for a day is connected to again.
RECONNECTIONS = RestartLimits(max_quick_deaths=None, first_delay_s=0.1, max_delay_s=3.0)


class EngineAddress(msgspec.Struct, frozen=True):
    """Where an engine listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, flag: str) -> EngineAddress:
        """An address such as `10.0.0.5:8100` or `[::1]:8100`. Raises ConfigError."""
        host, _, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ConfigError(f"{flag} {text}: write an IPv6 address in brackets, as [::1]:8100")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"{flag} has {text!r}, it must be HOST:PORT, as 10.0.0.5:8100")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def notice_silence(writer: asyncio.StreamWriter) -> None:
    """Have the kernel close a connection whose other end acknowledges nothing, and send at once."""
    sock: socket.socket = writer.get_extra_info("socket")
    options = [
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", USER_TIMEOUT_S - 1),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", USER_TIMEOUT_S * 1000),
    ]
    for level, name, value in options:
        if hasattr(socket, name):  # the last four are Linux's
            sock.setsockopt(level, getattr(socket, name), value)


def connector(
    address: EngineAddress,
    hello: Hello,
    clock: Callable[[], float] = time.monotonic,
    wait_s: float = 0.0,
) -> EngineConnector:
    """What connects to the engine at `address`, again whenever it is called. Within `wait_s` from
    now it waits for an engine that cannot be reached: it may have been started with this server.
    """
    until_s = clock() + wait_s

    async def connect() -> EngineHost:
        while True:
            try:
                return await EngineHost.connect(address, hello, clock)
            except EngineError as error:
                if clock() >= until_s:
                    raise
                _LOGGER.warning("%s; trying again for %.0f s", error, until_s - clock())
                await asyncio.sleep(_WAIT_STEP_S)

    return connect


class EngineHost:
    """A connection to a listening engine. Made by `connect`; `end` it in any case."""

    process_id = None

    def __init__(
        self, connection: Connection, address: EngineAddress, clock: Callable[[], float]
    ) -> None:
        self._address = address
        self._connection = connection
        self._clock = clock
        self._offset = ClockOffset()
        self._silent_s = 0.0
        self._checked_s = clock()
        self._how = f"{connection.peer} closed the connection"
        self.sender = _HostSender(connection, self._offset)
        self.messages = self._received()
        self._tasks = OwnedTasks(_LOGGER)
        self._tasks.start(connection.sender.run(), "to-engine")
        self._tasks.start(self._watch(), "engine-silence")

    @classmethod
    async def connect(
        cls, address: EngineAddress, hello: Hello, clock: Callable[[], float]
    ) -> EngineHost:
        """Connect to the engine at `address`, and greet it.

        Raises:
            ConfigError: It refused our token or our build.
            EngineError: It cannot be reached, or is no engine.
        """
        peer = f"the engine at {address}"
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(address.host, address.port)
        except OSError as error:
            raise EngineError(f"{peer} cannot be reached: {_reason(error)}") from None
        connection = Connection(reader, writer, peer)
        try:
            notice_silence(writer)
            await greet(reader, writer, peer, hello)
        except BaseException:
            connection.abort()
            raise
        return cls(connection, address, clock)

    @property
    def name(self) -> str:
        """For the log."""
        return self._connection.peer

    @property
    def address(self) -> str:
        """Where it listens."""
        return str(self._address)

    async def open(self, progress: LoadProgress | None, silence_s: float | None) -> Opened:
        """Wait for the model's facts and for a first estimate of the engine's clock. Raises
        EngineError.
        """
        self._read_clock()
        opened: Opened | None = None
        num_readings = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPEN_S):
                async for message in self._connection.messages(FROM_ENGINE):
                    match message:
                        case Opened():
                            opened = message
                        case ClockNote():
                            self._observe(message)
                            num_readings += 1
                            if num_readings < _NUM_FIRST_READINGS:
                                self._read_clock()
                        case StatsNote() | StepNote():
                            pass  # of other servers' requests
                        case _:
                            raise EngineError(f"{self.name} sent {message} before it had opened")
                    if opened is not None and num_readings == _NUM_FIRST_READINGS:
                        converted = shifted(opened, -self._offset.offset_s)
                        assert isinstance(converted, Opened), "converting keeps the type"
                        return converted
        raise EngineError(f"{self.name} ended the connection, or did not open it in time")

    def kill(self) -> None:
        """Close the connection now; `messages` ends with it."""
        self._connection.abort()

    async def end(self) -> str:
        """Close the connection. Returns how it ended."""
        self._tasks.cancel()
        self._connection.abort()
        return self._how

    async def _received(self) -> AsyncGenerator[FromEngine, None]:
        async for message in self._connection.messages(FROM_ENGINE):
            self._silent_s = 0.0
            if isinstance(message, ClockNote):
                self._observe(message)
            else:
                yield shifted(message, -self._offset.offset_s)

    def _read_clock(self) -> None:
        self._connection.sender.put(ReadClock(self._clock()))

    def _observe(self, note: ClockNote) -> None:
        self._silent_s = 0.0
        self._offset.observe(note.sent_s, note.engine_s, self._clock())

    async def _watch(self) -> None:
        """Read the engine's clock once a second, and close a connection on which nothing comes. A
        check that comes late counts for two intervals: this process may have been stopped.
        """
        read_s = self._clock()
        while True:
            await asyncio.sleep(_CHECK_S)
            now = self._clock()
            self._silent_s += min(now - self._checked_s, 2 * _CHECK_S)
            self._checked_s = now
            if self._silent_s >= _SILENCE_S:
                self._how = f"{self.name} has sent nothing for {self._silent_s:.1f} s"
                self.kill()
                return
            if now - read_s >= _READ_CLOCK_S:
                read_s = now
                self._read_clock()


class _HostSender:
    """Queues messages for a listening engine, with their times by its clock."""

    def __init__(self, connection: Connection, offset: ClockOffset) -> None:
        self._sender = connection.sender
        self._offset = offset

    @property
    def num_bytes(self) -> int:
        """The size of the messages that are not sent yet."""
        return self._sender.num_bytes

    def put(self, message: Message) -> None:
        """Queue a message. Raises UnicodeEncodeError, OverflowError."""
        if isinstance(message, Request) and message.received_s is not None:
            received_s = message.received_s + self._offset.offset_s
            message = replace(message, received_s=received_s)
        self._sender.put(message)


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"no answer for {_CONNECT_S:g} s"
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)
