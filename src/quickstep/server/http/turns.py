"""Clients take turns on the event loop: requests that came together begin one at a time, each time
one of another client.

The loop runs the steps of all that is ready, in the order in which it came, before it reads from
sockets again. Without turns a request waits for everything that a client with many connections has
sent before; with them, for what other clients are owed (`core.owner_turns`): a client with few
requests waits for what has begun. Turns cost some time per request, so there are none while only
one client comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quickstep.core.owner_turns import OwnerTurns

_REMEMBERED_S = 10.0  # how long there are turns after two clients came


class Turns:
    """Belongs to one event loop. While few requests come, each begins at once."""

    def __init__(self) -> None:
        self._waiting = OwnerTurns[asyncio.Future[None]]()
        self._is_taken = False  # in this run of the loop
        self._last_client: str | None = None
        self._ends_s = 0.0

    async def take(self, client: str) -> None:
        """Wait for a turn of a client."""
        loop = asyncio.get_running_loop()
        if client != self._last_client:
            if self._last_client is not None:
                self._ends_s = loop.time() + _REMEMBERED_S
            self._last_client = client
        elif loop.time() > self._ends_s:
            return
        if not self._is_taken:
            self._is_taken = True
            self._waiting.serve(client)
            loop.call_soon(self._next, loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.push(client, turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the next turn; what it starts runs before the one after it."""
        while self._waiting:
            _, turn = self._waiting.pop()
            if not turn.done():  # cancelled
                turn.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._is_taken = False


class Places:
    """Places for what takes long elsewhere, as loads of adapters by the engine: clients that wait
    for one take turns. Belongs to one event loop.
    """

    def __init__(self, num_places: int = 1) -> None:
        self._num_free = num_places
        self._waiting = OwnerTurns[asyncio.Future[None]]()

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """Wait for a place, which is free again at the end."""
        if self._num_free:
            self._num_free -= 1
            self._waiting.serve(client)
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.push(client, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave()  # it had come
                else:
                    self._waiting.drop(client, turn)
                raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        while self._waiting:
            _, turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
