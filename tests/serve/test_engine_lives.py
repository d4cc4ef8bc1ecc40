"""Some lives of live engines; `make verify-long` has more, with fresh seeds."""

from __future__ import annotations

import asyncio

import pytest
from engine_lives import Life, Plain, one_life


async def lived(seeds: list[int]) -> list[Life]:
    plain = Plain()
    await plain.start()
    lives = [await one_life(seed, plain, num_requests=12) for seed in seeds]
    await plain.engine.stop()
    return lives


# of these engines, the last is in a process of its own
@pytest.mark.parametrize("seeds", [[5, 28]])
def test_nothing_waits_for_ever_and_every_answer_is_right(seeds: list[int]) -> None:
    lives = asyncio.run(lived(seeds))
    assert [life.faults for life in lives] == [[] for _ in seeds]
    assert sum(life.num_answers for life in lives) > 16
    assert lives[-1].num_kills
