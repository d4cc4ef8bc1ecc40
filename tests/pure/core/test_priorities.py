"""Priorities with age: which sequence is first, which may be preempted; none waits for ever."""

from __future__ import annotations

from random import Random

import pytest
from scheduler_world import Setup, World, ask, finish

from quickstep.config import SchedulerConfig
from quickstep.errors import ConfigError
from quickstep.types import StepPlan

AGING_S = 0.5
NARROW = Setup(max_num_seqs=2, num_blocks=10, block_size=2, priority_aging_s=0.1)


def admitted(plan: StepPlan | None) -> list[str]:
    return [one.sequence_id for one in plan.admitted] if plan else []


def step(world: World) -> list[str]:
    names = admitted(world.plan())
    if world.in_flight:
        world.commit()
    return names


def flood(world: World, rng: Random, number: int) -> None:
    """Two requests of a higher priority at every step: more than the world can compute."""
    for index in range(2):
        prompt = tuple(rng.choice((0, 1)) for _ in range(rng.randint(1, 8)))
        name = f"flood-{number}-{index}"
        world.add(ask(name, prompt=prompt, max_tokens=rng.randint(1, 6), priority=-1))


@pytest.mark.parametrize("runs_first", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_flow_of_higher_priorities_does_not_starve_a_lower_one(
    seed: int, runs_first: bool
) -> None:
    rng, world = Random(seed), World(NARROW)
    if runs_first:
        world.add(ask("victim", max_tokens=8))
        step(world)
    else:
        flood(world, rng, -1)
        world.add(ask("victim", max_tokens=8))
    number = 0
    while world.received["victim#0"].reason is None and number < 200:
        flood(world, rng, number)
        step(world)
        number += 1
    victim = world.received["victim#0"]
    assert victim.reason is not None, f"{len(victim.token_ids)} tokens after {number} steps"
    assert len(world.live) > 100  # the flow was wider than the machine


@pytest.mark.parametrize("seed", range(10))
def test_sequences_are_admitted_in_the_order_of_their_aged_priority(seed: int) -> None:
    rng = Random(seed)
    world = World(Setup(max_num_seqs=1, num_blocks=30, priority_aging_s=AGING_S))
    orders: dict[str, tuple[float, int]] = {}
    waiting: set[str] = set()
    for number in range(60):
        if rng.random() < 0.5:
            priority = rng.randint(-2, 2)
            world.add(ask(f"r{number}", max_tokens=rng.randint(1, 3), priority=priority))
            waiting.add(f"r{number}#0")
            orders[f"r{number}#0"] = (world.now + priority * AGING_S, number)
        num_preempted = world.scheduler.stats().totals.num_preemptions
        for name in step(world):
            if world.scheduler.stats().totals.num_preemptions == num_preempted:
                assert orders[name] == min(orders[one] for one in waiting | {name})
            waiting.discard(name)
        world.advance(rng.choice((0.0, 0.1, 0.4)))
    finish(world)


def test_an_aged_sequence_is_admitted_first_and_preempts_nobody_of_a_higher_priority() -> None:
    world = World(Setup(max_num_seqs=1, priority_aging_s=AGING_S))
    world.add(ask("old", priority=1, max_tokens=2))
    world.advance(2 * AGING_S)
    world.add(ask("running", max_tokens=6))
    assert step(world) == ["old#0"]
    world.add(ask("old-too", priority=1, max_tokens=2))
    world.drain()
    timings = world.received["running#0"].timings
    assert timings is not None and timings.num_preemptions == 0
    world.verify()


def test_a_sequence_that_runs_is_not_preempted_by_a_priority_that_its_age_makes_up_for() -> None:
    world = World(Setup(max_num_seqs=1, priority_aging_s=AGING_S, max_model_len=64))
    world.add(ask("old", priority=1, max_tokens=20))
    assert step(world) == ["old#0"]
    world.advance(0.9 * AGING_S)
    world.add(ask("urgent", max_tokens=2))
    assert step(world) == ["urgent#0"]
    while not world.received["urgent#0"].reason:
        step(world)
    world.advance(AGING_S)
    step(world)
    world.add(ask("late", max_tokens=2))
    assert step(world) == []
    finish(world)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_aging_time_that_orders_nothing_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--priority-aging-s"):
        SchedulerConfig(priority_aging_s=seconds)
