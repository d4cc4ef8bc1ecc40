"""What a preempted sequence computes again is not charged; drafts in flight are not computed."""

import pytest

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.types import Request, RowOutput, SamplingParams, StepPlan, StepResult


@pytest.mark.parametrize("num_accepted", [0, 3, 8])
def test_only_accepted_drafts_of_a_preempted_sequence_count_as_computed(num_accepted: int) -> None:
    config = SchedulerConfig(
        max_num_seqs=2, max_model_len=119, pipeline_depth=2, num_speculative_tokens=8
    )
    scheduler = Scheduler(config, KVBlockPool(30, 4), make_policy(config), LinearCostModel())
    now = 0.0

    def commit(plan: StepPlan, most: int) -> int:
        nonlocal now
        now += 0.01
        outputs = tuple(
            RowOutput(
                (7,) * (1 + min(num_accepted, row.num_drafts)),
                draft_token_ids=(7,) * min(most, row.num_next_drafts),
            )
            if row.emits
            else RowOutput()
            for row in plan.rows
        )
        before_s = scheduler.stats().totals.recomputed_s
        scheduler.commit(plan, StepResult(plan.step_id, outputs, 0.01), now)
        again_s = scheduler.stats().totals.recomputed_s - before_s
        return round(again_s / 0.01 * plan.num_tokens)

    def plan() -> StepPlan:
        planned = scheduler.plan(now)
        assert planned is not None
        return planned

    scheduler.add(Request("one", (5,) * 8, SamplingParams(max_tokens=60, ignore_eos=True)), now)
    commit(plan(), most=8)
    drafted = plan()
    assert [row.num_drafts for row in drafted.rows] == [8]
    scheduler.pause("one", now)
    scheduler.add(Request("big", (6,) * 110, SamplingParams(max_tokens=1, ignore_eos=True)), now)
    big = plan()  # needs the blocks of the paused one
    commit(drafted, most=0)
    commit(big, most=0)
    scheduler.resume("one", now)
    scheduler.reset_prefix_cache()
    assert commit(plan(), most=0) == 9 + num_accepted
    assert commit(plan(), most=0) == 0
