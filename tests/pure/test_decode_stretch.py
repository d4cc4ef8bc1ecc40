"""Steps that only decode, advanced in one go, give what stepping one by one gives, to the bit."""

from __future__ import annotations

from random import Random

import pytest

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.block_pool import KVBlockPool
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.scheduler import Scheduler
from quickstep.sim.simulate import Arrival, Ending, Simulation, simulate
from quickstep.sim.workload import Clients, Lengths, PrefixLevel, Workload
from quickstep.types import Request, SamplingParams, StepPlan

COSTS = Coefficients(0.0065, 2e-5, 1e-6, 1e-7, 3e-8, score_s=0.0, logits_row_s=1e-6)


def random_simulation(seed: int, step_by_step: bool) -> tuple[Simulation, int]:
    """A simulation of few blocks or many, and how many plans its scheduler made."""
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
        Arrival(at_s, Request(f"late-{at_s}", (5, 6), SamplingParams(max_tokens=50), timeout_s=0.2))
        for at_s in (0.0, 0.03)
    ]
    pool = KVBlockPool(rng.choice((12, 40, 200)), rng.choice((1, 4, 16)), rng.random() < 0.8)
    believed = rng.choice((COSTS, None))  # the scheduler's model learns
    scheduler = Counting(config, pool, make_policy(config), LinearCostModel(believed))

    def follow(ending: Ending) -> list[Arrival]:
        return [] if ending.request_id.startswith("late") else clients.follow(ending)

    outcome = simulate(
        arrivals, scheduler, LinearCostModel(COSTS), follow, step_by_step=step_by_step
    )
    scheduler.check()
    return outcome, scheduler.num_plans


class Counting(Scheduler):
    """A scheduler that counts its plans."""

    num_plans = 0

    def plan(self, now: float) -> StepPlan | None:
        """Count it."""
        self.num_plans += 1
        return super().plan(now)


@pytest.mark.parametrize("seed", range(60))
def test_a_stretch_equals_its_steps_one_by_one(seed: int) -> None:
    fast, _ = random_simulation(seed, step_by_step=False)
    slow, _ = random_simulation(seed, step_by_step=True)
    assert fast.records == slow.records
    assert fast == slow


def test_many_steps_are_advanced_in_stretches() -> None:
    """The comparison has something to compare: many plans are never made."""
    counts = [
        [random_simulation(seed, step_by_step)[1] for step_by_step in (False, True)]
        for seed in range(20)
    ]
    assert 4 * sum(fast for fast, _ in counts) < 3 * sum(slow for _, slow in counts)
    assert any(5 * fast < slow for fast, slow in counts)
