"""The scheduler under any order of calls: a hypothesis state machine over the shadow executor.

Every call is followed by `check()`; at the end every sequence has the tokens that its
request gets at batch size 1. Derandomised, so that every run does the same; `random_runs` has more
random runs.
"""

from __future__ import annotations

from random import Random

import pytest
from example_counts import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from random_runs import (
    draw_crowded_setup,
    draw_setup,
    draw_trouble,
    random_request,
    random_run,
)
from scheduler_world import World

RNG = st.randoms(use_true_random=False)


class SchedulerMachine(RuleBasedStateMachine):
    """One world per run; the sizes are chosen first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0

    @initialize(rng=RNG)
    def open_world(self, rng: Random) -> None:
        self.world = World(draw_setup(rng))

    @rule(rng=RNG)
    def add(self, rng: Random) -> None:
        name = f"r{self.num_requests}"
        self.num_requests += 1
        self.world.add(random_request(rng, self.world.setup, name))

    @rule()
    def plan(self) -> None:
        self.world.plan()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def commit(self) -> None:
        self.world.commit()

    @precondition(lambda self: self.world.in_flight)
    @rule(rng=RNG)
    def commit_with_trouble(self, rng: Random) -> None:
        self.world.commit(*draw_trouble(rng, self.world.in_flight[0]))

    @precondition(lambda self: self.world.received)
    @rule(number=st.integers(0, 50), all_sequences=st.booleans())
    def abort(self, number: int, all_sequences: bool) -> None:
        every = list(self.world.received.values())
        one = every[number % len(every)]
        self.world.abort(one.request.request_id, None if all_sequences else one.index)

    @precondition(lambda self: self.world.received)
    @rule(number=st.integers(0, 50))
    def pause(self, number: int) -> None:
        every = list(self.world.received.values())
        self.world.pause(every[number % len(every)].request.request_id)

    @precondition(lambda self: self.world.paused)
    @rule(number=st.integers(0, 50))
    def resume(self, number: int) -> None:
        paused = sorted(self.world.paused)
        self.world.resume(paused[number % len(paused)])

    @rule()
    def expire(self) -> None:
        self.world.expire()

    @rule(seconds=st.sampled_from((0.0, 0.001, 0.05, 3600.0)))
    def jump(self, seconds: float) -> None:
        self.world.advance(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.world.verify()


SchedulerMachine.TestCase.settings = examples(100, stateful_step_count=50)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_crowded_steps_with_drafts_keep_their_limits() -> None:
    for seed in range(50):
        random_run(seed, draw=draw_crowded_setup)


def test_drafts_of_sound_rows_count_in_a_step_with_a_failed_row() -> None:
    random_run(623881708, num_calls=120, draw=draw_crowded_setup)


def test_no_blocks_are_kept_free_for_the_growth_of_paused_sequences() -> None:
    """Found by `make verify-long`: all that ran was paused, and a request that would fit waited."""
    random_run(276102468, num_calls=100)


@pytest.mark.parametrize("block", range(10))
def test_random_runs_end_as_every_request_would_alone(block: int) -> None:
    for seed in range(10_000 + 40 * block, 10_000 + 40 * (block + 1)):
        random_run(seed)


@pytest.mark.parametrize("block", range(2))
def test_sequences_never_wait_for_adapters_in_vain(block: int) -> None:
    """Adapters are pinned, retired and replaced, their loads fail, and all sequences end."""
    for seed in range(20_000 + 40 * block, 20_000 + 40 * (block + 1)):
        random_run(seed, has_adapters=True)


@pytest.mark.parametrize("block", range(2))
def test_resumed_requests_get_the_tokens_of_uninterrupted_ones(block: int) -> None:
    """Cut anywhere, with other requests around them, preempted, paused and failing."""
    for seed in range(30_000 + 40 * block, 30_000 + 40 * (block + 1)):
        random_run(seed, resumes=True)


@pytest.mark.parametrize("block", range(2))
def test_kv_blocks_that_come_back_have_the_content_of_their_tokens(block: int) -> None:
    """Saved while others take their places, restored, lost, never read before they are there."""
    num_restores = 0
    for seed in range(40_000 + 60 * block, 40_000 + 60 * (block + 1)):
        world = random_run(seed, has_adapters=seed % 4 == 3, resumes=seed % 4 == 2, stores=True)
        num_restores += 0 if world.stored is None else len(world.stored.restored)
    assert num_restores > 30
