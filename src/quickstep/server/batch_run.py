"""Many lines through few workers, each line patiently: what a batch does with its time.

`quickstep batch` and `/v1/batches` call `run_lines`; reading and writing files is theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import field

from quickstep.dataclass import dataclass
from quickstep.errors import EngineError, RequestError
from quickstep.server.batch_lines import (
    AskedBy,
    BatchLine,
    Endpoint,
    LineAnswer,
    answer_line,
    is_passing,
)

__all__ = ["LineRunner", "run_lines"]


@dataclass(frozen=True, slots=True)
class LineRunner:
    """Answers one line, and tries again while the engine takes none.

    Attributes:
        asked_by: Who asks.
        num_tries: How often a line is sent to an engine that takes none (it restarts, say).
        num_repeats: How often a line is sent again that failed through no fault of its own: the
            engine's process may have died under it.
        retry_s: The pause between two tries.
    """

    endpoints: Mapping[str, Endpoint]
    asked_by: AskedBy = field(default_factory=AskedBy)
    num_tries: int = 1
    num_repeats: int = 0
    retry_s: float = 0.5

    async def answer(self, line: BatchLine) -> LineAnswer:
        """The line's answer. Raises EngineError when the last try has failed.

        A full queue empties, so that is waited for without an end.
        """
        num_failed = num_repeated = 0
        while True:
            try:
                answer = await answer_line(self.endpoints[line.url], line, self.asked_by)
                if answer.status < 500 or num_repeated == self.num_repeats:
                    return answer
                num_repeated += 1
            except RequestError as error:
                if not is_passing(error):
                    raise
            except EngineError:
                num_failed += 1
                if num_failed >= self.num_tries:
                    raise
            await asyncio.sleep(self.retry_s)


async def run_lines(
    lines: Iterator[BatchLine],
    answer: Callable[[BatchLine], Awaitable[LineAnswer]],
    write: Callable[[LineAnswer], None],
    concurrency: int,
) -> None:
    """Answer every line, `concurrency` at a time, and write each answer as it comes.

    A cancellation, or an error of `lines`, `answer` or `write`, ends the lines that run; what was
    written by then is whole.
    """

    async def work() -> None:
        for line in lines:  # the workers share the iterator: every line goes to one of them
            write(await answer(line))

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
