"""Small simulations whose times are easy to add up by hand."""

from __future__ import annotations

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival, Simulation
from quickstep.sim.simulate import simulate
from quickstep.types import (
    Request,
    SamplingParams,
)

# 10 ms a step and 1 ms a token: easy to add up by hand.
COSTS = Coefficients(step_s=0.010, token_s=0.001, row_s=0.0, kv_token_s=0.0, pair_s=0.0)


def ask(name: str, prompt_len: int, max_tokens: int, timeout_s: float | None = None) -> Request:
    prompt = tuple(range(prompt_len))
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), timeout_s=timeout_s)


def run(
    arrivals: list[Arrival],
    depth: int = 1,
    policy: PolicyName = PolicyName.MIXED,
    believed: Coefficients = COSTS,
) -> Simulation:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=512,
        pipeline_depth=depth,
        policy=policy,
    )
    pool = KVBlockPool(64, 16)
    scheduler = GroupedScheduler(config, pool, make_policy(config), LinearCostModel(believed))
    outcome = simulate(arrivals, scheduler, LinearCostModel(COSTS))
    scheduler.check()
    return outcome
