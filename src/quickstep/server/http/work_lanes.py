"""Threads for work that grows with a client's input: parsing, rendering templates, tokenising.

The event loop does only short work. The rest goes into lanes by its size, each with a few threads
of its own and a bounded queue, so that many large inputs cannot occupy the threads that small ones
need. In a lane the API keys take turns. When it is full, the newest input of the key that has most
of them makes way for a key that has fewer, and gets 503.

    up to 64 KiB      2 threads
    up to 1 MiB       2 threads
    above             1 thread
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import Any, TypeVar

from quickstep.server.http.errors import ServerBusy

__all__ = ["INLINE_BYTES", "WorkLanes", "done_in_thread"]

_Result = TypeVar("_Result")
_Work = tuple[Future[Any], Callable[[], Any]]
# Shorter JSON is parsed on the event loop: a thread hop costs more.
INLINE_BYTES = 64 * 1024


async def done_in_thread(work: Callable[[], _Result]) -> _Result:
    """Run `work` in a thread. A cancellation waits for its end, so that its files can be closed."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


class _Lane:
    """Some threads with a bounded queue for each key. Any event loop may use it."""

    def __init__(self, largest: int | None, num_threads: int, max_waiting: int) -> None:
        self.largest = largest
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._num_running = 0
        self._waiting: dict[str, deque[_Work]] = {}  # by key, in the order of their turns
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="quickstep-input")

    async def run(self, key: str, work: Callable[[], _Result]) -> _Result:
        future: Future[_Result] = Future()
        with self._lock:
            if self._num_running < self._num_threads:
                self._start((future, work))
            else:
                self._make_room(key)
                self._waiting.setdefault(key, deque()).append((future, work))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:  # what runs counts until it has ended
                self._drop(key, (future, work))
            raise

    def _start(self, work: _Work) -> None:
        self._num_running += 1
        self._threads.submit(self._run, *work)

    def _run(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        with self._lock:
            self._num_running -= 1
            if (key := next(iter(self._waiting), None)) is not None:
                queue = self._waiting.pop(key)
                self._start(queue.popleft())
                if queue:
                    self._waiting[key] = queue  # after the others

    def _make_room(self, key: str) -> None:
        """Raise ServerBusy if the lane is full, unless another key has to make way."""
        counts = {one: len(queue) for one, queue in self._waiting.items()}
        num_waiting = sum(counts.values())
        if num_waiting < self._max_waiting:
            return
        busy = ServerBusy(
            f"{num_waiting} inputs of this size wait to be read, which is the limit; send the "
            "request again later"
        )
        largest = max(counts, key=counts.__getitem__, default=key)
        if counts.get(largest, 0) <= counts.get(key, 0) + 1:
            raise busy
        future, work = self._waiting[largest][-1]
        self._drop(largest, (future, work))
        future.set_exception(busy)

    def _drop(self, key: str, work: _Work) -> None:
        queue = self._waiting.get(key, deque())
        if work in queue:
            queue.remove(work)
            if not queue:
                del self._waiting[key]


class WorkLanes:
    """The lanes of one server. Threads start with the first work and end with the last owner."""

    def __init__(self, max_waiting: tuple[int, int, int] = (4096, 512, 64)) -> None:
        small, medium, large = max_waiting
        self._lanes = (
            _Lane(INLINE_BYTES, 2, small),
            _Lane(1024 * 1024, 2, medium),
            _Lane(None, 1, large),
        )
        self._key = ""

    def of(self, key: str) -> WorkLanes:
        """The same lanes, for the work of an API key."""
        lanes = copy(self)
        lanes._key = key
        return lanes

    async def run(self, size: int, work: Callable[[], _Result]) -> _Result:
        """Run `work` on about `size` bytes in a thread; a cancellation before its start skips it.

        Raises:
            ServerBusy: Too many wait.
        """
        lane = next(lane for lane in self._lanes if lane.largest is None or size <= lane.largest)
        return await lane.run(self._key, work)

    async def parse(self, size: int, work: Callable[[], _Result]) -> _Result:
        """The same for JSON; a short one is parsed immediately. Raises ServerBusy."""
        return work() if size <= INLINE_BYTES else await self.run(size, work)
