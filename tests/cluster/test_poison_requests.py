"""Requests that end the engines which compute them, among others that must not end with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import scripted_worker
from remote_run import DEADLINE_S, QUICK

from quickstep.cluster.replicas import ReplicaSet
from quickstep.config import ReplicaConfig, RouterName
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.types import FinishReason, Request, SamplingParams

CAUSE = tuple(b"x")
Ends = list[tuple[FinishReason, str, int]]  # with errors and numbers of tokens


def run(path: Path, test: Callable[[ReplicaSet], Awaitable[None]], num_replicas: int) -> None:
    def make(number: int, step_log: StepLog, watcher: ReplicaSet) -> RemoteEngine:
        return RemoteEngine(
            scripted_worker.config(path, max_num_seqs=32),
            command=scripted_worker.command("poison"),
            restart_limits=QUICK,
            watcher=watcher,
            replica=number,
            step_log=step_log,
        )

    async def main() -> None:
        replicas = ReplicaSet(ReplicaConfig(num_replicas, RouterName.FEWEST_REQUESTS), make, seed=0)
        await replicas.open()
        await replicas.start()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(replicas)
        finally:
            await replicas.stop()
        assert not replicas.request_ids

    asyncio.run(main())


async def ends(replicas: ReplicaSet, name: str, prompt: tuple[int, ...], num_tokens: int) -> Ends:
    """How the sequences of a request end."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    num, found = 0, []
    async with replicas.stream(Request(name, prompt, sampling)) as stream:
        async for delta in stream:
            num += len(delta.token_ids)
            if delta.finish_reason is not None:
                found.append((delta.finish_reason, delta.error, num))
    return found


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_request_that_ends_two_engines_is_ended_and_no_other(
    num_replicas: int, tmp_path: Path
) -> None:
    async def test(replicas: ReplicaSet) -> None:
        others = [
            asyncio.create_task(ends(replicas, f"other{number}", tuple(b"abc"), 200))
            for number in range(12)
        ]
        await asyncio.sleep(0.1)
        ((reason, error, num_tokens),) = await ends(replicas, "cause", CAUSE, 20)
        assert (reason, num_tokens) == (FinishReason.ERROR, 0)
        # the second engine may have begun others in the same step; then each was tried by itself
        assert error.partition("engine processes ended in a row")[0] in ("2 ", "3 ")
        for found in await asyncio.gather(*others):
            assert found == [(FinishReason.MAX_TOKENS, "", 200)]

    run(tmp_path, test, num_replicas)


@pytest.mark.parametrize(("num_replicas", "num_causes"), [(1, 5), (2, 3)])
def test_of_several_each_is_found(num_replicas: int, num_causes: int, tmp_path: Path) -> None:
    """They end more processes in a row than an engine may lose by itself."""

    async def test(replicas: ReplicaSet) -> None:
        causes = [
            asyncio.create_task(ends(replicas, f"c{n}", CAUSE, 20)) for n in range(num_causes)
        ]
        others = [
            asyncio.create_task(ends(replicas, f"other{n}", tuple(b"abc"), 150)) for n in range(6)
        ]
        for (end,) in await asyncio.gather(*causes):
            assert end[0] is FinishReason.ERROR
        for found in await asyncio.gather(*others):
            assert found == [(FinishReason.MAX_TOKENS, "", 150)]

    run(tmp_path, test, num_replicas)
