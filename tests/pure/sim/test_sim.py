"""The simulator drives the engine's own scheduler on a virtual clock."""

from __future__ import annotations

import gc
import math

import pytest
from msgspec.structs import replace
from simulated_runs import COSTS, ask, run

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.sim.engine import ClockExecutor, VirtualClock
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival
from quickstep.sim.simulate import simulate
from quickstep.types import (
    Admission,
    FinishReason,
    Phase,
    SamplingParams,
    StepPlan,
    StepRow,
)


def test_one_request_takes_what_its_steps_take() -> None:
    outcome = run([Arrival(1.0, ask("a", 100, 3))])
    (ending,) = outcome.endings
    timings = ending.timings
    assert ending.reason is FinishReason.MAX_TOKENS
    assert timings.queue_s == 0.0
    assert timings.first_token_s == pytest.approx(1.110)
    assert timings.finished_s == pytest.approx(1.110 + 2 * 0.011)
    assert timings.device_s == pytest.approx(0.110 + 2 * 0.011)


def test_requests_share_steps() -> None:
    arrivals = [Arrival(0.0, ask(name, 10, 5)) for name in "abcd"]
    outcome = run(arrivals)
    assert len(outcome.records) == 5
    assert outcome.records[1].num_decode_rows == 4


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", list(PolicyName))
def test_all_seconds_are_charged(depth: int, policy: PolicyName) -> None:
    arrivals = [
        Arrival(0.02 * number, ask(f"r{number}", 20 + 30 * (number % 5), 1 + number % 7))
        for number in range(60)
    ]
    outcome = run(arrivals, depth, policy)
    assert len(outcome.endings) == 60
    charged = math.fsum(ending.timings.device_s for ending in outcome.endings)
    busy = math.fsum(record.seconds for record in outcome.records)
    assert charged == pytest.approx(busy, rel=1e-12)


def test_rows_that_seem_free_are_charged_by_tokens() -> None:
    free = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0)
    outcome = run([Arrival(0.0, ask("a", 30, 1)), Arrival(0.0, ask("b", 10, 1))], believed=free)
    seconds = {ending.request_id: ending.timings.device_s for ending in outcome.endings}
    assert seconds == pytest.approx({"a": 0.050 * 3 / 4, "b": 0.050 / 4})


def num_in_cycles(num_requests: int) -> int:
    """How many objects the collector frees after a simulation."""
    gc.collect()
    run([Arrival(0.01 * number, ask(f"r{number}", 40, 20)) for number in range(num_requests)])
    return gc.collect()


def test_requests_leave_nothing_to_the_collector_which_does_not_run_meanwhile() -> None:
    num_in_cycles(10)
    assert num_in_cycles(110) < num_in_cycles(10) + 100
    seen: list[bool] = []
    scheduler = GroupedScheduler(
        config := SchedulerConfig(max_num_seqs=4, max_model_len=64),
        KVBlockPool(16, 16),
        make_policy(config),
        LinearCostModel(),
    )
    arrivals = [Arrival(0.0, ask("a", 10, 5))]
    simulate(
        arrivals, scheduler, LinearCostModel(COSTS), progress=lambda _: seen.append(gc.isenabled())
    )
    assert seen == [False]
    assert gc.isenabled()


def test_a_simulation_repeats_itself() -> None:
    arrivals = [Arrival(0.03 * number, ask(f"r{number}", 40, 6)) for number in range(30)]
    first, second = run(arrivals, depth=2), run(list(reversed(arrivals)), depth=2)
    assert first == second


def test_a_deadline_comes_true_on_the_virtual_clock() -> None:
    outcome = run([Arrival(0.0, ask("a", 10, 400, timeout_s=0.5))])
    (ending,) = outcome.endings
    assert ending.reason is FinishReason.DEADLINE
    assert ending.timings.finished_s == 0.5


def test_a_load_of_an_adapter_takes_its_time_and_delays_no_other_request() -> None:
    config = SchedulerConfig(8, 512, 1024, max_loras=1)
    costs = LinearCostModel(COSTS)
    ended = []
    scheduler = GroupedScheduler(config, KVBlockPool(64, 16), make_policy(config), costs)
    for name in ("a", "b"):
        scheduler.register_adapter(name, 1)
    arrivals = [
        Arrival(0.0, ask("plain", 20, 30)),
        Arrival(0.0, replace(ask("first", 20, 30), adapter_id="a")),
        Arrival(0.1, replace(ask("second", 20, 3), adapter_id="b")),
    ]
    done = simulate(arrivals, scheduler, costs, adapter_load_s=0.5, progress=ended.append)
    timings = {ending.request_id: ending.timings for ending in done.endings}
    alone = run([arrivals[0]]).endings[0].timings
    assert timings["plain"].first_token_s == alone.first_token_s
    assert timings["first"].adapter_s == pytest.approx(0.5)
    left_s = timings["first"].finished_s  # it made way only then
    assert timings["second"].adapter_s == pytest.approx(left_s - 0.1 + 0.5)
    assert ended == [1, 2, 3]


def test_refused_requests_are_listed_with_the_reason() -> None:
    outcome = run([Arrival(0.0, ask("long", 600, 1)), Arrival(0.0, ask("fine", 6, 1))])
    assert [ending.request_id for ending in outcome.endings] == ["fine"]
    assert outcome.refused[0][0] == "long"
    assert "600 tokens" in outcome.refused[0][1]


def test_the_clock_executor_runs_steps_one_after_the_other() -> None:
    clock = VirtualClock()
    executor = ClockExecutor(clock, LinearCostModel(COSTS))
    row = StepRow(0, 0, 10, (1,) * 10, (0,), Phase.PREFILL, True, 0)
    first, second = (executor.submit(StepPlan(step_id, (row,))) for step_id in (0, 1))
    assert (first.ready_at_s, second.ready_at_s) == pytest.approx((0.020, 0.040))
    assert not first.done()
    assert second.result().outputs[0].token_ids == (0,)
    assert clock.now == pytest.approx(0.040)
    assert first.done()
    executor.close()


def test_a_simulation_runs_on_a_stored_fit() -> None:
    measured = LinearCostModel(COSTS)
    for num_tokens in (1, 10, 100):
        load = StepLoad.of_span(0, num_tokens, num_logits_rows=1)
        measured.observe(load, 0.02 + 0.002 * num_tokens)
    fit = measured.fit()
    assert fit is not None
    pool = KVBlockPool(64, 4)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)
    scheduler = GroupedScheduler(config, pool, make_policy(config), LinearCostModel.of_fit(fit))
    machine = LinearCostModel.of_fit(fit)
    outcome = simulate([Arrival(0.0, ask("a", 30, 1))], scheduler, machine)
    expected = machine.seconds(StepLoad.of_span(0, 30, num_logits_rows=1))
    assert outcome.finished_s == pytest.approx(expected)


def test_the_clock_executor_prices_what_rows_list() -> None:
    costs = LinearCostModel(replace(COSTS, logprobs_row_s=0.5))
    executor = ClockExecutor(VirtualClock(), costs)
    sampling = SamplingParams(logprobs=2)
    row = StepRow(0, 0, 10, (1,) * 10, (0,), Phase.PREFILL, True, 0)
    admission = Admission(0, "a", (1,) * 10, 10, sampling, 0)
    first = executor.submit(StepPlan(0, (row,), (admission,)))
    assert first.ready_at_s == pytest.approx(0.520)


def test_a_policy_that_waits_lets_a_step_in_flight_end() -> None:
    """Its only row was cancelled, and the batch for those that wait is overdue."""
    arrivals = [
        Arrival(0.0, ask("a", 200, 9), cancel_after_s=0.11),
        Arrival(0.0, ask("b", 200, 9), cancel_after_s=0.20),
        Arrival(0.11, ask("c", 20, 2)),
        Arrival(0.12, ask("d", 20, 2)),
    ]
    outcome = run(arrivals, policy=PolicyName.DYNAMIC)
    assert len(outcome.endings) == 4
