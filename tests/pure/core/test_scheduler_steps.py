"""The contents of a step and its effects: one behaviour per test."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace
from scheduler_world import PROMPT, CountingPool, Setup, World, ask, finish, policy_of
from shadow_executor import Trouble

from quickstep.config import PolicyName
from quickstep.core.cost_model import CostModel, LinearCostModel, StepLoad
from quickstep.core.drafts.control import DraftControl, DraftMode
from quickstep.core.scheduler import Scheduler
from quickstep.core.sequence import Sequence, sequence_seed
from quickstep.core.step import setup_us
from quickstep.errors import EngineError
from quickstep.types import FinishReason, Grammar, Phase, StepResult

# -- phases, chunks, prefix hits ------------------------------------------------------------------


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    world = World(Setup(max_num_batched_tokens=5))
    world.add(ask(prompt=(0, 1) * 6))
    finish(world)
    prefill = [row for plan in world.plans for row in plan.rows if row.phase is Phase.PREFILL]
    assert [row.num_tokens for row in prefill] == [5, 5, 2]
    assert [row.emits for row in prefill] == [False, False, True]


def test_decode_rows_are_before_prefill_rows_of_the_same_step() -> None:
    world = World(Setup())
    world.add(ask("a"))
    world.plan()
    world.commit()
    world.add(ask("b", prompt=(1,) * 6))
    plan = world.plan()
    assert plan is not None
    assert [row.phase for row in plan.rows] == [Phase.DECODE, Phase.PREFILL]
    finish(world)


def test_a_first_wave_of_one_prompt_computes_its_full_blocks_once() -> None:
    world = World(Setup(max_num_batched_tokens=40))
    for name in "abc":
        world.add(ask(name, prompt=(0, 1, 1) * 4))
    plan = world.plan()
    assert plan is not None
    assert [row.num_tokens for row in plan.rows] == [12, 4, 4]
    finish(world)


def test_the_sequences_of_one_request_share_its_prompt() -> None:
    world = World(Setup(max_num_batched_tokens=40))
    world.add(ask(prompt=(0, 1, 1) * 4, n=3))
    plan = world.plan()
    assert plan is not None
    assert plan.rows[0].new_block_ids[:2] == plan.rows[1].new_block_ids[:2]
    assert [one.seed for one in plan.admitted] == [sequence_seed(5, index) for index in range(3)]
    finish(world)


def test_a_hit_leaves_a_token_to_compute() -> None:
    world = World(Setup())
    world.add(ask("a"))
    finish(world)
    world.add(ask("b"))
    plan = world.plan()
    assert plan is not None
    assert (plan.rows[0].start, plan.rows[0].num_tokens) == (4, 4)
    finish(world)
    timings = world.received["b#0"].timings
    assert timings is not None
    assert timings.num_cached_tokens == 4
    totals = world.scheduler.stats().totals
    assert (totals.num_requests, totals.num_prefill_tokens, totals.num_output_tokens) == (2, 12, 8)
    assert totals.num_steps == len(world.plans)


def test_generated_tokens_are_hit_by_the_next_turn() -> None:
    world = World(Setup())
    world.add(ask("a", max_tokens=9))
    finish(world)
    history = (*PROMPT, *world.received["a#0"].token_ids)
    world.add(ask("b", prompt=(*history, 0)))
    plan = world.plan()
    assert plan is not None
    assert plan.rows[0].start == 16
    finish(world)
    totals = world.scheduler.stats().totals
    assert (totals.prefix_query_tokens, totals.prefix_hit_tokens) == (8 + 18, 16)


def test_without_prefix_caching_nothing_is_shared() -> None:
    world = World(Setup(prefix_caching=False))
    world.add(ask("a"))
    world.add(ask("b"))
    finish(world)
    assert world.scheduler.stats().blocks.num_cached == 0
    assert world.scheduler.stats().totals.prefix_hit_tokens == 0


def test_prefill_first_lets_decode_wait_for_prompts() -> None:
    world = World(Setup(policy=PolicyName.PREFILL_FIRST, max_num_batched_tokens=4))
    world.add(ask("a", prompt=(0,)))
    world.plan()
    world.commit()
    world.add(ask("b"))
    phases = []
    for _ in range(3):
        plan = world.plan()
        assert plan is not None
        phases.append([row.phase for row in plan.rows])
        world.commit()
    assert phases == [[Phase.PREFILL], [Phase.PREFILL], [Phase.DECODE, Phase.DECODE]]
    finish(world)


# -- overlap --------------------------------------------------------------------------------------


def test_a_second_step_is_planned_before_the_first_ones_token_is_known() -> None:
    world = World(Setup(pipeline_depth=2))
    world.add(ask())
    world.plan()
    plan = world.plan()
    assert plan is not None
    assert plan.rows[0].token_ids == ()
    assert (plan.rows[0].start, plan.rows[0].output_position) == (8, 1)
    assert world.plan() is None
    finish(world)


def test_depth_one_always_knows_the_token() -> None:
    world = World(Setup(pipeline_depth=1))
    world.add(ask())
    finish(world)
    assert all(row.token_ids for plan in world.plans for row in plan.rows)


def test_steps_are_committed_in_order() -> None:
    world = World(Setup(pipeline_depth=2))
    world.add(ask())
    world.plan()
    second = world.plan()
    assert second is not None
    with pytest.raises(EngineError, match="step 1 is not the oldest"):
        world.scheduler.commit(second, StepResult(1, (), 0.0), 0.0)


def test_a_result_of_another_shape_is_refused() -> None:
    world = World(Setup())
    world.add(ask())
    plan = world.plan()
    assert plan is not None
    with pytest.raises(EngineError, match="step 0 got a result"):
        world.scheduler.commit(plan, StepResult(0, (), 0.0), 0.0)


def test_a_prompt_that_does_not_fit_is_compared_with_the_cache_once_and_not_in_every_step() -> None:
    setup = Setup(num_blocks=24, block_size=2, max_model_len=48, max_num_batched_tokens=64)
    pool = CountingPool(setup.num_blocks, setup.block_size)
    world = World(setup, lambda one: Scheduler(one.config, pool, policy_of(one), LinearCostModel()))
    prefix = (0, 1, 1, 0) * 6
    world.add(ask("a", prompt=prefix, max_tokens=20))
    world.plan()
    world.commit()
    world.add(ask("b", prompt=prefix + (1,) * 20, max_tokens=2))
    counts = []
    for _ in range(8):
        pool.num_read = 0
        plan = world.scheduler.plan(world.now)  # not `world.plan`: its checks read too
        counts.append(pool.num_read)
        assert plan is not None
        world.in_flight.append(plan)
        world.shadow.submit(plan)
        world.commit()
    assert counts[0] >= 12
    assert max(counts[1:]) <= 1  # a block that "a" filled
    finish(world)


# -- priorities and preemption --------------------------------------------------------------------


def order_of_admission(world: World) -> list[str]:
    return [one.sequence_id for plan in world.plans for one in plan.admitted]


def test_lower_priorities_go_first_and_equal_ones_in_order_of_arrival() -> None:
    world = World(Setup(max_num_seqs=1))
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        world.add(ask(name, priority=priority, max_tokens=1))
    finish(world)
    assert order_of_admission(world) == ["d#0", "b#0", "c#0", "a#0"]


def tight_world(depth: int = 1) -> World:
    """Two sequences that outgrow five blocks."""
    world = World(Setup(num_blocks=5, block_size=4, pipeline_depth=depth, prefix_caching=False))
    world.add(ask("a", prompt=(0, 1, 0), max_tokens=12))
    world.add(ask("b", prompt=(1, 1, 0), max_tokens=12, priority=-1))
    return world


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_lowest_tier_is_preempted_and_loses_nothing(depth: int) -> None:
    world = tight_world(depth)
    finish(world)
    preemptions = {
        name: one.timings.num_preemptions for name, one in world.received.items() if one.timings
    }
    assert preemptions["b#0"] == 0
    assert preemptions["a#0"] > 0
    assert world.scheduler.stats().totals.num_preemptions == preemptions["a#0"]
    timings = world.received["a#0"].timings
    assert timings is not None
    assert timings.preempted_s > 0.0


def test_a_preempted_sequence_returns_before_those_who_never_ran() -> None:
    world = tight_world()
    world.add(ask("c", prompt=(1,) * 12, max_tokens=4))
    finish(world)
    names = order_of_admission(world)
    assert names.index("c#0") > max(i for i, name in enumerate(names) if name == "a#0")


def test_recomputation_continues_the_noise_counter() -> None:
    world = tight_world()
    finish(world)
    positions = [
        row.output_position
        for plan in world.plans
        for row in plan.rows
        if row.emits and len(plan.admitted) == 1 and row.slot == plan.admitted[0].slot
    ]
    assert max(positions) > 1


# -- failures -------------------------------------------------------------------------------------


def test_a_failed_row_ends_its_sequence_alone() -> None:
    world = World(Setup())
    world.add(ask("a"))
    world.add(ask("b", prompt=(1,) * 7))
    world.plan()
    world.commit(Trouble.ROWS, frozenset({0}))
    assert world.received["a#0"].reason is FinishReason.ERROR
    assert world.received["a#0"].error == "planted failure"
    finish(world)
    assert world.received["b#0"].reason is FinishReason.MAX_TOKENS
    assert world.scheduler.stats().totals.num_preemptions == 0


def test_a_row_without_its_token_fails() -> None:
    world = World(Setup())
    world.add(ask("a"))
    plan = world.plan()
    assert plan is not None
    result, _ = world.shadow.run_next(Trouble.ROWS, frozenset({0}))
    assert result is not None
    outcome = world.scheduler.commit(plan, StepResult(0, result.outputs, 1.0), 1.0)
    assert outcome.outputs[0].finish_reason is FinishReason.ERROR
    assert outcome.outputs[0].error == "the executor returned no token"


@pytest.mark.parametrize("trouble", [Trouble.EARLY, Trouble.MIDWAY])
def test_blocks_of_a_failed_step_are_never_hit(trouble: Trouble) -> None:
    world = World(Setup())
    world.add(ask("a"))
    world.plan()
    world.commit(trouble)
    assert world.received["a#0"].reason is FinishReason.ERROR
    assert world.scheduler.stats().blocks.num_cached == 0
    world.add(ask("b"))
    finish(world)


@pytest.mark.parametrize("trouble", [Trouble.EARLY, Trouble.MIDWAY])
def test_who_shares_blocks_of_a_failed_step_computes_them_again(trouble: Trouble) -> None:
    world = World(Setup(pipeline_depth=2))
    world.add(ask("a"))
    world.plan()
    world.add(ask("b"))
    plan = world.plan()
    assert plan is not None
    assert [row.start for row in plan.rows if row.phase is Phase.PREFILL] == [4]
    world.commit(trouble)
    finish(world)
    assert world.received["b#0"].reason is FinishReason.MAX_TOKENS


# -- books ----------------------------------------------------------------------------------------


def test_seconds_of_a_step_whose_sequences_are_gone_are_nobodys() -> None:
    world = World(Setup())
    world.add(ask("a"))
    world.plan()
    world.abort("a")
    world.commit()
    totals = world.scheduler.stats().totals
    assert totals.unclaimed_s == totals.busy_s > 0.0
    finish(world)


def test_a_step_record_counts_its_rows() -> None:
    world = World(Setup())
    world.add(ask("a"))
    world.plan()
    world.commit()
    world.add(ask("b", prompt=(1,) * 6))
    world.plan()
    world.commit()
    record = world.records[1]
    assert (record.num_decode_rows, record.num_prefill_rows) == (1, 1)
    assert (record.num_decode_tokens, record.num_prefill_tokens) == (1, 6)
    assert record.num_kv_tokens == 9 + 6
    assert record.num_running == 2
    assert record.num_free_blocks == 16 - 3 - 2
    assert record.predicted_s > 0.0


def test_sequence_seeds_differ_and_the_first_is_the_requests_own() -> None:
    assert sequence_seed(-7, 0) == -7
    seeds = {sequence_seed(seed, index) for seed in range(-5, 50) for index in range(1, 20)}
    assert len(seeds) == 55 * 19
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_predictions_follow_the_measured_steps() -> None:
    world = World(Setup())
    world.add(ask("a", max_tokens=20))
    for _ in range(20):
        plan = world.plan()
        assert plan is not None
        result, _ = world.shadow.run_next()
        assert result is not None
        outcome = world.scheduler.commit(plan, replace(result, seconds=3.0), world.now)
        world.in_flight.clear()
    assert outcome.record.predicted_s == pytest.approx(3.0, rel=0.05)


# -- the cost of admissions without tokens --------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {"grammar": Grammar.of_json_object()},
        {"dry_multiplier": 0.8},
        {"repetition_penalty": 1.2},
    ],
    ids=["grammar", "dry", "repetition penalty"],
)
def test_expensive_set_ups_are_spread_over_steps(
    sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ask(n=10)
    request = structs.replace(plain, sampling=replace(plain.sampling, ignore_eos=False, **sampling))
    price_us = setup_us(Sequence(request, 0, 0, 0.0, 1.0))
    assert price_us > 5 * setup_us(Sequence(plain, 0, 0, 0.0, 1.0))
    monkeypatch.setattr("quickstep.core.step.MAX_SETUP_US", 2.5 * price_us)
    world = World(Setup(num_blocks=200, max_num_seqs=16, max_num_batched_tokens=400))
    world.add(request)
    world.drain()
    counts = [len(plan.admitted) for plan in world.plans if plan.admitted]
    assert counts == [3, 3, 3, 1]


def test_a_set_up_above_the_limit_is_alone_in_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quickstep.core.step.MAX_SETUP_US", 1e-3)
    world = World(Setup(num_blocks=200, max_num_seqs=16, max_num_batched_tokens=400))
    world.add(ask("a", n=3))
    world.add(ask("b"))
    finish(world)
    assert [len(plan.admitted) for plan in world.plans if plan.admitted] == [1, 1, 1, 1]


# -- what is measured of drafts -------------------------------------------------------------------


def test_the_time_of_a_step_with_drafts_is_from_result_to_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has what follows the result before, but no pause that is longer than the step."""
    measured: list[float] = []

    def keep(
        self: DraftControl,
        mode: DraftMode,
        decode: StepLoad,
        accepted: int,
        seconds: float,
        model: CostModel,
    ) -> None:
        measured.append(seconds)

    monkeypatch.setattr(DraftControl, "measured", keep)
    world = World(Setup(max_drafts=2))
    world.add(ask(max_tokens=20))
    world.plan()
    world.commit()
    for pause, counted in ((0.0, 0.0), (0.5, 0.5), (20.0, 0.0)):  # in steps
        step_s = world.records[-1].seconds
        world.now += pause * step_s
        world.plan()
        world.commit()
        seconds = world.records[-1].seconds
        assert measured.pop() == pytest.approx(seconds + counted * step_s)
    finish(world)
