"""Many lines through few workers, each line patiently: what a batch does with its time.

`quickstep batch` and `/v1/batches` call `run_lines`; reading and writing files is theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec

from quickstep.errors import EngineDied, EngineError, RequestError
from quickstep.server.batches.lines import (
    BatchLine,
    Endpoint,
    LineAnswer,
    Submitter,
    answer_line,
    is_passing,
)
from quickstep.server.http.errors import GenerationFailed, error_of

__all__ = ["LineRunner", "LineSlots", "run_lines"]


class LineSlots:
    """How many lines the engine has at a time, of all batches; or one line and no other."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots = asyncio.Semaphore(num_slots)
        self._alone = asyncio.Lock()
        self._num_alone = 0  # lines that run alone or wait for it; the others then wait
        self._none_alone = asyncio.Event()
        self._none_alone.set()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """A slot beside other lines."""
        while True:
            await self._none_alone.wait()
            await self._slots.acquire()
            if not self._num_alone:
                break
            self._slots.release()
        try:
            yield
        finally:
            self._slots.release()

    @asynccontextmanager
    async def all(self) -> AsyncIterator[None]:
        """Every slot: no other line runs meanwhile."""
        self._num_alone += 1
        self._none_alone.clear()
        num_taken = 0
        try:
            async with self._alone:
                try:
                    while num_taken < self._num_slots:
                        await self._slots.acquire()
                        num_taken += 1
                    yield
                finally:
                    for _ in range(num_taken):
                        self._slots.release()
        finally:
            self._num_alone -= 1
            if not self._num_alone:
                self._none_alone.set()


class LineRunner(msgspec.Struct, frozen=True):
    """Answers one line, and tries again while the engine takes none.

    Attributes:
        slots: Where lines run. With it, a line that failed with a status of 5xx is sent once more,
            alone: the engine's process may have died under it, and by another line's fault; if by
            its own, it takes no other with it. None for an engine in this process.
        asked_by: Who asks.
        num_tries: How often a line is sent to an engine that takes none (it restarts, say).
        retry_s: The pause between two tries.
    """

    endpoints: Mapping[str, Endpoint]
    slots: LineSlots | None = None
    asked_by: Submitter = msgspec.field(default_factory=Submitter)
    num_tries: int = 1
    retry_s: float = 0.5

    async def answer(self, line: BatchLine) -> LineAnswer:
        """The line's answer. Raises EngineError when the last try has failed.

        A full queue empties, so that is waited for without an end.
        """
        if self.slots is None:
            return await self._sent(line)
        async with self.slots.one():
            answer = await self._sent(line)
        if answer.status >= 500:
            async with self.slots.all():
                answer = await self._sent(line)
        return answer

    async def _sent(self, line: BatchLine) -> LineAnswer:
        """The answer of an engine that took the line, or died with it."""
        num_failed = 0
        while True:
            try:
                return await answer_line(self.endpoints[line.url], line, self.asked_by)
            except RequestError as error:
                if not is_passing(error):
                    raise
            except EngineDied as error:
                status, refusal = error_of(GenerationFailed(str(error)))
                return LineAnswer(line.custom_id, status, refusal)
            except EngineError:
                num_failed += 1
                if num_failed >= self.num_tries:
                    raise
            await asyncio.sleep(self.retry_s)


async def run_lines(
    lines: AsyncIterator[BatchLine],
    answer: Callable[[BatchLine], Awaitable[LineAnswer]],
    write: Callable[[LineAnswer], Awaitable[None]],
    concurrency: int,
) -> None:
    """Answer every line, `concurrency` at a time, and write each answer as it comes.

    A cancellation, or an error of `lines`, `answer` or `write`, ends the lines that run; what was
    written by then is whole.
    """
    reading = asyncio.Lock()  # the workers share the iterator: every line goes to one of them

    async def next_line() -> BatchLine | None:
        async with reading:
            return await anext(lines, None)

    async def work() -> None:
        while (line := await next_line()) is not None:
            await write(await answer(line))

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
