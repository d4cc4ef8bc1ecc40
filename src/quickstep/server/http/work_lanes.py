"""Threads for work that grows with a client's input: parsing, rendering templates, tokenising.

The event loop does only short work. The rest goes into lanes by its size, each with a few threads
of its own and a bounded queue, so that many large inputs cannot occupy the threads that small ones
need. When a queue is full, the response is 503.

    up to 64 KiB      2 threads
    up to 1 MiB       2 threads
    above             1 thread
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quickstep.server.http.errors import ServerBusy

__all__ = ["INLINE_BYTES", "WorkLanes", "done_in_thread"]

_Result = TypeVar("_Result")
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
    """Some threads with a bounded queue. Any event loop may use it."""

    def __init__(self, largest: int | None, num_threads: int, max_waiting: int) -> None:
        self.largest = largest
        self._max_pending = num_threads + max_waiting
        self._num_pending = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="quickstep-input")

    async def run(self, work: Callable[[], _Result]) -> _Result:
        with self._lock:
            if self._num_pending >= self._max_pending:
                raise ServerBusy(
                    f"{self._num_pending} inputs of this size wait to be read, which is the limit; "
                    "send the request again later"
                )
            self._num_pending += 1
        future = self._threads.submit(work)
        future.add_done_callback(self._ended)
        return await asyncio.wrap_future(future)

    def _ended(self, _: object) -> None:
        """Work counts until it has ended, even if its client disconnected long before."""
        with self._lock:
            self._num_pending -= 1


class WorkLanes:
    """The lanes of one server. Threads start with the first work and end with the last owner."""

    def __init__(self, max_waiting: tuple[int, int, int] = (4096, 512, 64)) -> None:
        small, medium, large = max_waiting
        self._lanes = (
            _Lane(INLINE_BYTES, 2, small),
            _Lane(1024 * 1024, 2, medium),
            _Lane(None, 1, large),
        )

    async def run(self, size: int, work: Callable[[], _Result]) -> _Result:
        """Run `work` on about `size` bytes in a thread; a cancellation before its start skips it.

        Raises:
            ServerBusy: Too many wait.
        """
        lane = next(lane for lane in self._lanes if lane.largest is None or size <= lane.largest)
        return await lane.run(work)

    async def parse(self, size: int, work: Callable[[], _Result]) -> _Result:
        """The same for JSON; a short one is parsed immediately. Raises ServerBusy."""
        return work() if size <= INLINE_BYTES else await self.run(size, work)
