"""Drafts use only the tokens of a step that no row and no prompt needs; rows take turns."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.block_pool import KVBlockPool
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.scheduler import Scheduler
from quickstep.types import Request, RowOutput, SamplingParams, StepPlan, StepResult

_LONG = 1_000_000


def _run(
    num_rows: int,
    num_tokens: int,
    num_drafts: int,
    late_prompt: int,
    accepts: bool,
    policy: PolicyName = PolicyName.MIXED,
    num_steps: int = 60,
) -> tuple[int, int]:
    """The longest gap between two tokens of a row that runs, and how many steps the first token of
    a prompt that comes at the third step takes; in steps that cost nearly nothing.
    """
    config = SchedulerConfig(
        max_num_seqs=num_rows + 1,
        max_num_batched_tokens=num_tokens,
        max_model_len=_LONG,
        num_speculative_tokens=num_drafts,
        policy=policy,
        inter_token_target_s=1e9,
    )
    pool = KVBlockPool(200_000, 16)
    scheduler = Scheduler(config, pool, make_policy(config), LinearCostModel())
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    for index in range(num_rows):
        tokens = (index + 1,) * 3
        scheduler.add(Request(f"row{index}", tokens, sampling, tenant=f"t{index % 3}"), 0.0)
    steps, last_step, longest, first = 0, dict[str, int](), 0, 0
    late_at = 0
    while steps < num_steps or not first:
        if not late_at and len(last_step) == num_rows:
            late_at = steps
            late = Request("late", (999_999,) * late_prompt, sampling, tenant="late")
            scheduler.add(late, 1e-3 * steps)
        plan = scheduler.plan(1e-3 * steps)
        assert plan is not None
        outcome = scheduler.commit(plan, _result(plan, accepts), 1e-3 * (steps + 1))
        for output in outcome.outputs:
            name = output.request_id
            longest = max(longest, steps - last_step.get(name, steps))
            last_step[name] = steps
            if name == "late" and not first:
                first = steps - late_at + 1
        steps += 1
        assert steps < 40 * num_steps, "something starves"
    longest = max(longest, *(steps - 1 - step for step in last_step.values()))
    return longest, first


def _result(plan: StepPlan, accepts: bool) -> StepResult:
    outputs = tuple(
        RowOutput((7,) * (1 + accepts * row.num_drafts), draft_token_ids=(7,) * row.num_next_drafts)
        if row.emits
        else RowOutput()
        for row in plan.rows
    )
    return StepResult(plan.step_id, outputs, 1e-3)


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 24),
    num_tokens=st.integers(2, 48),
    num_drafts=st.integers(1, 8),
    late_prompt=st.integers(1, 100),
    accepts=st.booleans(),
    policy=st.sampled_from((PolicyName.MIXED, PolicyName.FCFS, PolicyName.FAIR)),
)
def test_no_sequence_waits_longer_with_drafts_than_without(
    num_rows: int,
    num_tokens: int,
    num_drafts: int,
    late_prompt: int,
    accepts: bool,
    policy: PolicyName,
) -> None:
    plain = _run(num_rows, num_tokens, 0, late_prompt, accepts, policy)
    drafted = _run(num_rows, num_tokens, num_drafts, late_prompt, accepts, policy)
    assert drafted[0] <= plain[0]
    assert drafted[1] <= plain[1]


def test_more_rows_than_tokens_take_turns_and_leave_some_for_a_prompt() -> None:
    longest, first = _run(56, 16, 0, late_prompt=64, accepts=True)
    assert longest <= 56 // 8 + 1
    assert first <= 64 // 8 + 1


def test_drafts_that_do_not_suffice_for_all_are_divided_evenly() -> None:
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=32, max_model_len=512, num_speculative_tokens=8
    )
    pool = KVBlockPool(1000, 16)
    scheduler = Scheduler(config, pool, make_policy(config), LinearCostModel())
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    for index in range(8):
        scheduler.add(Request(f"row{index}", (index + 1,) * 3, sampling), 0.0)
    for step in range(20):
        plan = scheduler.plan(1e-3 * step)
        assert plan is not None
        num_drafts = [row.num_drafts for row in plan.rows]
        assert max(num_drafts) - min(num_drafts) <= 1
        scheduler.commit(plan, _result(plan, True), 1e-3 * (step + 1))
