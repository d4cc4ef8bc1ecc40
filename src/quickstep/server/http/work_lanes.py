"""Threads for work that grows with a client's request: parsing, templates, tokenising, encoding.

The event loop does only short work. The rest goes into lanes by its size, each with a few threads
of its own and a bounded queue, so that many large inputs cannot occupy the threads that small ones
need. In a lane the API keys take turns (`core.owner_turns`). Each has its share of the queue
(`core.shares`); when that is used up, the newest input of the key that has most makes way for a key
that has fewer, since work that waits can be refused later, too. What finds no room gets 503.

The event loop shares the cores with these threads. They ask the kernel to be batch work, which
takes no core from a thread that runs when it wakes up, and for long time slices: a thread that
wakes up takes a core from one of them at once, if it has not used more than its part of the time,
and would wait for the end of a slice as long as its own, 3 to 4 ms (Linux 6.12 and later;
sched_setattr(2), EEVDF's slices). Their part of the time stays the same.

    up to 64 KiB      2 threads
    up to 1 MiB       2 threads
    above             1 thread
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import platform
import struct
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy
from typing import Any, TypeVar

from quickstep.core.owner_turns import OwnerTurns
from quickstep.core.shares import NoRoom, Shares
from quickstep.errors import QuickstepError
from quickstep.server.http.errors import ServerBusy
from quickstep.server.http.turns import turn_in_hand

_LOG = logging.getLogger("quickstep.server")
_Result = TypeVar("_Result")
_Work = tuple[Future[Any], Callable[[], Any]]
# Shorter JSON is parsed on the event loop: a thread hop costs more.
INLINE_BYTES = 64 * 1024
BYTES_PER_NUMBER = 4  # a number to be encoded takes as long as so many bytes to be parsed
_SLICE_NS = 20_000_000
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period; and the number
# of the system call, which the C library has no function for
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


async def done_in_thread(work: Callable[[], _Result]) -> _Result:
    """Run `work` in a thread. A cancellation waits for its end, so that its files can be closed."""
    return await _finished(asyncio.to_thread(work))


async def _finished(work: Coroutine[Any, Any, _Result]) -> _Result:
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:  # perhaps several times
            cancelled = error
    if cancelled is None:
        return running.result()
    failure = None if running.cancelled() else running.exception()
    if failure is not None and not isinstance(failure, QuickstepError):
        _LOG.error("work failed whose request was cancelled", exc_info=failure)
    raise cancelled


class _Lane:
    """Some threads with a queue for each key, which share its length. Any event loop may use it."""

    def __init__(self, largest: int | None, num_threads: int, max_waiting: int) -> None:
        self.largest = largest
        self._num_threads = num_threads
        self._shares = Shares(max_waiting)  # of what waits
        self._num_running = 0
        self._waiting = OwnerTurns[_Work]()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(
            num_threads, thread_name_prefix="quickstep-input", initializer=_ask_to_be_batch_work
        )

    async def run(self, key: str, size: int, call: Callable[[], _Result]) -> _Result:
        future: Future[_Result] = Future()
        work: _Work = (future, call)
        with self._lock:
            if self._num_running < self._num_threads:
                self._waiting.serve(key, size)
                self._start(work)
            else:
                self._take_place(key)
                self._waiting.push(key, work, size)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:  # what runs counts until it has ended
                self._drop(key, work)
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
            if self._waiting:
                key, following = self._waiting.pop()
                self._shares.give_back(key)
                self._start(following)

    def _take_place(self, key: str) -> None:
        """Raise ServerBusy if the share of a key is used up, unless another one makes way."""
        try:
            self._shares.take(key)
        except NoRoom as refusal:
            largest = self._shares.largest
            if self._shares.held(largest) <= self._shares.held(key) + 1:
                raise _busy(refusal) from None
            num_held, capacity = self._shares.held(largest), refusal.capacity
            newest = self._waiting.waiting_of(largest)[-1]
            self._drop(largest, newest)
            self._shares.hold(key)
            newest[0].set_exception(_busy(NoRoom(largest, num_held, capacity)))

    def _drop(self, key: str, work: _Work) -> None:
        if self._waiting.drop(key, work):
            self._shares.give_back(key)


def _ask_to_be_batch_work() -> None:
    """For the calling thread, unless the server was started with a policy (`chrt`). What the kernel
    does not know changes nothing.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    policy, nice = os.SCHED_BATCH, os.getpriority(os.PRIO_PROCESS, 0)  # on Linux the thread's
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, policy, 0, nice, 0, _SLICE_NS, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def _busy(refusal: NoRoom) -> ServerBusy:
    whose = " of your API key" if refusal.owner else ""
    limit = "its share is used up" if refusal.owner else "which is the limit"
    return ServerBusy(
        f"{refusal.num_held} inputs of this size{whose} wait to be read, {limit}; send the "
        "request again later"
    )


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
        turn = turn_in_hand()

        def in_turn() -> _Result:
            with nullcontext() if turn is None else turn.work():
                return work()

        lane = next(lane for lane in self._lanes if lane.largest is None or size <= lane.largest)
        return await lane.run(self._key, size, in_turn)

    async def finish(self, size: int, work: Callable[[], _Result]) -> _Result:
        """The same, but a cancellation waits for the end, so that files can be closed."""
        return await _finished(self.run(size, work))

    async def do(self, size: int, work: Callable[[], _Result]) -> _Result:
        """The same, but short work is done immediately. Raises ServerBusy."""
        return work() if size <= INLINE_BYTES else await self.run(size, work)
