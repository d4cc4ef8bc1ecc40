"""Every second is counted once, and a step's record names the prefill that it did."""

from __future__ import annotations

import math

import pytest
from random_runs import random_run
from scheduler_world import PROMPT, Setup, World, ask, finish

from quickstep.core.accounting import (
    AdapterStats,
    KVTierStats,
    SchedulerStats,
    Totals,
    UnitTicks,
    added,
    counts,
)
from quickstep.core.cost_model import StepLoad, UnitPrices
from quickstep.core.resources.block_pool import PoolStats
from quickstep.core.sequence import TICKS_PER_S
from quickstep.types import Activity


@pytest.mark.parametrize("seed", range(900, 940))
def test_seconds_add_up_in_any_life(seed: int) -> None:
    """`World.verify`, at the end of each life, has the sums."""
    random_run(seed)


def test_counts_of_a_process_that_ended_are_added_to_what_the_next_one_has() -> None:
    """Blocks, queues and adapters are those of the process that runs."""
    before = SchedulerStats(
        *(1, 2, 3, 4),
        blocks=PoolStats(5, 6, 7, num_hits=8, num_evictions=9),
        totals=Totals(num_steps=10, idle_s=11.0),
        adapters=AdapterStats(12, 13, 14, num_loads=15, num_evictions=16, running=("a",)),
        kv_tier=KVTierStats(17, 18, num_saved=19, num_restored=20, num_lost=21, num_saving=1),
    )
    now = SchedulerStats(*(5, 6, 7, 8), blocks=PoolStats(9, 8, 7, 6, 5), totals=Totals(num_steps=4))
    assert added([now, counts(before)]) == SchedulerStats(
        *(5, 6, 7, 8),
        blocks=PoolStats(9, 8, 7, 6 + 8, 5 + 9),
        totals=Totals(num_steps=4 + 10, idle_s=11.0),
        adapters=AdapterStats(num_loads=15, num_evictions=16),
        kv_tier=KVTierStats(num_saved=19, num_restored=20, num_lost=21),
    )
    assert added([before, counts(before, -1)]).totals == Totals()


def preempted_world() -> World:
    world = World(Setup(num_blocks=6, max_num_seqs=2, prefix_caching=False))
    world.add(ask("a", PROMPT, 12, priority=1))
    for _ in range(6):
        world.plan()
        world.commit()
    world.add(ask("b", tuple(reversed(PROMPT)), 12))
    finish(world)
    return world


def test_rejected_drafts_have_their_part_of_each_step() -> None:
    world = World(Setup(max_drafts=3, prefix_caching=False, pipeline_depth=1, max_num_seqs=1))
    world.add(ask("a", PROMPT, 20))
    finish(world)
    rejected_s = [
        record.seconds * (record.num_drafts - record.num_accepted) / (1 + record.num_drafts)
        for record in world.records
    ]
    totals, timings = world.scheduler.stats().totals, world.received["a#0"].timings
    assert timings is not None
    assert totals.num_drafts > totals.num_accepted
    assert timings.rejected_s == pytest.approx(sum(rejected_s))
    assert totals.rejected_s == pytest.approx(sum(rejected_s))


@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_an_aborted_sequence_is_charged_what_it_has_used(num_steps: int) -> None:
    """Its prompt, and each decode step that was committed."""
    world = World(Setup(max_num_seqs=2, prefix_caching=False))
    world.add(ask("a", PROMPT, 12))
    for _ in range(num_steps):
        world.plan()
        world.commit()
    (output,) = world.scheduler.abort("a", world.now)
    assert output.timings is not None
    busy_s = sum(record.seconds for record in world.records)
    assert output.timings.device_s == pytest.approx(busy_s, rel=1e-9)
    assert busy_s > 0.0


def test_what_is_computed_again_after_a_preemption_is_not_the_sequences_own_time() -> None:
    world = preempted_world()
    one, other = (world.received[name].timings for name in ("a#0", "b#0"))
    assert one is not None and other is not None
    assert one.num_preemptions > 0
    assert one.recomputed_s > 0.0
    assert other.recomputed_s == 0.0
    totals = world.scheduler.stats().totals
    assert totals.recomputed_s == pytest.approx(one.recomputed_s)
    assert math.isclose(totals.attributed_s, one.device_s + other.device_s, rel_tol=1e-9)


def test_charges_are_whole_numbers_that_add_up_in_any_order() -> None:
    prices = UnitPrices(token=1e-4, row=3e-5, kv_token=7e-8, pair=1e-8, logits_row=2e-6)
    rows = [StepLoad.of_span(start, 1, num_logits_rows=1) for start in (7, 900, 31)]
    rows.append(StepLoad.of_span(0, 250))
    step = sum(rows, StepLoad())
    ticks = UnitTicks.divide(0.0123, prices, step)
    charges = ticks.of_rows(rows, step)
    assert charges == [ticks.of(row) for row in rows]
    assert sum(charges) == ticks.of(step)
    assert sum(charges) / TICKS_PER_S == pytest.approx(0.0123, rel=1e-12)
    assert charges[1] / charges[0] == pytest.approx(prices.of(rows[1]) / prices.of(rows[0]))
    context = rows[1].num_kv_tokens
    assert charges[1] == ticks.decode_row + context * ticks.decode_context


def test_without_prices_tokens_divide_the_seconds() -> None:
    rows = [StepLoad.of_span(0, num_tokens) for num_tokens in (1, 3)]
    step = sum(rows, StepLoad())
    charges = UnitTicks.divide(1.0, UnitPrices(), step).of_rows(rows, step)
    assert [charge / TICKS_PER_S for charge in charges] == [0.25, 0.75]


def test_idle_time_is_what_no_step_filled() -> None:
    world = World(Setup())
    world.add(ask("a", max_tokens=2))
    world.plan()
    world.commit()
    world.advance(5.0)
    finish(world)
    assert world.scheduler.stats().totals.idle_s == pytest.approx(5.0)


def test_a_record_has_each_prefill_of_its_step() -> None:
    world = World(Setup(max_num_batched_tokens=32))
    world.add(ask("a", max_tokens=4))
    world.plan()
    world.commit()
    world.add(ask("b", PROMPT[:3], max_tokens=1))
    finish(world)
    first, second, *others = world.records
    assert [(one.request_id, one.num_tokens) for one in first.prefills] == [("a", len(PROMPT))]
    assert first.prefill_s == pytest.approx(first.seconds)
    (prefill,) = second.prefills
    assert prefill.request_id == "b"
    assert 0.0 < prefill.seconds == second.prefill_s < second.seconds
    assert second.decode_s == pytest.approx(second.seconds - second.prefill_s)
    assert not any(one.prefills for one in others)


def test_activities_are_in_order_and_end_with_the_sequence() -> None:
    timings = preempted_world().received["a#0"].timings
    assert timings is not None
    names = [activity for activity, _ in timings.activities]
    assert names[:3] == [Activity.QUEUE, Activity.PREFILL, Activity.DECODE]
    assert Activity.PREEMPTED in names
    times = [since_s for _, since_s in timings.activities]
    assert times == sorted(times)


def test_the_prediction_of_a_request_without_others_grows_with_its_tokens() -> None:
    world = World(Setup())
    world.add(ask("short", max_tokens=2))
    world.add(ask("long", max_tokens=9))
    finish(world)
    short, long = (world.received[name].timings for name in ("short#0", "long#0"))
    assert short is not None and long is not None
    assert 0.0 < short.unloaded_decode_s < long.unloaded_decode_s
    assert short.unloaded_prefill_s > 0.0


def test_a_live_sequence_reports_its_time_so_far() -> None:
    world = World(Setup())
    world.add(ask("a", max_tokens=3))
    world.advance(2.0)
    (timings,) = world.scheduler.timings("a", world.now).values()
    assert (timings.queue_s, timings.finished_s) == (2.0, 2.0)
    assert world.scheduler.timings("other", world.now) == {}
    finish(world)
