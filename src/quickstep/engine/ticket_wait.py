"""Waiting for an executor's step without blocking the event loop."""

from __future__ import annotations

import asyncio

from quickstep.types import Ticket

__all__ = ["wait_for"]


async def wait_for(ticket: Ticket) -> None:
    """Until the ticket's result is there; other tasks get a turn in any case."""
    if ticket.done():
        await asyncio.sleep(0)
        return
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def resolve() -> None:
        if not done.done():
            done.set_result(None)

    def wake() -> None:
        loop.call_soon_threadsafe(resolve)

    ticket.add_done_callback(wake)
    await done
