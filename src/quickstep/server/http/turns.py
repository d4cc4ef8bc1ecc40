"""Clients take turns on the event loop: requests that came together begin one at a time, each time
one of another client.

The loop runs the steps of all that is ready, in the order in which it came, before it reads from
sockets again. Without turns a request waits for everything that a client with many connections has
sent before; with them, for one request of each other client. Turns cost some time per request, so
there are none while only one client comes.
"""

from __future__ import annotations

import asyncio
from collections import deque

_REMEMBERED_S = 10.0  # how long there are turns after two clients came


class Turns:
    """Belongs to one event loop. While few requests come, each begins at once."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of their turns
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
            loop.call_soon(self._next, loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the next turn; what it starts runs before the one after it."""
        while self._waiting:
            client = next(iter(self._waiting))
            queue = self._waiting.pop(client)
            turn = queue.popleft()
            if queue:
                self._waiting[client] = queue  # after the others
            if not turn.done():  # cancelled
                turn.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._is_taken = False
