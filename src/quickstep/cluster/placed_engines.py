"""Engines that Ray places, as the server sees them: `PlacedEngines` connects to each of them.

It starts the process that talks to Ray (`ray_hosts`), again when that has ended, and asks it where
an engine listens. An engine whose actor lives keeps its weights and its prefix cache, and is
connected to again; another one is launched where Ray has resources for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from quickstep.cluster.ray_hosts import RAY_COMMAND, Placed, PlaceEngine, PlaceGroup
from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.engine.remote.connection import read_messages
from quickstep.engine.remote.hello import Hello
from quickstep.engine.remote.host import EngineAddress, EngineHost
from quickstep.engine.remote.launch import Launched, launch
from quickstep.engine.remote.opening import framed
from quickstep.engine.remote.supervisor import EngineConnector
from quickstep.errors import ConfigError, EngineError

_LOGGER = logging.getLogger(__name__)
_DECODER = msgspec.msgpack.Decoder(list[Placed])
_OPEN_S = 60.0  # Ray's start, in addition to the wait for resources


class PlacedEngines:
    """Connects to engines that Ray has placed. `end` it in any case."""

    def __init__(
        self,
        order: PlaceGroup,
        hello: Hello,
        command: Sequence[str] = RAY_COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._order = order
        self._hello = hello
        self._command = command
        self._clock = clock
        self._opening = asyncio.Lock()
        self._launched: Launched | None = None
        self._reading = OwnedTasks(_LOGGER)
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Placed]] = {}

    def connectors(self) -> list[EngineConnector]:
        """What connects to each engine, by replica."""
        return [self._connector(replica) for replica in range(self._order.num_engines)]

    def _connector(self, replica: int) -> EngineConnector:
        async def connect() -> EngineHost:
            placed = await self._place(replica)
            try:
                return await self._connected(placed)
            except EngineError as error:  # an engine that hangs in a living actor, for example
                _LOGGER.warning("replica %d is placed again: %s", replica, error)
                return await self._connected(await self._place(replica, is_new=True))

        return connect

    async def _connected(self, placed: Placed) -> EngineHost:
        replica, host = placed.replica, placed.host
        _LOGGER.info("replica %d is on %s (Ray's node %s)", replica, host, placed.node)
        address = EngineAddress(host, placed.port)
        return await EngineHost.connect(address, self._hello, self._clock)

    async def _place(self, replica: int, is_new: bool = False) -> Placed:
        """Where the engine listens. Raises ConfigError, EngineError."""
        async with self._opening:
            writer = self._writer or await self._opened()
        waiting: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        self._waiting[replica] = waiting
        writer.write(framed([PlaceEngine(replica, is_new)]))
        placed = await waiting
        if placed.refused:
            raise EngineError(placed.refused)
        return placed

    async def _opened(self) -> asyncio.StreamWriter:
        """The connection to a process that has a placement group."""
        self.end()
        launched = self._launched = launch(self._command)
        launched.send_opening(framed([self._order]))
        reader, writer = await asyncio.open_unix_connection(sock=launched.connection)
        messages = read_messages(reader, _DECODER, "the process that uses Ray")
        try:
            async with asyncio.timeout(self._order.wait_s + _OPEN_S):
                opened = await anext(messages, None)
        except TimeoutError:
            opened = Placed(-1, refused=f"the Ray cluster {self._order.address} does not answer")
        if opened is None:
            opened = Placed(-1, refused="the process that uses Ray has ended")
        if opened.refused:
            writer.transport.abort()
            self.end()
            raise ConfigError(opened.refused)

        async def read() -> None:
            try:
                async for placed in messages:
                    if (waiting := self._waiting.pop(placed.replica, None)) and not waiting.done():
                        waiting.set_result(placed)
            finally:
                writer.transport.abort()
                if self._writer is writer:
                    self._writer = None
                ended = Placed(-1, refused="the process that uses Ray has ended")
                for waiting in self._waiting.values():
                    if not waiting.done():
                        waiting.set_result(ended)
                self._waiting.clear()

        self._reading.start(read(), "ray-hosts")
        self._writer = writer
        return writer

    def end(self) -> None:
        """End the process that uses Ray, and the engines with it. Idempotent."""
        if self._launched is not None:
            self._launched.end()
            self._launched = None
