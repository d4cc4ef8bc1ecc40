"""An event loop on a thread of its own, and calls into it from other threads.

Owned by `engine.llm.LLM`. Every call ends: one that runs when the loop ends returns its result if
it ends in time, else raises EngineError; no caller waits for a loop that does not run any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from quickstep.errors import EngineError

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for other threads. `start` it, `call` it from any thread, `close` it.

    `end` is awaited in the loop by `close`: it makes the coroutines that still run end.
    """

    def __init__(self, name: str, end: Callable[[], Awaitable[None]]) -> None:
        self._end = end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()  # set in the loop
        self._failure: BaseException | None = None  # what `end` raised
        self._lock = threading.Lock()  # of the two below: no call begins once the thread has ended
        self._is_closed = False
        self._waiting: set[Future[Any]] = set()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; returns when its loop accepts calls. Raises the error if it ended."""
        self._thread.start()
        self._begun.wait()
        if self._loop is None and self._failure is not None:
            raise self._failure

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the loop and wait for its result.

        Raises:
            EngineError: The loop has ended, or ended before the coroutine did.
        """
        with self._lock:
            if self._is_closed or self._loop is None:
                coroutine.close()
                raise EngineError("this LLM is closed; make a new one")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._waiting.add(future)
        try:
            return future.result()
        except CancelledError:
            raise EngineError("this LLM was closed before the answer was there") from None
        finally:
            future.cancel()
            with self._lock:
                self._waiting.discard(future)

    def close(self) -> None:
        """Accept no more calls, await `end` and the coroutines, end the thread. Idempotent.

        In the loop's own thread (the garbage collector may call it there) it does not wait.
        """
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed and self._loop is not None:
                self._loop.call_soon_threadsafe(self._closing.set)
        if threading.current_thread() is self._thread:
            return
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        try:
            # At its end the runner cancels what still runs, and runs the callbacks that are ready:
            # one of them may hand a result to a thread that waits for it.
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                self._begun.set()
                try:
                    runner.run(self._until_closed())
                finally:
                    with self._lock:
                        self._is_closed = True
        except BaseException as error:  # for `close` to raise
            self._failure = error
        finally:
            self._begun.set()
            self._fail_waiting()

    async def _until_closed(self) -> None:
        await self._closing.wait()
        await self._end()
        # the coroutines return the output so far
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*waiting, return_exceptions=True)

    def _fail_waiting(self) -> None:
        """The loop has ended: fail the calls that it has not resolved."""
        with self._lock:
            for future in self._waiting:
                with suppress(InvalidStateError):  # it has its result, or was cancelled
                    future.set_exception(EngineError("this LLM was closed while it answered"))
