"""Some runs of live engines; `make verify-long` has more, with fresh seeds."""

from __future__ import annotations

import asyncio

import pytest
from random_engine_runs import EngineRun, Plain, one_run


async def lived(seeds: list[int]) -> list[EngineRun]:
    plain = Plain()
    await plain.start()
    runs = [await one_run(seed, plain, num_requests=12) for seed in seeds]
    await plain.engine.stop()
    return runs


# of these engines, the last is in a process of its own
@pytest.mark.parametrize("seeds", [[5, 28]])
def test_nothing_waits_for_ever_and_every_answer_is_right(seeds: list[int]) -> None:
    runs = asyncio.run(lived(seeds))
    assert [run.faults for run in runs] == [[] for _ in seeds]
    assert sum(run.num_answers for run in runs) > 16
    assert runs[-1].num_kills
