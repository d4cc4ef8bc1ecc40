"""The laws of the scheduling policies, on the simulator's exact clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import Setup, World, ask, finish

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.core.policies import MixedPolicy, make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.core.sequence import Sequence, SequenceState
from quickstep.core.service_order import FairOrder
from quickstep.errors import RequestError
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival, Ending, Simulation
from quickstep.sim.simulate import simulate
from quickstep.types import (
    FinishReason,
    Request,
    RequestClass,
    RowOutput,
    SamplingParams,
    StepResult,
)

# 1 ms a step, 0.5 ms a token and a row; nothing for the context. SLOW takes about four times that.
COSTS = Coefficients(step_s=0.001, token_s=0.0005, row_s=0.0005, kv_token_s=0.0, pair_s=0.0)
SLOW = Coefficients(step_s=0.005, token_s=0.002, row_s=0.002, kv_token_s=0.0, pair_s=0.0)
# Without a cost per step, so that serving one after the other wastes nothing.
EXACT = Coefficients(step_s=0.0, token_s=0.001, row_s=0.0, kv_token_s=0.0, pair_s=0.0)


def request(
    name: str,
    prompt_len: int = 16,
    max_tokens: int = 16,
    *,
    priority: int = 0,
    tenant: str = "",
    weight: float = 1.0,
    ttft_deadline_s: float | None = None,
    timeout_s: float | None = None,
    request_class: RequestClass = RequestClass.INTERACTIVE,
) -> Request:
    number = sum(map(ord, name))
    return Request(
        name,
        tuple((number + place) % 97 for place in range(prompt_len)),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        priority=priority,
        tenant=tenant,
        tenant_weight=weight,
        ttft_deadline_s=ttft_deadline_s,
        timeout_s=timeout_s,
        request_class=request_class,
    )


def run(
    policy: PolicyName,
    arrivals: Iterable[Arrival],
    costs: Coefficients = COSTS,
    num_blocks: int = 4096,
    **config: object,
) -> Simulation:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 2048} | config
    settings = SchedulerConfig(policy=policy, **sizes)  # type: ignore[arg-type]
    pool = KVBlockPool(num_blocks, 16, prefix_caching=False)
    scheduler = GroupedScheduler(settings, pool, make_policy(settings), LinearCostModel(costs))
    outcome = simulate(arrivals, scheduler, LinearCostModel(costs))
    scheduler.check()
    return outcome


def starts(outcome: Simulation) -> list[str]:
    """The requests in the order in which they were first scheduled."""
    ordered = sorted(outcome.endings, key=lambda one: one.timings.first_scheduled_s or 0.0)
    return [ending.request_id for ending in ordered]


def at_once(requests: Iterable[Request]) -> list[Arrival]:
    return [Arrival(0.0, one) for one in requests]


# -- the order of service -----------------------------------------------------------------------


def test_fcfs_ignores_priorities_and_classes() -> None:
    batch = request("a", priority=5, request_class=RequestClass.BATCH)
    outcome = run(PolicyName.FCFS, at_once([batch, request("b"), request("c", priority=-5)]))
    assert starts(outcome) == ["a", "b", "c"]


@pytest.mark.parametrize("policy", [PolicyName.MIXED, PolicyName.PRIORITY, PolicyName.FAIR])
def test_the_class_batch_comes_after_interactive_requests(policy: PolicyName) -> None:
    batch = request("batch", priority=-5, request_class=RequestClass.BATCH)
    outcome = run(policy, at_once([batch, request("low", priority=9)]), max_num_seqs=1)
    assert starts(outcome) == ["low", "batch"]


def test_priority_serves_the_shortest_first_within_a_level() -> None:
    requests = [request(f"{size}", max_tokens=size) for size in (100, 50, 75)]
    urgent = request("urgent", max_tokens=200, priority=-1)
    outcome = run(PolicyName.PRIORITY, at_once([*requests, urgent]), max_num_seqs=1)
    assert starts(outcome) == ["urgent", "50", "75", "100"]


def test_a_flow_of_short_requests_does_not_starve_a_long_one() -> None:
    """The bound of `PriorityOrder`: it is put back by a multiple of its own length."""
    flow = [Arrival(0.001 * number, request(f"s{number}", 16, 1)) for number in range(3000)]
    outcome = run(PolicyName.PRIORITY, [Arrival(0.0, request("long", 16, 100)), *flow])
    (long,) = [ending for ending in outcome.endings if ending.request_id == "long"]
    service_s = 0.009 + 99 * 0.002
    assert (long.timings.first_scheduled_s or 0.0) <= 5.0 * service_s + 0.1
    assert outcome.finished_s > 3.0  # the flow was longer than that


# -- deadlines ----------------------------------------------------------------------------------


def feasible(rng: Random, count: int) -> list[Request]:
    """Requests whose deadlines can all be met one after the other, in a random order."""
    end_s, requests = 0.0, []
    for number in range(count):
        size = rng.randint(1, 60)
        end_s += size * 0.001 * (1 + 1e-9)
        slack_s = rng.choice((0.0, 0.0, 0.01))
        requests.append(request(f"r{number}", size, 1, timeout_s=end_s + slack_s))
    rng.shuffle(requests)
    return requests


def missed(endings: list[Ending]) -> int:
    return sum(ending.reason is FinishReason.DEADLINE for ending in endings)


@pytest.mark.parametrize("seed", range(20))
def test_deadline_meets_every_deadline_that_can_be_met(seed: int) -> None:
    requests = at_once(feasible(Random(seed), 30))
    outcome = run(PolicyName.DEADLINE, requests, EXACT, max_num_seqs=1)
    assert len(outcome.endings) == 30
    assert missed(outcome.endings) == 0


def test_first_come_first_served_does_not() -> None:
    counts = [
        missed(run(PolicyName.FCFS, at_once(feasible(Random(seed), 30)), EXACT).endings)
        for seed in range(5)
    ]
    assert min(counts) > 0


def test_what_cannot_end_in_time_makes_way_for_what_can() -> None:
    lost = request("lost", 100, 1, timeout_s=0.05)
    others = [request(f"r{number}", 10, 1, timeout_s=0.1) for number in range(8)]
    outcome = run(PolicyName.DEADLINE, at_once([lost, *others]), EXACT, max_num_seqs=1)
    assert {
        ending.request_id for ending in outcome.endings if ending.reason is FinishReason.DEADLINE
    } == {"lost"}


def test_a_request_that_waits_past_its_latest_start_is_shed_with_the_reason() -> None:
    world = World(Setup(max_num_seqs=1, max_num_batched_tokens=4))
    world.add(ask("runs", max_tokens=12))
    world.plan()
    world.commit()
    late = request("late", 8, 2, ttft_deadline_s=0.05)
    world.scheduler.add(late, world.now)
    (output,) = world.scheduler.expire(world.now + 0.05)
    assert output.finish_reason is FinishReason.SHED
    assert "the first token cannot come within 50 ms" in output.error
    assert output.timings is not None and output.timings.num_output_tokens == 0
    finish(world)


def test_an_admitted_request_is_not_shed() -> None:
    outcome = run(PolicyName.MIXED, at_once([request("a", 16, 64, ttft_deadline_s=0.02)]))
    assert outcome.endings[0].reason is FinishReason.MAX_TOKENS


def test_a_request_behind_a_long_queue_is_refused_with_the_predicted_wait() -> None:
    arrivals = [Arrival(0.0, request(f"r{number}", 100, 20)) for number in range(100)]
    late = Arrival(0.5, request("late", 100, 20, ttft_deadline_s=0.2))
    patient = Arrival(0.5, request("patient", 100, 20, ttft_deadline_s=60.0))
    outcome = run(PolicyName.MIXED, [*arrivals, late, patient])
    assert [name for name, _ in outcome.refused] == ["late"]
    assert "predicted wait" in outcome.refused[0][1]
    assert len(outcome.endings) == 101


def test_the_refusal_says_when_to_come_back() -> None:
    settings = SchedulerConfig(max_model_len=2048)
    pool = KVBlockPool(4096, 16)
    scheduler = GroupedScheduler(settings, pool, make_policy(settings), LinearCostModel(COSTS))
    with pytest.raises(RequestError) as caught:
        scheduler.add(request("a", 1000, 4, ttft_deadline_s=0.1), 0.0)
    assert (caught.value.status, caught.value.code) == (503, "deadline_unreachable")
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1.0
    assert not scheduler.has_work()


@pytest.mark.parametrize("load", [2.0, 10.0])
def test_under_overload_the_admitted_get_their_first_token_in_time(load: float) -> None:
    """And those that cannot have it are refused when they arrive, not after they have waited."""
    rng, deadline_s, seconds = Random(1), 1.0, 20.0
    costs = Coefficients(0.004, 0.0007, 0.001, kv_token_s=0.0, pair_s=0.0)  # 13 requests per second
    arrivals = [
        Arrival(
            rng.random() * seconds,
            request(
                f"r{number}", rng.randint(16, 64), rng.randint(8, 48), ttft_deadline_s=deadline_s
            ),
        )
        for number in range(int(13 * load * seconds))
    ]
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    outcome = run(PolicyName.MIXED, arrivals, costs, **sizes)
    reasons = Counter(ending.reason for ending in outcome.endings)
    waits_s = [
        ending.timings.first_token_s - ending.timings.arrival_s
        for ending in outcome.endings
        if ending.timings.first_token_s is not None
    ]
    assert len(waits_s) >= 0.9 * 13 * seconds
    assert sum(wait_s <= deadline_s for wait_s in waits_s) >= 0.99 * len(waits_s)
    assert reasons[FinishReason.SHED] <= 0.02 * len(arrivals) < len(outcome.refused)


def test_before_a_rate_is_known_the_cost_model_predicts_the_wait() -> None:
    """Requests of 0.1 s each, 8 at once: the first 8 are on time, of the others those that fit."""
    requests = [request(f"r{number}", 8, 100, ttft_deadline_s=0.5) for number in range(64)]
    outcome = run(PolicyName.MIXED, at_once(requests), max_num_seqs=8)
    refused = {name for name, _ in outcome.refused}
    assert refused >= {f"r{number}" for number in range(32, 64)}
    assert not refused & {f"r{number}" for number in range(8)}
    patient = [request(f"p{number}", 8, 100, ttft_deadline_s=60.0) for number in range(64)]
    assert not run(PolicyName.MIXED, at_once(patient), max_num_seqs=8).refused


# -- fairness -----------------------------------------------------------------------------------


def backlog(
    weights: dict[str, float], rng: Random, per_tenant: int, sizes: dict[str, tuple[int, int]]
) -> list[Arrival]:
    """More requests than can be served, of tenants whose requests differ in size."""
    return [
        Arrival(
            0.0,
            request(
                f"{tenant}-{number}",
                rng.randint(1, sizes[tenant][0]),
                rng.randint(1, sizes[tenant][1]),
                tenant=tenant,
                weight=weight,
            ),
        )
        for tenant, weight in weights.items()
        for number in range(per_tenant)
    ]


class MeteredOrder(FairOrder):
    """Records who was charged when, on a clock that counts device seconds."""

    def __init__(self) -> None:
        super().__init__(10.0)
        self.charges: list[tuple[float, str, float]] = []
        self._now_s = 0.0

    def charged(self, sequence: Sequence, seconds: float) -> None:
        super().charged(sequence, seconds)
        self._now_s += seconds
        self.charges.append((self._now_s, sequence.request.tenant, seconds))

    def received(self, since_s: float, until_s: float) -> Counter[str]:
        """Device seconds by tenant in a window."""
        seconds: Counter[str] = Counter()
        for at_s, tenant, charged_s in self.charges:
            if since_s < at_s <= until_s:
                seconds[tenant] += charged_s  # type: ignore[assignment]
        return seconds


def metered(arrivals: Iterable[Arrival], max_num_seqs: int) -> MeteredOrder:
    order = MeteredOrder()
    settings = SchedulerConfig(max_num_seqs, 256, 2048)
    pool = KVBlockPool(4096, 16, prefix_caching=False)
    scheduler = GroupedScheduler(settings, pool, MixedPolicy(order, 0.2), LinearCostModel(SLOW))
    simulate(arrivals, scheduler, LinearCostModel(SLOW))
    return order


@pytest.mark.parametrize("seed", range(3))
def test_tenants_get_device_seconds_by_their_weights(seed: int) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 1.0}
    sizes = {"a": (200, 20), "b": (40, 60), "c": (400, 5)}
    order = metered(backlog(weights, Random(seed), 1000, sizes), 16)
    for start_s in range(5, 60, 10):
        received = order.received(start_s, start_s + 60.0)
        normed = [received[tenant] / weight for tenant, weight in weights.items()]
        assert sum(normed) ** 2 / (len(normed) * sum(value**2 for value in normed)) >= 0.98
        for tenant, weight in weights.items():
            assert received[tenant] / 60.0 == pytest.approx(weight / 4.0, abs=0.02)


def test_fairness_costs_little_throughput() -> None:
    sizes = {"a": (200, 20), "b": (40, 60)}
    arrivals = backlog({"a": 1.0, "b": 1.0}, Random(1), 400, sizes)
    fair, plain = (
        run(policy, arrivals, max_num_seqs=16) for policy in (PolicyName.FAIR, PolicyName.MIXED)
    )
    assert fair.finished_s <= 1.03 * plain.finished_s


@pytest.mark.parametrize("step_s", [0.001, 0.05, 0.2])
def test_tenants_with_many_requests_keep_the_throughput_of_large_models(step_s: float) -> None:
    """A step of one row takes longer there than the target of a step."""
    costs = Coefficients(step_s=step_s, token_s=step_s / 100, row_s=step_s / 100)
    arrivals = [
        Arrival(
            4 * step_s * number,
            request(f"{'ab'[number % 2]}-{number}", 40, 60, tenant="ab"[number % 2]),
        )
        for number in range(200)
    ]
    fair, plain = (
        run(policy, arrivals, costs, max_num_seqs=16)
        for policy in (PolicyName.FAIR, PolicyName.MIXED)
    )
    assert fair.finished_s <= 1.1 * plain.finished_s


@pytest.mark.parametrize(
    ("policy", "is_fair"), [(PolicyName.FAIR, True), (PolicyName.MIXED, False)]
)
def test_a_light_tenant_does_not_wait_for_the_queue_of_a_heavy_one(
    policy: PolicyName, is_fair: bool
) -> None:
    heavy = [Arrival(0.0, request(f"a-{number}", 64, 200, tenant="a")) for number in range(200)]
    light = Arrival(1.0, request("b-0", 16, 16, tenant="b"))
    outcome = run(policy, [*heavy, light])
    (ending,) = [one for one in outcome.endings if one.request_id == "b-0"]
    assert ((ending.timings.queue_s) < 0.3) is is_fair


def test_steps_stay_short_while_a_light_tenant_decodes() -> None:
    heavy = [Arrival(0.0, request(f"a-{number}", 4, 500, tenant="a")) for number in range(63)]
    light = Arrival(0.5, request("b-0", 4, 100, tenant="b"))
    outcome = run(PolicyName.FAIR, [*heavy, light], max_num_seqs=64, inter_token_target_s=0.010)
    (ending,) = [one for one in outcome.endings if one.request_id == "b-0"]
    first_s, last_s = ending.timings.first_token_s or 0.0, ending.timings.finished_s
    during = [one for one in outcome.records if first_s < one.committed_at_s <= last_s]
    assert max(record.seconds for record in during) <= 0.0101
    assert len(outcome.endings) == 64  # and the others all finish
    before = [one for one in outcome.records if one.committed_at_s < 0.5]
    assert max(record.seconds for record in before) > 0.05


def test_prompts_and_rows_of_a_heavy_tenant_take_turns_while_a_light_tenant_decodes() -> None:
    """16 prompt tokens take longer than the target, so a step has them or rows above the part, and
    both have the same time.
    """
    heavy = [Arrival(0.0, request(f"a-{number}", 4, 500, tenant="a")) for number in range(40)]
    light = Arrival(0.5, request("b-0", 4, 100, tenant="b"))
    later = [Arrival(0.6, request(f"a-{number}", 400, 8, tenant="a")) for number in range(40, 50)]
    outcome = run(
        PolicyName.FAIR, [*heavy, light, *later], max_num_seqs=64, inter_token_target_s=0.010
    )
    (ending,) = [one for one in outcome.endings if one.request_id == "b-0"]
    last_s = ending.timings.finished_s
    during = [record for record in outcome.records if 0.61 < record.committed_at_s <= last_s]
    with_a_chunk = [one for one in during if one.num_prefill_tokens >= 16]
    with_rows = [one for one in during if one.num_decode_rows > 2]
    assert not any(one in with_rows for one in with_a_chunk)
    one_row_s = LinearCostModel(COSTS).seconds(StepLoad.of_span(0, 1, num_logits_rows=1))
    of_chunks, of_rows = (
        sum(one.seconds - one_row_s for one in steps) for steps in (with_a_chunk, with_rows)
    )
    assert 0.8 * of_rows <= of_chunks <= 1.25 * of_rows
    assert len(with_a_chunk) > len(during) // 6
    assert max(one.seconds for one in during) <= 0.0111  # a step, a row, a chunk
    assert len(outcome.endings) == 51


def test_a_tenant_that_was_idle_gets_no_credit() -> None:
    first = [Arrival(0.0, request(f"a-{number}", 64, 50, tenant="a")) for number in range(200)]
    late = [Arrival(20.0, request(f"b-{number}", 64, 50, tenant="b")) for number in range(200)]
    received = metered([*first, *late], 8).received(22.0, 52.0)
    assert received["a"] == pytest.approx(received["b"], rel=0.1)


def test_the_time_in_which_a_tenant_was_alone_is_no_debt() -> None:
    alone = [Arrival(0.5 * n, request(f"a-{n}", 64, 50, tenant="a")) for n in range(40)]
    flood = [Arrival(30.0, request(f"b-{n}", 64, 200, tenant="b")) for n in range(200)]
    again = Arrival(31.0, request("a-again", 16, 16, tenant="a"))
    outcome = run(PolicyName.FAIR, [*alone, *flood, again])
    (ending,) = [one for one in outcome.endings if one.request_id == "a-again"]
    assert ending.timings.queue_s < 0.3


# -- batches that run to their end ----------------------------------------------------------------


def test_static_admits_nothing_while_a_batch_runs() -> None:
    requests = [request(f"r{number}", 8, 4 + 40 * (number % 2)) for number in range(6)]
    outcome = run(PolicyName.STATIC, at_once(requests), max_num_seqs=2)
    ends = {ending.request_id: ending.timings for ending in outcome.endings}
    for first in (0, 2):
        batch_end_s = max(ends[f"r{first}"].finished_s, ends[f"r{first + 1}"].finished_s)
        assert ends[f"r{first + 2}"].first_scheduled_s == pytest.approx(batch_end_s)
    assert run(PolicyName.FCFS, at_once(requests), max_num_seqs=2).finished_s < outcome.finished_s


def test_dynamic_waits_for_a_full_batch_or_for_its_timeout() -> None:
    config = {"max_num_seqs": 4, "batch_timeout_s": 0.5}
    alone = run(PolicyName.DYNAMIC, [Arrival(1.0, request("a"))], **config)
    assert alone.endings[0].timings.first_scheduled_s == pytest.approx(1.5)
    arrivals = [Arrival(1.0 + 0.1 * number, request(f"r{number}")) for number in range(4)]
    full = run(PolicyName.DYNAMIC, arrivals, **config)
    starts_s = [ending.timings.first_scheduled_s for ending in full.endings]
    assert starts_s == pytest.approx([1.3] * 4)


def test_length_grouped_puts_prompts_of_one_length_into_a_batch() -> None:
    requests = [request(f"r{number}", (10, 200)[number % 2], 4) for number in range(8)]
    outcome = run(PolicyName.LENGTH_GROUPED, at_once(requests), max_num_seqs=4)
    lengths = [int(name[1:]) % 2 for name in starts(outcome)]
    assert lengths == [0, 0, 0, 0, 1, 1, 1, 1]


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [PolicyName.MIXED, PolicyName.FAIR, PolicyName.DEADLINE])
def test_a_small_pool_finishes_all_requests_without_a_storm_of_preemptions(
    policy: PolicyName,
) -> None:
    """A pool of 1.2 times the largest request, and 256 requests at once."""
    rng = Random(7)
    requests = [
        request(f"r{number}", rng.randint(1, 60), rng.randint(20, 60), tenant=f"t{number % 3}")
        for number in range(256)
    ]
    num_blocks = math.ceil(1.2 * 120 / 16)
    outcome = run(policy, at_once(requests), num_blocks=num_blocks, max_num_seqs=64)
    assert len(outcome.endings) == 256
    assert {ending.reason for ending in outcome.endings} == {FinishReason.MAX_TOKENS}
    num_preemptions = sum(ending.timings.num_preemptions for ending in outcome.endings)
    assert 0 < num_preemptions < 2 * 256


@pytest.mark.parametrize("load", [3.0, 10.0])
def test_throughput_stays_near_its_peak_under_overload(load: float) -> None:
    """Tokens per second while the queue is never empty, with a pool for about ten requests."""

    def throughput(rate: float) -> float:
        rng = Random(3)
        arrivals = [
            Arrival(
                rng.random() * 30.0, request(f"r{n}", rng.randint(50, 150), rng.randint(50, 150))
            )
            for n in range(int(30 * rate))
        ]
        outcome = run(PolicyName.MIXED, arrivals, num_blocks=128, max_num_seqs=64)
        ended = [ending for ending in outcome.endings if ending.timings.finished_s <= 30.0]
        return sum(one.timings.num_output_tokens for one in ended) / 30.0

    peak = max(throughput(rate) for rate in (1.0, 2.0, 3.0))
    assert throughput(load * 2.0) >= 0.9 * peak


def test_without_kv_cache_every_token_computes_all_of_them_and_the_output_is_the_same() -> None:
    world = World(Setup(prefix_caching=False, use_kv_cache=False))
    world.add(ask("a", max_tokens=6))
    world.add(ask("b", prompt=(1, 0, 1), max_tokens=4))
    finish(world)  # compares with the tokens of a scheduler that keeps the cache
    computed = sum(row.num_tokens for plan in world.plans for row in plan.rows)
    assert computed == sum(range(8, 14)) + sum(range(3, 7))


def test_a_sequence_that_has_done_most_of_its_work_is_not_put_last() -> None:
    """With `deadline`, one that is preempted late has only the rest to do in time."""
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=64, max_model_len=256, policy=PolicyName.DEADLINE
    )
    costs = LinearCostModel(Coefficients(step_s=0.1, token_s=0.0))
    scheduler = Scheduler(config, KVBlockPool(32, 16), make_policy(config), costs)
    # 20 steps of 0.1 s, of which it has 2.4 s: it must begin by 0.4 s
    scheduler.add(request("most", 8, 20, timeout_s=2.4), 0.0)
    now = 0.0
    for _ in range(15):
        plan = scheduler.plan(now)
        assert plan is not None
        now += 0.1
        outputs = tuple(RowOutput((1,)) for _ in plan.rows)
        scheduler.commit(plan, StepResult(plan.step_id, outputs, 0.1), now)
        scheduler.expire(now)
    (sequence,) = scheduler._batch
    scheduler.pause("most", now)
    scheduler.add(request("other", 8, 20), now)
    scheduler.plan(now)  # it takes the slot of the paused one
    scheduler.resume("most", now)
    scheduler.expire(now)
    assert sequence.state is SequenceState.PREEMPTED
    assert not sequence.rank[1], "it was put last"
    scheduler.expire(now + 0.5)
    assert sequence.rank[1], "now it cannot end in time"


@pytest.mark.parametrize(
    ("num_outputs", "of_light", "most"),
    [
        (1, (40, 4), 2.5),
        (64, (40, 4), 2.2),
        (64, (15, 4), 2.8),
        (64, (15, 16), 2.8),
        (16, (100, 8), 2.2),
        (4, (12, 2), 3.5),
        (1, (12, 1), 2.9),
        (64, (100, 1), 1.8),
    ],
)
def test_while_tenants_share_the_device_none_waits_for_long_steps(
    num_outputs: int, of_light: tuple[int, int], most: float
) -> None:
    """A flood of prompts, or of rows, delays each request of another tenant three times at most, a
    very short one 3.5 times, but its first: until then the other one has the device for itself.
    """
    light = [
        Arrival(0.5 + 0.731 * number, request(f"b-{number}", *of_light, tenant="b"))
        for number in range(40)
    ]
    flood = [
        Arrival(0.0, request(f"a-{number}", 60, num_outputs, tenant="a")) for number in range(1000)
    ]

    def slowest_s(arrivals: list[Arrival]) -> float:
        outcome = run(PolicyName.FAIR, arrivals, max_num_seqs=16, max_num_batched_tokens=2048)
        ended = [one.timings for one in outcome.endings if one.request_id.startswith("b-")]
        assert len(ended) == len(light)
        ended.sort(key=lambda timings: timings.arrival_s)
        return max(timings.finished_s - timings.arrival_s for timings in ended[1:])

    assert slowest_s([*flood, *light]) <= most * slowest_s(light)


def test_prompts_of_which_a_token_takes_longer_than_a_shared_step_are_computed() -> None:
    """Also in a step that would be a turn of rows, if there are none."""
    costs = Coefficients(step_s=0.001, token_s=0.0005, row_s=0.0005, pair_s=1e-4)
    light, *heavy = (
        request("b", 4, 1, tenant="b"),
        *(request(f"a-{number}", 600, 4, tenant="a") for number in range(3)),
    )
    outcome = run(PolicyName.FAIR, at_once([light, *heavy]), costs)
    assert sorted(ending.request_id for ending in outcome.endings) == ["a-0", "a-1", "a-2", "b"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from([0.5, 1.0, 3.0]))))
def test_who_has_many_requests_is_counted_as_they_come_and_end(
    events: list[tuple[str, bool, float]],
) -> None:
    """By the weights and numbers of those that have not ended."""
    order = FairOrder(10.0)
    live: dict[str, list[Sequence]] = {tenant: [] for tenant in "abc"}
    weights: dict[str, float] = {}
    for number, (tenant, comes, weight) in enumerate(events):
        if comes or not live[tenant]:
            asked = request(f"{tenant}-{number}", 4, 4, tenant=tenant, weight=weight)
            sequence = Sequence(asked, 0, number, float(number), 0.0)
            order.added(sequence)
            live[tenant].append(sequence)
            weights[tenant] = weight
        else:
            order.ended(live[tenant].pop())
        total = sum(weights[one] for one in live if live[one])
        num_live = sum(map(len, live.values()))
        for one, sequences in live.items():
            if sequences:
                part = weights[one] / max(total, 2 * weights[one])
                expected = len(sequences) >= num_live * part - 1e-9
                assert order.is_crowding(sequences[0].request) is expected
