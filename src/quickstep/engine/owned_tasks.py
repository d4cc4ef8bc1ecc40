"""`OwnedTasks`: the background tasks of one object, which nothing awaits one by one.

asyncio keeps a task only while something refers to it, and reports an exception that nothing has
retrieved when the task is collected, if ever. Here a task is kept until it ends, and its exception
is in the log at that moment, once (`tests/pure/project/test_owners_of_tasks.py` finds other tasks).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from quickstep.errors import QuickstepError

_Result = TypeVar("_Result")


class OwnedTasks:
    """Tasks of one owner in one event loop. The owner calls `cancel` or `end` when it ends."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self, work: Coroutine[Any, Any, _Result], name: str | None = None
    ) -> asyncio.Task[_Result]:
        """Run `work`; an exception of it goes to the log."""
        task = self._kept(work, name)
        task.add_done_callback(self._report)
        return task

    async def finish(self, work: Coroutine[Any, Any, _Result], name: str | None = None) -> _Result:
        """The result of `work`, which continues if the caller is cancelled; an exception is the
        caller's, and goes to the log without one.
        """
        task = self._kept(work, name)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.add_done_callback(self._report)
            raise
        return task.result()

    def cancel(self) -> None:
        """Cancel all."""
        for task in self._tasks:
            task.cancel()

    async def end(self) -> None:
        """Cancel all, and wait for their ends."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _kept(self, work: Coroutine[Any, Any, _Result], name: str | None) -> asyncio.Task[_Result]:
        task = asyncio.create_task(work, name=name or getattr(work, "__qualname__", None))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _report(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, QuickstepError):  # its sentence says all
            self._logger.error("%s: %s", task.get_name(), error)
        elif error is not None:
            self._logger.error("%s failed", task.get_name(), exc_info=error)
