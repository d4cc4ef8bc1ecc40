"""Prompts that are computed in one step: no row is a part of one, whatever else waits."""

import random

import pytest

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.types import Pooling, Request, RowOutput, SamplingParams, StepResult

MOST = 48


@pytest.mark.parametrize("policy", list(PolicyName))
def test_every_row_is_a_complete_prompt(policy: PolicyName) -> None:
    settings = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=MOST,
        max_model_len=MOST,
        policy=policy,
        complete_prompts=True,
    )
    pool = KVBlockPool(40, 4, False)
    costs = LinearCostModel()
    scheduler = Scheduler(settings, pool, make_policy(settings), costs)
    draws = random.Random(5)
    lens = [MOST, 1, MOST - 1, *(draws.randint(1, MOST) for _ in range(40))]
    for index, size in enumerate(lens):
        scheduler.add(
            Request(
                request_id=str(index),
                prompt_token_ids=tuple(range(1, size + 1)),
                sampling=SamplingParams(max_tokens=1),
                pooling=Pooling.CLS,
            ),
            now=0.0,
        )
    seen: list[int] = []
    now = 0.0
    while len(seen) < len(lens):
        now += 1.0
        plan = scheduler.plan(now)
        assert plan is not None, "a prompt that fits a step is never stuck"
        for row in plan.rows:
            assert row.start == 0 and row.pools
            assert row.num_tokens == len(row.token_ids)
        seen += [row.num_tokens for row in plan.rows]
        outputs = tuple(RowOutput(embedding=(1.0,)) for _ in plan.rows)
        scheduler.commit(plan, StepResult(plan.step_id, outputs, 0.1), now)
    assert sorted(seen) == sorted(lens)
