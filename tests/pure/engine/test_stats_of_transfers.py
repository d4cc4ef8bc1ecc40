"""The engine's state is sent again after what it shows as under way has ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from quickstep.engine.remote.messages import StatsNote
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
