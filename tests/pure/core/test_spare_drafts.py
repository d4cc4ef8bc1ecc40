"""Drafts take what nobody else needs: with speculation no sequence waits for more steps."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from msgspec.structs import replace

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.types import Request, RowOutput, SamplingParams, StepPlan, StepResult


def all_accepted(plan: StepPlan) -> StepResult:
    outputs = [
        RowOutput((7,) * (1 + row.num_drafts), draft_token_ids=(7,) * row.num_next_drafts)
        if row.emits
        else RowOutput()
        for row in plan.rows
    ]
    return StepResult(plan.step_id, tuple(outputs), seconds_of(plan.num_tokens))


def seconds_of(num_tokens: int) -> float:
    return 0.01 + 2e-6 * num_tokens


def calibrated() -> LinearCostModel:
    """It knows the steps, as after the calibration of an engine's start."""
    model = LinearCostModel()
    for num_tokens in (1, 4, 16, 64, 256) * 8:
        model.observe(StepLoad.of_span(0, num_tokens, num_logits_rows=1), seconds_of(num_tokens))
    return model


def waits(
    config: SchedulerConfig, arrivals: list[tuple[int, Request]], num_steps: int
) -> tuple[dict[str, int], dict[str, int], int]:
    """Of each request: steps until its first token, and the most steps between two of its rows;
    and how many drafts were checked.
    """
    pool = KVBlockPool(4000, 16, prefix_caching=config.use_kv_cache)
    scheduler = Scheduler(config, pool, make_policy(config), calibrated())
    now, arrived, last = 0.0, dict[str, int](), dict[str, int]()
    first: dict[str, int] = {}
    longest: Counter[str] = Counter()
    for step in range(num_steps):
        for at, request in arrivals:
            if at == step:
                scheduler.add(request, now)
                arrived[request.request_id] = step
        plan = scheduler.plan(now)
        if not step % 16:
            scheduler.check()
        if plan is None:
            continue
        now += 0.01
        for output in scheduler.commit(plan, all_accepted(plan), now).outputs:
            if not output.token_ids:
                continue
            name = output.request_id
            first.setdefault(name, step - arrived[name])
            longest[name] = max(longest[name], step - last.get(name, step))
            if output.finish_reason is None:
                last[name] = step
            else:
                last.pop(name, None)
    for name, step in last.items():
        longest[name] = max(longest[name], num_steps - step)
    return first, longest, scheduler.stats().totals.num_drafts


def config_of(num_drafts: int, num_rows: int, num_tokens: int, policy: str) -> SchedulerConfig:
    return SchedulerConfig(
        policy=PolicyName(policy),
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_tokens,
        max_model_len=4096,
        num_speculative_tokens=num_drafts,
    )


def ask(name: str, num_prompt: int, num_outputs: int, tenant: str = "") -> Request:
    sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
    return Request(name, tuple(range(num_prompt)), sampling, tenant=tenant)


@pytest.mark.parametrize("policy", ["mixed", "fcfs", "fair", "decode-first"])
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(64, 256), (16, 16), (8, 24), (48, 64)])
def test_no_sequence_waits_for_more_steps_than_without_drafts(
    policy: str, num_rows: int, num_tokens: int
) -> None:
    num_old = num_rows - 2
    arrivals = [(0, ask(f"old-{number}", 16, 900, f"t{number % 3}")) for number in range(num_old)]
    late = Random(num_rows)
    arrivals += [
        (60 + 20 * number, ask(f"late-{number}", late.choice((5, 64, 300)), 4))
        for number in range(5)
    ]
    plain_first, plain_longest, _ = waits(config_of(0, num_rows, num_tokens, policy), arrivals, 180)
    first, longest, num_drafts = waits(config_of(8, num_rows, num_tokens, policy), arrivals, 180)
    for name, steps in plain_first.items():
        assert first[name] <= steps, name
    for name, steps in plain_longest.items():
        assert longest[name] <= max(1, steps), name
    assert num_drafts or num_rows >= num_tokens - 2


@pytest.mark.parametrize("num_rows", [4, 8, 16])
def test_drafts_and_rows_leave_steps_short_while_others_may_come(num_rows: int) -> None:
    """A step takes as long as five of one row at most; 4 rows leave time for drafts, 16 for none,
    and have a row in every third step at least.
    """
    config = config_of(8, 16, 2048, "fair")
    costs = LinearCostModel(Coefficients(step_s=0.002, token_s=0.001))
    pool = KVBlockPool(4000, 16, prefix_caching=False)
    scheduler = Scheduler(config, pool, make_policy(config), costs)
    scheduler.add(ask("other", 4, 1, "b"), 0.0)
    for number in range(num_rows):
        scheduler.add(ask(f"r{number}", 4, 2000, "a"), 0.0)
    one_row = StepLoad.of_span(0, 1, num_logits_rows=1)
    num_drafts, last = 0, dict[str, int]()
    for step in range(100):
        plan = scheduler.plan(0.01 * step)
        assert plan is not None
        num_steps = costs.seconds(StepLoad.of_plan(plan)) / costs.seconds(one_row)
        result = replace(all_accepted(plan), seconds=0.002 + 0.001 * plan.num_tokens)
        outcome = scheduler.commit(plan, result, 0.01 * step + 0.01)
        if step > 20:
            assert num_steps <= 5 + 1e-9
            num_drafts += sum(row.num_drafts for row in plan.rows)
        for output in outcome.outputs:
            assert step - last.get(output.request_id, step) <= 3
            last[output.request_id] = step
    assert len(last) == num_rows + 1
    assert bool(num_drafts) == (num_rows < 16)


@pytest.mark.parametrize("num_tokens", [2, 5, 16])
def test_with_more_rows_than_tokens_each_has_its_turn(num_tokens: int) -> None:
    config = SchedulerConfig(max_num_seqs=24, max_num_batched_tokens=num_tokens, max_model_len=256)
    arrivals = [(0, ask(f"r{number}", 3, 200)) for number in range(24)]
    first, longest, _ = waits(config, arrivals, 1200 // num_tokens)
    assert len(first) == 24
    assert max(longest.values()) <= 3 * 24 / num_tokens


def test_drafts_that_are_too_many_are_for_each_in_turn() -> None:
    """Eight rows with eight drafts each, and twelve tokens to spare."""
    arrivals = [(0, ask(f"r{number}", 4, 400)) for number in range(8)]
    config = config_of(8, 8, 20, "mixed")
    scheduler = Scheduler(config, KVBlockPool(4000, 16), make_policy(config), LinearCostModel())
    for _, request in arrivals:
        scheduler.add(request, 0.0)
    drafted: Counter[int] = Counter()
    for step in range(60):
        plan = scheduler.plan(step * 0.01)
        assert plan is not None
        drafted.update({row.slot: row.num_drafts for row in plan.rows})
        scheduler.commit(plan, all_accepted(plan), step * 0.01 + 0.01)
    assert min(drafted.values()) > 0.5 * max(drafted.values()) > 0
