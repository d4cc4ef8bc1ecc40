"""Calls into an event loop of another thread: every one ends, however the loop does."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from quickstep.engine.loop_thread import LoopThread
from quickstep.errors import EngineError

DEADLINE_S = 60


def in_thread(call: Any, *args: Any) -> Future[Any]:
    """Run `call` in a thread that cannot keep the tests from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


async def give(value: object) -> object:
    return value


class Answer:
    """A coroutine that ends once it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = asyncio.Event()

    async def __call__(self) -> str:
        self.begun.set()
        await self.let_go.wait()
        return "the answer"


@pytest.mark.parametrize("num_turns", range(5))
def test_a_call_that_ends_as_the_loop_does_has_its_result(num_turns: int) -> None:
    answer = Answer()

    async def end() -> None:
        answer.let_go.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)

    thread = LoopThread("test", end)
    thread.start()
    waiting = in_thread(thread.call, answer())
    assert answer.begun.wait(DEADLINE_S)
    in_thread(thread.close).result(DEADLINE_S)
    assert waiting.result(DEADLINE_S) == "the answer"


def test_calls_of_many_threads_end_while_the_loop_does() -> None:
    for _ in range(20):
        thread = LoopThread("test", lambda: asyncio.sleep(0))
        thread.start()
        waiting = [in_thread(thread.call, give(1)) for _ in range(8)]
        in_thread(thread.close).result(DEADLINE_S)
        for call in waiting:
            error = call.exception(DEADLINE_S)
            assert isinstance(error, EngineError) if error else call.result() == 1


def test_a_call_that_nothing_ends_is_refused_when_the_loop_ends() -> None:
    async def broken() -> None:
        raise ValueError("planted")

    answer = Answer()
    thread = LoopThread("test", broken)
    thread.start()
    waiting = in_thread(thread.call, answer())
    assert answer.begun.wait(DEADLINE_S)
    with pytest.raises(ValueError, match="planted"):
        in_thread(thread.close).result(DEADLINE_S)
    with pytest.raises(EngineError, match="closed"):
        waiting.result(DEADLINE_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_breaks_answers_all_who_wait_and_takes_no_more() -> None:
    async def exit() -> None:
        raise SystemExit(3)

    answer = Answer()
    thread = LoopThread("test", lambda: asyncio.sleep(0))
    thread.start()
    waiting = in_thread(thread.call, answer())
    assert answer.begun.wait(DEADLINE_S)
    assert isinstance(
        in_thread(thread.call, exit()).exception(DEADLINE_S), (EngineError, SystemExit)
    )
    with pytest.raises(EngineError, match="closed"):
        waiting.result(DEADLINE_S)
    with pytest.raises(EngineError, match="closed"):
        in_thread(thread.call, give(1)).result(DEADLINE_S)
    in_thread(thread.close)


def test_closing_twice_or_from_the_loops_own_thread_is_fine() -> None:
    thread = LoopThread("test", lambda: asyncio.sleep(0))
    thread.start()

    async def close() -> None:
        thread.close()

    thread.call(close())
    in_thread(thread.close).result(DEADLINE_S)
    in_thread(thread.close).result(DEADLINE_S)
    with pytest.raises(EngineError, match="closed"):
        in_thread(thread.call, give(1)).result(DEADLINE_S)
