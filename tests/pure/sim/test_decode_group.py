"""Rows that are planned together, and steps that are advanced in one go, give what listed rows and
stepping one by one give, to the bit.
"""

from __future__ import annotations

import math
from random import Random

import pytest

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.policies import Policy, make_policy
from quickstep.core.resources.block_pool import KVBlockPool, chain_digest
from quickstep.sim.engine import SimulatedEngine, VirtualClock, quick_digest
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival, Ending, Simulation
from quickstep.sim.simulate import simulate
from quickstep.sim.workload import Clients, Lengths, PrefixLevel, Workload
from quickstep.types import Request, SamplingParams, SequenceOutput, StepPlan

COSTS = Coefficients(0.0065, 2e-5, 1e-6, 1e-7, 3e-8, score_s=0.0, logits_row_s=1e-6)


def random_simulation(seed: int, step_by_step: bool) -> tuple[Simulation, Observed]:
    """A simulation of few blocks or many, and its scheduler."""
    rng = Random(seed)
    config = SchedulerConfig(
        max_num_seqs=rng.choice((3, 8)),
        max_num_batched_tokens=rng.choice((16, 64)),
        max_model_len=128,
        pipeline_depth=rng.choice((1, 1, 1, 2)),
        policy=rng.choice(list(PolicyName)),
    )
    workload = Workload(
        Lengths(12, 0.5, 1, 60),
        Lengths(20, 0.8, 1, 100),
        rng.choice(((), (PrefixLevel(2, 9),))),
        mean_turns=rng.choice((1.0, 3.0)),
        think_s=rng.choice((0.0, 0.05)),
        cancelled=rng.choice((0.0, 0.2)),
        cancel_after_s=0.1,
    )
    clients = Clients(workload, rng, 30, 128, closed_loop=rng.random() < 0.3)
    rate = rng.choice((2.0, 10.0, 100.0))
    arrivals = clients.opening(sorted(20 * rng.random() / rate for _ in range(20)))
    arrivals += [
        Arrival(at_s, Request(f"two-{at_s}", (7,) * 9, SamplingParams(max_tokens=9, n=2)))
        for at_s in (0.0, 0.2)
    ]
    arrivals += [
        Arrival(at_s, Request(f"late-{at_s}", (5, 6), SamplingParams(max_tokens=50), timeout_s=0.2))
        for at_s in (0.0, 0.03)
    ]
    sizes = rng.choice((12, 40, 200)), rng.choice((1, 4, 16))
    digest = chain_digest if step_by_step else quick_digest
    pool = KVBlockPool(*sizes, prefix_caching=rng.random() < 0.8, digest=digest)
    believed = rng.choice((COSTS, None))  # the scheduler's model learns
    checks = rng.random() < 0.5
    scheduler = Observed(config, pool, make_policy(config), LinearCostModel(believed), checks)

    def follow(ending: Ending) -> list[Arrival]:
        return clients.follow(ending) if ending.request_id.isdecimal() else []

    outcome = simulate(
        arrivals, scheduler, LinearCostModel(COSTS), follow, step_by_step=step_by_step
    )
    scheduler.check()
    return outcome, scheduler


class Observed(GroupedScheduler):
    """A scheduler that counts its plans and their rows, and checks its state before each of them
    if it `checks`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: KVBlockPool,
        policy: Policy,
        cost_model: LinearCostModel,
        checks: bool,
    ) -> None:
        super().__init__(config, pool, policy, cost_model)
        self.cost_model = cost_model
        self.num_plans = self.num_listed_rows = self.num_grouped_rows = 0
        self._checks = checks

    def plan(self, now: float) -> StepPlan | None:
        """Count it."""
        self.num_plans += 1
        if self._checks:
            self.check()
        plan = super().plan(now)
        if plan is not None:
            self.num_listed_rows += len(plan.rows)
            self.num_grouped_rows += plan.num_grouped_rows
        return plan

    def add(self, request: Request, now: float) -> None:
        """Check it while a step is in flight, too."""
        super().add(request, now)
        if self._checks:
            self.check()


@pytest.mark.parametrize("seed", range(40))
def test_rows_together_equal_listed_rows_and_steps_one_by_one(seed: int) -> None:
    fast, grouping = random_simulation(seed, step_by_step=False)
    slow, listing = random_simulation(seed, step_by_step=True)
    assert fast.records == slow.records
    assert fast == slow
    assert grouping.stats() == listing.stats()
    assert grouping.cost_model.fit() == listing.cost_model.fit()
    assert not listing.num_grouped_rows


def paused_and_resumed(seed: int, step_by_step: bool) -> list[SequenceOutput]:
    """The ends of requests that are paused, resumed and aborted at any moment."""
    rng, clock = Random(seed), VirtualClock()
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    pool, costs = KVBlockPool(rng.choice((10, 40)), 4), LinearCostModel(COSTS)
    scheduler = GroupedScheduler(config, pool, make_policy(config), costs)
    engine = SimulatedEngine(clock, scheduler, LinearCostModel(COSTS), step_by_step=step_by_step)
    names = [str(number) for number in range(6)]
    for name in names:
        prompt = tuple(range(rng.randint(1, 12)))
        scheduler.add(Request(name, prompt, SamplingParams(max_tokens=rng.randint(1, 24))), 0.0)
    outputs: list[SequenceOutput] = []
    while scheduler.has_work():
        engine.start_steps()
        if rng.random() < 0.4:
            call = rng.choice((scheduler.pause, scheduler.resume, scheduler.resume))
            call(rng.choice(names), clock.now)
        if rng.random() < 0.03:
            outputs += scheduler.abort(rng.choice(names), clock.now)
        scheduler.check()
        next_s = engine.next_s()
        if next_s is None:  # all that live are paused
            for name in names:
                scheduler.resume(name, clock.now)
        else:
            clock.now = next_s
        outputs += engine.finish_steps()
    return [output for output in outputs if output.finish_reason is not None]


@pytest.mark.parametrize("seed", range(40))
def test_a_row_in_flight_counts_although_its_sequence_is_paused(seed: int) -> None:
    grouped = paused_and_resumed(seed, step_by_step=False)
    assert grouped == paused_and_resumed(seed, step_by_step=True)
    assert len(grouped) == 6


def test_many_steps_are_advanced_in_one_go_and_many_rows_are_not_listed() -> None:
    """The comparison has something to compare."""
    fast = [random_simulation(seed, step_by_step=False)[1] for seed in range(20)]
    slow = [random_simulation(seed, step_by_step=True)[1] for seed in range(20)]
    assert 4 * sum(one.num_plans for one in fast) < 3 * sum(one.num_plans for one in slow)
    assert sum(one.num_grouped_rows for one in fast) > sum(one.num_listed_rows for one in fast) / 4
    assert any(5 * one.num_plans < other.num_plans for one, other in zip(fast, slow, strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_charges_add_up(seed: int) -> None:
    """In whole numbers, whatever is charged together."""
    outcome, scheduler = random_simulation(seed, step_by_step=False)
    totals = scheduler.stats().totals
    charged_s = math.fsum(ending.timings.device_s for ending in outcome.endings)
    assert totals.attributed_s == pytest.approx(charged_s, rel=1e-9)
    for record in outcome.records:
        charged_s = record.decode_s + record.prefill_s
        if charged_s:  # else all rows had ended before it was over
            assert charged_s == pytest.approx(record.seconds, rel=1e-9)
