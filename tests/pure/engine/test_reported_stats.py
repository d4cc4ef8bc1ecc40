"""The engine's state is sent again after what it shows as under way has ended, and at the end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quickstep.engine.remote.messages import StatsNote, Stop
from quickstep.engine.remote.service import EngineService

DEADLINE_S = 30.0


class Engine:
    """Its only transfer of KV blocks, or its only save, ends right after its state was read."""

    is_moving_blocks = True

    def stats(self) -> Any:
        asyncio.get_running_loop().call_soon(setattr, self, "is_moving_blocks", False)
        return SimpleNamespace(busy_since_s=None, num_steps_in_flight=0)


def test_the_end_of_a_transfer_is_reported() -> None:
    async def run() -> list[Any]:
        sent: asyncio.Queue[Any] = asyncio.Queue()
        connection: Any = SimpleNamespace(sender=SimpleNamespace(put=sent.put_nowait))
        engine: Any = Engine()
        reports = asyncio.create_task(EngineService(connection)._send_stats(engine))
        notes = [await sent.get(), await sent.get()]
        reports.cancel()
        return notes

    notes = asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert [type(note) for note in notes] == [StatsNote, StatsNote]


@pytest.mark.parametrize("prefix", ["", "1/"])
def test_what_was_counted_up_to_a_stop_is_reported(prefix: str) -> None:
    """Also for one connection (with a prefix) of an engine that continues."""

    async def run() -> list[Any]:
        sent: list[Any] = []
        flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flushed.set_result(None)
        sender = SimpleNamespace(put=sent.append, flush=lambda: flushed)
        connection: Any = SimpleNamespace(sender=sender, close=lambda: sent.append("closed"))
        engine: Any = SimpleNamespace(stop=lambda: flushed, stats=lambda: "the last")
        service = EngineService(connection, engine=engine, prefix=prefix)
        service._receive(Stop())
        await asyncio.gather(*service._tasks)
        return sent

    *_, note, end = asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert (note.stats, end) == ("the last", "closed")
