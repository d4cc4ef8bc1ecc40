"""Clients take turns on the event loop: requests that came together begin one at a time, each time
one of another client, and each client has one request in hand.

The loop runs the steps of all that is ready, in the order in which it came, before it reads from
sockets again. Without turns a request waits for everything that a client with many connections has
sent before; with them, for what other clients are owed (`core.owner_turns`). And its every step
waits for a step of each request that has begun, on the loop and in the threads of the lanes, which
take the interpreter from the loop: so a client's next request begins when the server has done its
work on the last one, and waits for the engine or has begun its response. A client with few requests
waits for one of each other client. After a refusal for too many requests a client waits 5 ms for
its next turn: one that sends again at once would keep the loop busy. After work in a lane the next
request of the same client, if it was held back, waits twice as long as that took, or as the 50 ms
of it in which the request was in hand: so long inputs of one client take a third of the time at
most, and others mostly find the threads idle. Turns cost some time per request, so there are none
while only one client comes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

from quickstep.core.owner_turns import OwnerTurns

_REMEMBERED_S = 10.0  # how long there are turns after two clients came
# From bytes on a socket to a request that waits for its turn: they are read, and its task begins.
_READING_RUNS = 4
_IN_HAND_S = 0.05  # what takes longer waits for something, as for bytes of its client
_PAUSES = 2.0  # times the work of lanes on a request
_LEAST_PAUSE_S = 0.001  # timers of the loop have milliseconds
_REFUSED_S = 0.005  # so a client is refused 200 times a second at most while others come


class Turn:
    """A request in hand: it has begun, and the server works on it, until it `leave`s: its response
    starts, it waits for the engine, or it has taken too long to be at work. One that is refused
    because its client has sent too many stays a while longer.
    """

    def __init__(self, turns: Turns, client: str, loop: asyncio.AbstractEventLoop) -> None:
        self._turns: Turns | None = turns
        self._client = client
        self._work_s = 0.0  # of lanes
        self._since_s: list[float] = []  # of their work that has not ended
        self._timer = loop.call_later(_IN_HAND_S, self.leave)

    def leave(self) -> None:
        """Be out of hand; again, nothing. After a pause where lanes have worked long on it and the
        client's next request is held back.
        """
        if self._turns is not None:
            pause_s = 0.0
            if self._turns.holds_back(self._client):
                now_s, begun_s = time.perf_counter(), tuple(self._since_s)
                pause_s = _PAUSES * (self._work_s + sum(now_s - since_s for since_s in begun_s))
            self._leave_after(pause_s if pause_s > _LEAST_PAUSE_S else 0.0)

    def refused(self) -> None:
        """Be out of hand a while from now; after that, or again, nothing."""
        self._leave_after(_REFUSED_S)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Of a lane on the request, in its thread."""
        since_s = time.perf_counter()
        self._since_s.append(since_s)
        try:
            yield
        finally:
            self._since_s.remove(since_s)
            self._work_s += time.perf_counter() - since_s

    def _leave_after(self, pause_s: float) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            self._timer.cancel()
            if pause_s:
                asyncio.get_running_loop().call_later(pause_s, turns.leave, self._client)
            else:
                turns.leave(self._client)


_TURN: ContextVar[Turn | None] = ContextVar("quickstep_turn", default=None)


def turn_in_hand() -> Turn | None:
    """The turn of this task's request; None outside of requests."""
    return _TURN.get()


def leave_turn() -> None:
    """The request of this task has gone to the engine, or its response begins: out of hand."""
    turn = turn_in_hand()
    if turn is not None:
        turn.leave()


class Turns:
    """Belongs to one event loop. While one client comes, each request begins at once."""

    def __init__(self) -> None:
        self._waiting = OwnerTurns[asyncio.Future[None]]()
        self._is_taken = False  # in this run of the loop
        self._served = ""  # the client that had the last turn
        self._last_client: str | None = None
        self._ends_s = 0.0
        self._num_in_hand: dict[str, int] = {}  # of each client, and what waits for its turn
        self._held_back: dict[str, deque[asyncio.Future[None]]] = {}  # while others are in hand
        self._following = set[str]()  # clients whose request with the next turn was held back

    async def take(self, client: str) -> Turn:
        """Wait for a turn of a client. The request is in hand until it leaves."""
        loop = asyncio.get_running_loop()
        if not self._is_shared(client, loop.time()):
            self._num_in_hand[client] = self._num_in_hand.get(client, 0) + 1
        elif client in self._num_in_hand:
            begins: asyncio.Future[None] = loop.create_future()
            self._held_back.setdefault(client, deque()).append(begins)
            await self._begun(client, begins)
        else:
            self._num_in_hand[client] = 1
            begins = loop.create_future()
            self._waiting.push(client, begins)
            if not self._is_taken:
                self._is_taken = True
                self._next(loop)
            await self._begun(client, begins)
        turn = Turn(self, client, loop)
        _TURN.set(turn)
        return turn

    def _is_shared(self, client: str, now_s: float) -> bool:
        """Whether other clients came, too, a short time ago."""
        if client != self._last_client:
            if self._last_client is not None:
                self._ends_s = now_s + _REMEMBERED_S
            self._last_client = client
        return now_s <= self._ends_s

    def holds_back(self, client: str) -> bool:
        """Whether a request of the client waits for one in hand, as while others come."""
        return client in self._held_back

    async def _begun(self, client: str, begins: asyncio.Future[None]) -> None:
        try:
            await begins
        except asyncio.CancelledError:
            held_back = self._held_back.get(client, ())
            if begins in held_back:
                self._take_back(client, begins)
            else:
                self.leave(client)
            raise

    def _take_back(self, client: str, begins: asyncio.Future[None]) -> None:
        held_back = self._held_back[client]
        held_back.remove(begins)
        if not held_back:
            del self._held_back[client]

    def leave(self, client: str) -> None:
        """A request of the client is out of hand, or has gone: one that was held back follows."""
        held_back = self._held_back.get(client, ())
        begins = next((turn for turn in held_back if not turn.done()), None)  # others are cancelled
        if begins is not None:
            self._take_back(client, begins)
            self._waiting.push(client, begins)
            self._following.add(client)
            if not self._is_taken:
                self._is_taken = True
                self._next(begins.get_loop())
            return
        self._num_in_hand[client] -= 1
        if not self._num_in_hand[client]:
            del self._num_in_hand[client]

    def _next(self, loop: asyncio.AbstractEventLoop, num_runs: int = 0) -> None:
        """Give the next turn; what it starts runs before the one after it. A request that was held
        back by the one with the last turn waits for `_READING_RUNS` runs of the loop, which read
        what other clients have sent.
        """
        while self._waiting:
            if (
                self._waiting.next_owner == self._served
                and self._served in self._following
                and num_runs < _READING_RUNS
            ):
                loop.call_soon(self._next, loop, num_runs + 1)
                return
            self._served, begins = self._waiting.pop()
            self._following.discard(self._served)
            if not begins.done():  # cancelled
                begins.set_result(None)
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
