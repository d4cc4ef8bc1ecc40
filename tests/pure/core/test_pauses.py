"""Paused requests: they get no rows, are preempted first, and lose no token."""

from __future__ import annotations

import math

import pytest
from scheduler_world import Setup, World, ask, finish

from quickstep.types import FinishReason, SequenceTimings, StepPlan

SMALL = Setup(num_blocks=6, block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def run_steps(world: World, count: int) -> list[StepPlan]:
    """Plan and commit; the plans."""
    plans = []
    for _ in range(count):
        plan = world.plan()
        if plan is not None:
            plans.append(plan)
            world.commit()
    return plans


def num_tokens(world: World, name: str) -> int:
    return len(world.received[name].token_ids)


def timings(world: World, name: str) -> SequenceTimings:
    found = world.received[name].timings
    assert found is not None
    return found


@DEPTHS
def test_a_paused_request_keeps_its_blocks_and_continues_where_it_stopped(depth: int) -> None:
    world = World(Setup(pipeline_depth=depth))
    world.add(ask("a", max_tokens=12))
    run_steps(world, 3)
    while world.plan() is not None:
        pass
    paused_at = world.now
    world.pause("a")
    while world.in_flight:
        world.commit()
    got, used = num_tokens(world, "a#0"), world.scheduler.stats().blocks.num_used
    assert world.plan() is None
    assert world.scheduler.has_work() and world.scheduler.is_held()
    assert world.scheduler.wakeup(world.now) is None
    stats = world.scheduler.stats()
    assert (stats.num_running, stats.num_paused, stats.totals.num_pauses) == (0, 1, 1)
    world.advance(7.0)
    resumed_at = world.now
    world.resume("a")
    assert not world.scheduler.is_held()
    plan = world.plan()
    assert plan is not None and not plan.admitted
    assert (num_tokens(world, "a#0"), stats.blocks.num_used) == (got, used)
    finish(world)
    assert timings(world, "a#0").num_preemptions == 0
    assert math.isclose(timings(world, "a#0").paused_s, resumed_at - paused_at)


def test_all_sequences_of_a_request_are_held_queued_ones_too() -> None:
    world = World(Setup(max_num_seqs=4))
    world.add(ask("wide", n=3, max_tokens=8))
    world.add(ask("other", n=2, max_tokens=8))
    run_steps(world, 2)
    world.pause("other")  # one of it runs, one waits
    assert world.scheduler.stats().num_paused == 2
    run_steps(world, 12)
    assert not world.active
    assert world.plan() is None
    world.resume("other")
    finish(world)


def test_who_waits_takes_the_slots_and_blocks_of_paused_sequences() -> None:
    world = World(SMALL)
    world.add(ask("a", max_tokens=9))
    world.add(ask("b", max_tokens=9))
    run_steps(world, 2)
    world.pause("b")
    world.add(ask("c", max_tokens=2))
    plan = world.plan()
    assert plan is not None and [one.sequence_id for one in plan.admitted] == ["c#0"]
    finish(world)
    assert timings(world, "b#0").num_preemptions == 1
    assert timings(world, "a#0").num_preemptions == 0


def test_a_paused_sequence_makes_way_before_lower_priorities_and_later_arrivals() -> None:
    world = World(Setup(num_blocks=9, block_size=4, max_num_seqs=3, max_num_batched_tokens=64))
    world.add(ask("paused", priority=-5, max_tokens=12))
    world.add(ask("first", max_tokens=12))
    world.add(ask("low", priority=5, max_tokens=12))
    run_steps(world, 2)
    world.pause("paused")
    run_steps(world, 20)
    assert not world.active
    assert timings(world, "low#0").num_preemptions == 0
    world.resume("paused")
    finish(world)
    assert timings(world, "paused#0").num_preemptions == 1


def test_what_makes_way_is_no_more_than_is_needed() -> None:
    world = World(Setup(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64))
    for name in "abcd":
        world.add(ask(name, max_tokens=20))
    run_steps(world, 2)
    for name in "bcd":
        world.pause(name)
    world.add(ask("new", max_tokens=2))
    run_steps(world, 1)
    assert world.scheduler.stats().totals.num_preemptions == 1
    finish(world)


def test_nobody_makes_way_for_what_would_not_fit_anyhow() -> None:
    setup = Setup(num_blocks=10, block_size=4, max_num_seqs=3, max_model_len=40)
    world = World(setup)
    world.add(ask("big", prompt=(0, 1) * 10, max_tokens=4))
    world.add(ask("idle", prompt=(1,), max_tokens=9))
    run_steps(world, 3)
    world.pause("idle")
    world.add(ask("huge", prompt=(1, 0) * 16, max_tokens=4))
    run_steps(world, 1)
    assert world.scheduler.stats().totals.num_preemptions == 0
    finish(world)


def test_deadline_and_abort_end_a_paused_request_and_free_it_at_once() -> None:
    world = World(Setup())
    world.add(ask("late", max_tokens=20, timeout_s=5.0))
    world.add(ask("gone", max_tokens=20))
    run_steps(world, 3)
    world.pause("late")
    world.pause("gone")
    assert world.scheduler.wakeup(world.now) == 5.0
    world.abort("gone")
    world.advance(5.0)
    world.expire()
    assert world.received["late#0"].reason is FinishReason.DEADLINE
    assert world.scheduler.stats().blocks.num_used == 0
    assert not world.scheduler.has_work()
    finish(world)


def test_pausing_is_idempotent_and_takes_any_id() -> None:
    world = World(Setup())
    world.pause("unknown")
    world.resume("unknown")
    world.add(ask("a"))
    world.pause("a")
    world.pause("a")
    assert world.plan() is None
    world.resume("a")
    world.resume("a")
    finish(world)
    assert world.scheduler.is_held()  # nothing is left to compute


def test_a_waiting_request_preempts_lower_priorities_and_no_other() -> None:
    world = World(SMALL)
    world.add(ask("batch", priority=9, max_tokens=9))
    world.add(ask("equal", max_tokens=9))
    run_steps(world, 2)
    world.add(ask("urgent", max_tokens=2))
    plan = world.plan()
    assert plan is not None and [one.sequence_id for one in plan.admitted] == ["urgent#0"]
    world.commit()
    world.add(ask("later", max_tokens=2))  # no sequence of a lower priority runs
    run_steps(world, 1)
    assert num_tokens(world, "later#0") == 0
    finish(world)
    assert timings(world, "batch#0").num_preemptions == 1
    assert timings(world, "equal#0").num_preemptions == 0


@DEPTHS
def test_a_priority_takes_the_place_of_a_sequence_whose_step_is_in_flight(depth: int) -> None:
    world = World(Setup(max_num_seqs=1, pipeline_depth=depth))
    world.add(ask("batch", priority=1, max_tokens=9))
    run_steps(world, 2)
    for _ in range(depth - 1):
        world.plan()
    world.add(ask("urgent", max_tokens=3))
    plan = world.plan()
    assert plan is not None and [one.sequence_id for one in plan.admitted] == ["urgent#0"]
    finish(world)
