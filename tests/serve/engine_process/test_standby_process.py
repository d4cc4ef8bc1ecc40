"""A process that waits for the next model of a server, with its imports done."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import scripted_worker
from remote_run import ask, is_alive, read, until

from quickstep.config import CacheConfig, EngineConfig, LoadConfig
from quickstep.engine.remote.child import StandbyProcess
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.types import Request, SamplingParams

FIVE = SamplingParams(max_tokens=5)


def standby_id(standby: StandbyProcess) -> int:
    launched = standby._launched
    return 0 if launched is None else launched.process.pid


def scripted(path: Path, standby: StandbyProcess) -> RemoteEngine:
    config = scripted_worker.config(path)
    return RemoteEngine(config, command=scripted_worker.command("serve"), standby=standby)


def test_what_wakes_takes_the_process_that_waits(tmp_path: Path) -> None:
    async def test() -> None:
        standby = StandbyProcess(scripted_worker.command("serve"))
        first, second = scripted(tmp_path, standby), scripted(tmp_path, standby)
        for engine in (first, second):
            await engine.open()
            await engine.start()
        answer = await read(ask(first, "abc", FIVE))
        assert not standby_id(standby)
        await first.sleep()
        waiting = standby_id(standby)
        assert is_alive(waiting)
        await second.sleep()
        assert standby_id(standby) == waiting  # one for all
        await second.wake()
        assert second.process_id == waiting
        await first.wake()
        assert first.process_id not in (0, waiting)
        for engine in (first, second):
            assert await read(ask(engine, "abc", FIVE)) == answer
            await engine.stop()
        standby.end()

    asyncio.run(test())


def test_one_that_has_ended_is_not_used(tmp_path: Path) -> None:
    async def test() -> None:
        standby = StandbyProcess(scripted_worker.command("serve"))
        engine = scripted(tmp_path, standby)
        await engine.open()
        await engine.start()
        await engine.sleep()
        lost = standby_id(standby)
        os.kill(lost, signal.SIGKILL)
        launched = standby._launched
        await until(lambda: launched is None or not launched.is_alive)
        await engine.wake()
        assert engine.process_id != lost
        assert await read(ask(engine, "abc", FIVE))
        await engine.sleep()
        waiting = standby_id(standby)
        standby.end()
        assert not is_alive(waiting)
        await engine.wake()
        await engine.sleep()
        assert not standby_id(standby)  # the server has ended
        await engine.stop()

    asyncio.run(test())


def test_a_model_that_wakes_so_gives_the_same_bits() -> None:
    """With the real worker, which waits for its first message after its imports."""

    async def test() -> None:
        standby = StandbyProcess()
        config = EngineConfig(
            load=LoadConfig("demo", num_threads=1),
            cache=CacheConfig(num_blocks=64),
            max_model_len=512,
        )
        engine = RemoteEngine(config, standby=standby)
        await engine.open()
        await engine.start()
        sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=4, logprobs=2)

        async def output() -> list[object]:
            stream = engine.stream(Request("", tuple(range(20, 60)), sampling))
            return [(delta.token_ids, delta.logprobs) async for delta in stream]

        expected = await output()
        await engine.sleep()
        waiting = standby_id(standby)
        await engine.wake()
        assert engine.process_id == waiting
        found = await output()
        await engine.stop()
        standby.end()
        assert _joined(found) == _joined(expected)

    def _joined(deltas: list[object]) -> list[object]:
        return [part for pair in deltas for part in zip(*pair, strict=True)]  # type: ignore[misc]

    asyncio.run(test())
