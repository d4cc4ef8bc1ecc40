"""Background tasks: they live until their end, and what they raise is reported once."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import pytest

from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.errors import EngineError

LOGGER = logging.getLogger("tasks")


async def failing(error: Exception, since: asyncio.Event | None = None) -> None:
    if since is not None:
        await since.wait()
    raise error


def test_what_a_task_raises_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        tasks = OwnedTasks(LOGGER)
        tasks.start(failing(EngineError("no engine")), "first")
        tasks.start(failing(ValueError("a bug")), "second")
        while len(tasks):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        "first: no engine",
        "second failed",
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [False, True]


@pytest.mark.parametrize("leaves", [False, True])
def test_what_work_raises_is_its_callers_or_in_the_log(
    leaves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        tasks, since = OwnedTasks(LOGGER), asyncio.Event()
        calling = asyncio.create_task(tasks.finish(failing(EngineError("late"), since), "work"))
        await asyncio.sleep(0)
        if leaves:
            calling.cancel()
            with suppress(asyncio.CancelledError):
                await calling
            assert len(tasks) == 1, "it continues"
        since.set()
        if not leaves:
            with pytest.raises(EngineError, match="late"):
                await calling
        while len(tasks):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == ["work: late"] * leaves


def test_the_end_of_an_owner_is_the_end_of_its_tasks(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        tasks = OwnedTasks(LOGGER)
        task = tasks.start(asyncio.sleep(1000))
        await tasks.end()
        assert task.cancelled() and not len(tasks)

    asyncio.run(run())
    assert not caplog.records
