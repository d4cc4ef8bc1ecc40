"""The repeats of a measurement: one to warm up, then those that count, until Ctrl-C at the latest.

An interrupted measurement keeps the repeats that are complete; without one it ends as interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

_Result = TypeVar("_Result")

# Called with the number of complete repeats, and how many there are to be.
RoundDone = Callable[[int, int], None]


async def repeated(
    measure: Callable[[int], Awaitable[_Result]],
    num_repeats: int,
    round_done: RoundDone | None = None,
) -> list[_Result]:
    """`measure(0)`, which warms up, then the results of `measure(1)` to `measure(num_repeats)`."""
    results: list[_Result] = []
    for place in range(num_repeats + 1):
        try:
            result = await measure(place)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not results or task is None:
                raise
            task.uncancel()
            break
        if place:
            results.append(result)
        if round_done is not None:
            round_done(place, num_repeats)
    return results
