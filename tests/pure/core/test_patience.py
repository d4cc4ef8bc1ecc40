"""Time limits on clients: a pause of the server is not the client's."""

from __future__ import annotations

import asyncio
import time

import pytest

from quickstep.server.http.time_limits import PatientTimer, patient_timeout

LIMIT_S = 0.2


def pause(seconds: float) -> None:
    """The event loop stands still, as in a stopped container."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def test_a_pause_is_no_timeout() -> None:
    async def run() -> None:
        async with patient_timeout(LIMIT_S):
            for _ in range(3):
                await asyncio.sleep(0)
                pause(2 * LIMIT_S)
                await asyncio.sleep(0)

    asyncio.run(run())


def test_a_client_that_takes_too_long_is_one() -> None:
    async def run() -> None:
        async with patient_timeout(LIMIT_S):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(run())


def test_no_limit_waits_and_a_cancelled_timer_says_nothing() -> None:
    async def run() -> list[int]:
        async with patient_timeout(None):
            await asyncio.sleep(0)
        called: list[int] = []
        loop = asyncio.get_running_loop()
        timers = [PatientTimer(loop, 0.02, lambda n=n: called.append(n)) for n in range(3)]
        timers[1].cancel()
        while len(called) < 2:
            await asyncio.sleep(0.001)
        return called

    assert asyncio.run(run()) == [0, 2]
