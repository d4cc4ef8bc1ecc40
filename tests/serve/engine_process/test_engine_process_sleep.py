"""An engine in its own process that gives its memory back between requests."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from remote_run import QUICK, ask, is_alive, read, run, until

from quickstep.engine.remote.engine import RemoteEngine
from quickstep.engine.stats import EngineState
from quickstep.errors import EngineError
from quickstep.types import SamplingParams

FIVE = SamplingParams(max_tokens=5)


def test_an_engine_that_sleeps_has_no_process_and_wakes_with_the_same_bits(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        before, fingerprint = engine.process_id or 0, engine.fingerprint
        answer = await read(ask(engine, "abc", FIVE))
        await engine.sleep()
        assert not is_alive(before)
        stats = engine.stats()
        assert (stats.state, stats.failure, stats.num_restarts) == (EngineState.ASLEEP, "", 0)
        assert stats.scheduler.totals.num_steps == 5, "the last ones are in its last report"
        with pytest.raises(EngineError, match="asleep"):
            ask(engine, "abc", FIVE)
        await engine.wake()
        assert engine.stats().state is EngineState.RUNNING
        assert engine.stats().num_restarts == 0
        assert engine.fingerprint == fingerprint
        assert await read(ask(engine, "abc", FIVE)) == answer
        await until(lambda: engine.stats().scheduler.totals.num_steps == 10)  # those before, too

    run(tmp_path, test)


def test_an_engine_may_sleep_again_and_be_killed_after_it_was_woken(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        for _ in range(2):
            await engine.sleep()
            await engine.wake()
        os.kill(engine.process_id or 0, signal.SIGKILL)
        await until(lambda: engine.stats().num_restarts == 1)
        assert await read(ask(engine, "abc", FIVE))

    run(tmp_path, test)


def test_an_engine_that_does_not_run_cannot_sleep_and_one_that_runs_cannot_wake(
    tmp_path: Path,
) -> None:
    async def test(engine: RemoteEngine) -> None:
        with pytest.raises(EngineError, match="running, it cannot be woken"):
            await engine.wake()
        await engine.sleep()
        with pytest.raises(EngineError, match="asleep, it cannot be put to sleep"):
            await engine.sleep()
        with pytest.raises(EngineError, match="asleep, it cannot be restarted"):
            await engine.restart()
        await engine.wake()

    run(tmp_path, test)


def test_an_engine_that_sleeps_can_be_stopped(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        await engine.sleep()
        await engine.stop()
        assert engine.stats().state is EngineState.STOPPED

    run(tmp_path, test)


def test_a_stop_while_the_engine_wakes_leaves_no_process(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        await engine.sleep()
        waking = asyncio.create_task(engine.wake())
        await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineError, match="stop"):
            await waking
        assert engine.process_id is None

    run(tmp_path, test)


def test_deaths_between_answers_and_sleeps_do_not_add_up(tmp_path: Path) -> None:
    """A model that others take turns with is ended in order more often than it dies."""

    async def test(engine: RemoteEngine) -> None:
        for number in range((QUICK.max_quick_deaths or 0) + 2):
            os.kill(engine.process_id or 0, signal.SIGKILL)  # before it has answered
            await until(lambda least=number: engine.stats().num_restarts > least)
            assert await read(ask(engine, "abc", FIVE))
            await engine.sleep()
            await engine.wake()
        assert engine.stats().state is EngineState.RUNNING

    run(tmp_path, test)
