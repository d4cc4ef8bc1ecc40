"""A pipeline on a virtual clock: the scheduler's own steps pass the stages one after the other."""

from __future__ import annotations

from random import Random

import pytest

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.core.overhead import ScaledCosts, StageTimes
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.errors import FirstTokenTooLate
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival, Simulation
from quickstep.sim.simulate import simulate
from quickstep.types import Request, SamplingParams

STEP_S = 0.010


def run(num_requests: int, stages: StageTimes, num_outputs: int = 21, **sizes: int) -> Simulation:
    """Requests of one prompt token that come together; a step takes 10 ms in all stages."""
    costs = LinearCostModel(Coefficients(step_s=STEP_S))
    config = SchedulerConfig(num_stages=stages.num_stages, max_model_len=400, **sizes)
    scheduler = GroupedScheduler(
        config,
        KVBlockPool(400, 4),
        make_policy(config),
        ScaledCosts(costs, 1.0 / stages.num_stages),
    )
    sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
    arrivals = [Arrival(0.0, Request(str(n), (n,), sampling)) for n in range(num_requests)]
    outcome = simulate(arrivals, scheduler, costs, stages=stages)
    scheduler.check()
    return outcome


def bubble(outcome: Simulation) -> float:
    """The part of the time that the stages did not compute."""
    return sum(record.bubble_s for record in outcome.records) / outcome.finished_s


def test_a_stream_has_one_stage_of_the_pipeline_at_a_time() -> None:
    outcome = run(1, StageTimes.equal(2))
    assert outcome.finished_s == pytest.approx(21 * STEP_S)
    assert bubble(outcome) == pytest.approx(0.5)
    assert all(record.seconds == pytest.approx(STEP_S / 2) for record in outcome.records)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_as_many_batches_as_stages_fill_the_pipeline(num_stages: int) -> None:
    outcome = run(8, StageTimes.equal(num_stages))
    # after the prompts, each step has its part of the rows
    decodes = [record for record in outcome.records if not record.num_prefill_rows]
    assert {record.num_decode_rows for record in decodes[:-num_stages]} <= {8 // num_stages}
    assert bubble(outcome) < 0.12  # at the begin, at the end, and the prompts' one step
    assert outcome.finished_s < 21 * STEP_S * 1.2


def test_stages_that_differ_wait_for_the_longest() -> None:
    equal, uneven = run(8, StageTimes.equal(2)), run(8, StageTimes((0.3, 0.7)))
    assert uneven.finished_s > 1.3 * equal.finished_s
    assert bubble(uneven) > bubble(equal) + 0.2


def test_what_is_between_stages_delays_a_stream_and_what_the_engine_does_occupies_a_stage() -> None:
    assert run(1, StageTimes((0.5, 0.5), hop_s=0.001)).finished_s == pytest.approx(21 * 0.011)
    busy = run(8, StageTimes((0.5, 0.5), overhead_s=0.005))
    assert busy.finished_s > 1.7 * run(8, StageTimes.equal(2)).finished_s


def test_random_pipelines_end_every_request_and_account_for_every_second() -> None:
    for seed in range(40):
        rng = Random(seed)
        num_stages = rng.choice((2, 3, 4))
        parts = [rng.uniform(0.5, 1.0) for _ in range(num_stages)]
        stages = StageTimes(tuple(part / sum(parts) for part in parts), rng.choice((0.0, 1e-3)))
        num_requests = rng.randint(1, 30)
        outcome = run(num_requests, stages, rng.randint(2, 40), max_num_seqs=rng.choice((4, 16)))
        assert len(outcome.endings) == num_requests, seed
        seconds = sum(record.seconds + record.bubble_s for record in outcome.records)
        assert seconds == pytest.approx(outcome.finished_s), seed


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_predictions_know_that_a_token_passes_all_stages(num_stages: int) -> None:
    ((timings,),) = [[ending.timings for ending in run(1, StageTimes.equal(num_stages)).endings]]
    assert timings.prefill_s == pytest.approx(timings.unloaded_prefill_s)
    assert timings.decode_s == pytest.approx(timings.unloaded_decode_s)
    assert timings.device_s == pytest.approx(21 * STEP_S / num_stages)


@pytest.mark.parametrize("num_prompt", [16, 100, 300])
def test_the_parts_of_a_prompt_pass_the_stages_in_the_predicted_time(num_prompt: int) -> None:
    costs = LinearCostModel(Coefficients(step_s=0.001, token_s=0.0002))  # of all stages
    one_stage = ScaledCosts(costs, 0.5)
    config = SchedulerConfig(num_stages=2)
    scheduler = GroupedScheduler(config, KVBlockPool(400, 4), make_policy(config), one_stage)
    request = Request("r", tuple(range(num_prompt)), SamplingParams(max_tokens=1))
    outcome = simulate([Arrival(0.0, request)], scheduler, costs, stages=StageTimes.equal(2))
    (timings,) = [ending.timings for ending in outcome.endings]
    in_one_step_s = costs.seconds(StepLoad.of_span(0, num_prompt))
    assert timings.prefill_s < in_one_step_s or num_prompt == 16
    assert timings.prefill_s == pytest.approx(timings.unloaded_prefill_s, rel=0.15)


def test_a_first_token_that_has_to_pass_the_stages_too_late_is_refused() -> None:
    costs = LinearCostModel(Coefficients(step_s=0.1))  # of the mean stage
    config = SchedulerConfig(num_stages=3)
    scheduler = GroupedScheduler(config, KVBlockPool(40, 4), make_policy(config), costs)
    scheduler.add(Request("late", (1,), SamplingParams(), ttft_deadline_s=0.31), 0.0)
    with pytest.raises(FirstTokenTooLate):
        scheduler.add(Request("never", (1,), SamplingParams(), ttft_deadline_s=0.29), 0.0)
