"""The policy `fair`: what is reserved for a sequence is what it will be charged."""

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.core.sequence import Sequence
from quickstep.core.service_order import FairOrder
from quickstep.types import Request, RowOutput, SamplingParams, StepResult


def test_long_outputs_get_as_much_as_long_prompts() -> None:
    machine = LinearCostModel(
        Coefficients(step_s=5e-3, token_s=1e-4, row_s=2e-4, kv_token_s=1e-7, logits_row_s=2e-4)
    )
    config = SchedulerConfig(policy=PolicyName.FAIR, max_num_seqs=16, max_model_len=8192)
    pool = KVBlockPool(8000, 16)
    scheduler = Scheduler(config, pool, make_policy(config), LinearCostModel())
    sizes = {"prompts": (2000, 8), "outputs": (50, 300)}
    live, spent_s, number, now = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0.0), 0, 0.0
    while now < 30.0:
        for tenant, (num_prompt, num_outputs) in sizes.items():
            for _ in range(20 - live[tenant]):
                number += 1
                sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
                prompt = (number,) * num_prompt
                request = Request(f"{tenant}-{number}", prompt, sampling, tenant=tenant)
                scheduler.add(request, now)
                live[tenant] += 1
        plan = scheduler.plan(now)
        assert plan is not None
        seconds = machine.seconds(StepLoad.of_plan(plan))
        now += seconds
        outputs = tuple(RowOutput((7,) * row.emits) for row in plan.rows)
        for output in scheduler.commit(
            plan, StepResult(plan.step_id, outputs, seconds), now
        ).outputs:
            if output.timings is not None:
                tenant = output.request_id.split("-")[0]
                live[tenant] -= 1
                spent_s[tenant] += output.timings.device_s
    assert 0.4 < spent_s["outputs"] / sum(spent_s.values()) < 0.6


def test_an_idle_tenant_that_received_more_than_others_is_not_forgotten_first() -> None:
    order = FairOrder(10.0)
    config = SchedulerConfig(policy=PolicyName.FAIR)

    def sequence(tenant: str) -> Sequence:
        scheduler = Scheduler(config, KVBlockPool(8, 16), make_policy(config), LinearCostModel())
        scheduler.add(Request("r", (1,), tenant=tenant), 0.0)
        return next(iter(scheduler._waiting))

    order.added(sequence("present"))  # the others do not begin anew
    greedy = sequence("greedy")
    order.added(greedy)
    order.charged(greedy, 100.0)
    order.ended(greedy)
    for index in range(1100):
        one = sequence(f"t{index}")
        order.added(one)
        order.charged(one, 1.0)
        order.ended(one)
    assert order.queue_rank("greedy") == 100.0
