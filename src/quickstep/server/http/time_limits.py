"""Time limits for clients, in which a pause of this server does not count.

A stopped container, a suspended machine or a stalled event loop is not the client's fault: when the
loop runs again, its bytes are there and no limit has passed. So time is counted in slices, of which
a pause is one, however long it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

NUM_SLICES = 16


class PatientTimer:
    """Calls back once, after `limit_s` in which the event loop ran, unless it is cancelled."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limit_s: float, callback: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._slice_s = limit_s / NUM_SLICES
        self._callback = callback
        self._num_left = NUM_SLICES
        self._handle = loop.call_later(self._slice_s, self._tick)

    def cancel(self) -> None:
        """Cancel the callback."""
        self._handle.cancel()

    def _tick(self) -> None:
        self._num_left -= 1
        if self._num_left:
            self._handle = self._loop.call_later(self._slice_s, self._tick)
        else:
            self._callback()


@asynccontextmanager
async def patient_timeout(limit_s: float | None) -> AsyncIterator[None]:
    """`asyncio.timeout` that counts as `PatientTimer` does; None for no limit."""
    async with asyncio.timeout(None) as timeout:
        if limit_s is None:
            yield
            return
        loop = asyncio.get_running_loop()
        timer = PatientTimer(loop, limit_s, lambda: timeout.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()
