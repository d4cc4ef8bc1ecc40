"""Prompt logprobs and embeddings in the scheduler: every position once, whatever happens."""

from __future__ import annotations

import pytest
from msgspec import structs
from msgspec.structs import replace
from scheduler_world import PROMPT, Setup, World, ask, finish

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.errors import RequestError
from quickstep.sim.engine import ClockExecutor, VirtualClock
from quickstep.sim.outcome import Arrival
from quickstep.sim.simulate import simulate
from quickstep.types import FinishReason, Phase, Pooling, Request, SamplingParams, StepPlan


def scored(request: Request, num_top: int = 0) -> Request:
    return structs.replace(request, sampling=replace(request.sampling, prompt_logprobs=num_top))


def no_output(request_id: str, prompt: tuple[int, ...] = PROMPT, n: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=0, n=n)
    return structs.replace(ask(request_id, prompt), sampling=sampling)


def embed(request_id: str, pooling: Pooling, prompt: tuple[int, ...] = PROMPT) -> Request:
    return structs.replace(ask(request_id, prompt), pooling=pooling)


def test_each_prompt_token_is_scored_once_with_the_first_sequence() -> None:
    world = World(Setup(max_num_batched_tokens=3))
    world.add(scored(ask(n=2)))
    finish(world)
    first, second = world.received["a#0"], world.received["a#1"]
    assert first.prompt_logprobs[0] is None
    assert [
        prompt_logprob.token_id for prompt_logprob in first.prompt_logprobs[1:] if prompt_logprob
    ] == list(PROMPT[1:])
    assert second.prompt_logprobs == []


def test_a_prompt_of_one_token_has_no_score_but_its_place() -> None:
    world = World(Setup())
    world.add(scored(ask(prompt=(1,))))
    finish(world)
    assert world.received["a#0"].prompt_logprobs == [None]


def test_a_scored_prompt_reads_no_cached_block_and_fills_the_cache() -> None:
    world = World(Setup())
    for name, request in (("a", ask("a")), ("b", scored(ask("b"))), ("c", ask("c"))):
        world.add(request)
        world.drain()
        timings = world.received[f"{name}#0"].timings
        assert timings is not None
        assert timings.num_cached_tokens == (4 if name == "c" else 0)
    world.verify()


def test_a_preempted_prompt_takes_from_the_cache_what_was_scored() -> None:
    world = World(Setup(num_blocks=8, block_size=2, max_num_batched_tokens=8))
    world.add(ask("first", prompt=(0, 1), max_tokens=None))
    world.add(scored(ask("second", prompt=PROMPT[:5], max_tokens=6)))
    finish(world)
    assert world.scheduler.stats().totals.num_preemptions > 0
    admissions = [
        (one, row)
        for plan in world.plans
        for one in plan.admitted
        for row in plan.rows
        if row.slot == one.slot and one.sequence_id == "second#0"
    ]
    assert len(admissions) > 1
    assert all(row.num_scored == 0 for _, row in admissions[1:])


def test_rows_in_flight_at_a_preemption_are_not_delivered_twice() -> None:
    sizes = Setup(num_blocks=9, block_size=1, max_num_batched_tokens=2, pipeline_depth=4)
    world = World(sizes)
    world.add(ask("first", prompt=(0,), max_tokens=None))
    world.plan()
    world.commit()
    world.add(scored(ask("second", prompt=PROMPT[:6], max_tokens=1)))
    rows = []
    for _ in range(3):
        plan = world.plan()
        assert plan is not None
        rows.append(plan.rows[1:])
    assert [len(of_second) for of_second in rows] == [1, 1, 0]  # the third has preempted it
    world.abort("first")
    again = world.plan()
    assert again is not None
    assert (again.rows[0].start, again.rows[0].num_scored) == (0, 2)
    finish(world)


@pytest.mark.parametrize("pooling", Pooling)
def test_a_pooled_request_ends_with_its_prompt_and_an_embedding(pooling: Pooling) -> None:
    world = World(Setup(max_num_batched_tokens=3, pipeline_depth=2))
    world.add(embed("a", pooling))
    finish(world)
    one = world.received["a#0"]
    assert (one.reason, one.token_ids) == (FinishReason.POOLED, [])
    assert one.embedding is not None
    assert FinishReason.POOLED.openai == "stop"


@pytest.mark.parametrize(("pooling", "num_cached"), [(Pooling.MEAN, 0), (Pooling.LAST, 4)])
def test_only_the_last_token_may_leave_positions_to_the_cache(
    pooling: Pooling, num_cached: int
) -> None:
    world = World(Setup())
    world.add(ask("a"))
    world.drain()
    world.add(embed("b", pooling))
    finish(world)
    timings = world.received["b#0"].timings
    assert timings is not None
    assert timings.num_cached_tokens == num_cached


def test_no_tokens_requested_is_an_end_with_the_prompt() -> None:
    world = World(Setup())
    world.add(no_output("a", n=2))
    finish(world)
    for index, num_scores in ((0, len(PROMPT)), (1, 0)):
        one = world.received[f"a#{index}"]
        assert (one.reason, one.token_ids) == (FinishReason.MAX_TOKENS, [])
        assert len(one.prompt_logprobs) == num_scores


def test_a_prompt_that_generates_nothing_may_fill_the_context() -> None:
    world = World(Setup(max_model_len=8))
    assert not world.add(ask("a", max_tokens=1))
    assert world.add(no_output("b"))
    assert world.add(embed("c", Pooling.MEAN))
    with pytest.raises(RequestError, match="9 tokens > 8 maximum"):
        world.scheduler.add(no_output("d", (*PROMPT, 0)), world.now)
    finish(world)


def test_the_simulator_runs_them() -> None:
    config = SchedulerConfig(max_num_batched_tokens=3, max_model_len=32)
    scheduler = Scheduler(config, KVBlockPool(16, 4), make_policy(config), LinearCostModel())
    requests = [scored(ask("a", n=2)), embed("b", Pooling.MEAN), no_output("c")]
    outcome = simulate(
        [Arrival(0.0, request) for request in requests], scheduler, LinearCostModel()
    )
    assert {ending.reason for ending in outcome.endings} == {
        FinishReason.MAX_TOKENS,
        FinishReason.POOLED,
    }


COSTS = Coefficients(0.010, 0.001, 0.0, 0.0, 0.0, score_s=0.002)


def steps_of(*prompts: Request) -> list[StepPlan]:
    """The plans up to the last prompt token, next to 20 sequences that decode; a step may take
    100 ms.
    """
    config = SchedulerConfig(
        max_num_seqs=32, max_num_batched_tokens=1000, max_model_len=400, inter_token_target_s=0.1001
    )
    model = LinearCostModel(COSTS)
    scheduler = Scheduler(config, KVBlockPool(512, 4), make_policy(config), model)
    for number in range(20):
        scheduler.add(ask(f"d{number}", max_tokens=300), 0.0)
    plans: list[StepPlan] = []
    clock = VirtualClock()
    executor = ClockExecutor(clock, model)

    def step() -> StepPlan:
        plan = scheduler.plan(clock.now)
        assert plan is not None
        record = scheduler.commit(plan, executor.submit(plan).result(), clock.now).record
        assert record.num_scored == sum(row.num_scored for row in plan.rows)
        return plan

    step()
    for prompt in prompts:
        scheduler.add(prompt, clock.now)
    while not plans or any(row.phase is Phase.PREFILL for row in plans[-1].rows):
        plans.append(step())
    return plans[:-1]


def test_a_chunk_of_a_scored_prompt_is_planned_within_the_step_time() -> None:
    prompt = tuple(range(150))
    plain, scored_plans = (
        steps_of(request)
        for request in (ask("a", prompt, max_tokens=1), scored(ask("a", prompt, max_tokens=1)))
    )
    costs = LinearCostModel(COSTS)
    for plans, num_tokens in ((plain, 70), (scored_plans, 23)):
        assert plans[0].rows[-1].num_tokens == num_tokens
        assert all(costs.seconds(StepLoad.of_plan(plan)) <= 0.1001 for plan in plans)
        assert sum(plan.rows[-1].num_tokens for plan in plans) == len(prompt)
    assert sum(plan.rows[-1].num_scored for plan in scored_plans) == len(prompt) - 1


def test_prompts_beside_a_scored_one_keep_the_step_time_too() -> None:
    prompt = tuple(range(60))
    requests = [
        ask("a", prompt, max_tokens=1),
        scored(ask("b", prompt[::-1], max_tokens=1)),
        ask("c", prompt[1:], max_tokens=1),
        scored(ask("d", prompt[2:], max_tokens=1)),
    ]
    costs = LinearCostModel(COSTS)
    for request_order in (requests, requests[::-1]):
        plans = steps_of(*request_order)
        assert all(costs.seconds(StepLoad.of_plan(plan)) <= 0.1001 for plan in plans)
        assert sum(row.num_scored for plan in plans for row in plan.rows) == 59 + 57
