"""Prefixes that clients said they would continue soon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.types import Request, RowOutput, SamplingParams, SequenceTimings, StepResult

BLOCK = 4
NUM_OUTPUTS = 5


class Driver:
    """A scheduler that runs one request after the other; each step samples the token 7."""

    def __init__(self, num_blocks: int, max_num_seqs: int = 4) -> None:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=400)
        self.pool = KVBlockPool(num_blocks, BLOCK)
        self.scheduler = Scheduler(config, self.pool, make_policy(config), LinearCostModel())
        self.now = 0.0
        self._num = 0

    def run(self, prompt: tuple[int, ...], tenant: str = "", retain_s: float = 0.0) -> int:
        """How many tokens of a prompt were cached."""
        self._num += 1
        sampling = SamplingParams(max_tokens=NUM_OUTPUTS, ignore_eos=True)
        request = Request(f"r{self._num}", prompt, sampling, tenant=tenant, retain_s=retain_s)
        self.scheduler.add(request, self.now)
        ended: list[SequenceTimings] = []
        while (plan := self.scheduler.plan(self.now)) is not None:
            outputs = tuple(RowOutput((7,) if row.emits else ()) for row in plan.rows)
            self.now += 0.01
            result = StepResult(plan.step_id, outputs, 0.01)
            outcome = self.scheduler.commit(plan, result, self.now)
            ended += [out.timings for out in outcome.outputs if out.timings is not None]
            self.scheduler.check()
        (timings,) = ended
        return timings.num_cached_tokens


def new_prompts(num_tokens: int) -> Iterator[tuple[int, ...]]:
    """Prompts that have nothing in common."""
    start = 1000
    while True:
        yield tuple(range(start, start + num_tokens))
        start += num_tokens


def conversation(num_turns: int, retain_s: float) -> tuple[int, int]:
    """Cached and all tokens of a conversation whose client pauses for a minute after each turn,
    in which others send prompts that are larger than the pool together.
    """
    driver, others = Driver(num_blocks=200), new_prompts(61)
    prompt, num_cached, num_tokens = tuple(range(40)), 0, 0
    for turn in range(num_turns):
        num_cached += driver.run(prompt, "agent", retain_s)
        num_tokens += len(prompt)
        prompt = (*prompt, *[7] * NUM_OUTPUTS, turn)
        for _ in range(15):
            driver.now += 4.0
            driver.run(next(others), "others")
    return num_cached, num_tokens


def test_a_conversation_of_40_turns_keeps_its_prefix() -> None:
    """With plain LRU it is computed again in every turn."""
    num_cached, num_tokens = conversation(40, retain_s=0.0)
    assert num_cached == 0
    num_cached, num_tokens = conversation(40, retain_s=120.0)
    assert num_cached > 0.9 * num_tokens


def test_what_is_retained_makes_room_for_a_sequence_that_needs_it() -> None:
    driver = Driver(num_blocks=24)
    assert driver.run(tuple(range(40)), retain_s=1e6) == 0
    assert len(driver.pool.retained) == 11
    driver.run(tuple(range(100, 190)))
    assert len(driver.pool.retained) < 11, "nothing is pinned"
    cached = driver.run(tuple(range(40)))
    assert cached == 0 or cached % BLOCK == 0
    assert driver.scheduler.stats().blocks.num_used == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    driver = Driver(num_blocks=24)
    driver.run(tuple(range(40)), retain_s=1e6)
    driver.run(tuple(range(100, 163)))  # 17 blocks with its outputs
    assert driver.run(tuple(range(40))) == 7 * BLOCK


def test_what_was_not_continued_in_time_is_evicted_first() -> None:
    driver = Driver(num_blocks=48)
    first, second = tuple(range(40)), tuple(range(100, 140))
    driver.run(first, retain_s=1.0)
    driver.run(second)
    driver.now += 5.0
    driver.run(tuple(range(200, 280)))  # 22 blocks: those that are free, and some of `first`
    driver.run(tuple(range(300, 325)))
    assert driver.run(second) == 36, "all full blocks before its last token"
    assert driver.run(first) < 36


def test_each_account_retains_its_share() -> None:
    driver, prompts = Driver(num_blocks=90), new_prompts(40)
    for _ in range(8):
        driver.run(next(prompts), "greedy", retain_s=1e6)
    num_greedy = len(driver.pool.retained)
    assert num_greedy <= 45 * 8 / 9 + 1, "a part is for others"
    modest = next(prompts)
    driver.run(modest, "modest", retain_s=1e6)
    assert len(driver.pool.retained) > num_greedy


def test_a_longer_wait_replaces_a_shorter_one() -> None:
    driver = Driver(num_blocks=48)
    prompt = tuple(range(40))
    driver.run(prompt, retain_s=1.0)
    driver.run(prompt, retain_s=100.0)
    driver.now += 10.0
    driver.run(tuple(range(100, 140)))
    assert len(driver.pool.retained) == 11


@pytest.mark.parametrize("retain_s", [0.0, 30.0])
def test_a_reset_frees_what_is_retained(retain_s: float) -> None:
    driver = Driver(num_blocks=24)
    driver.run(tuple(range(40)), retain_s=retain_s)
    assert driver.scheduler.reset_prefix_cache() == 11
    driver.scheduler.check()
    assert driver.run(tuple(range(40))) == 0
