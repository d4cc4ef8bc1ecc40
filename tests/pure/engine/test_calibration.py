"""Calibration on a machine with known costs: what it runs, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.engine.step_times.calibration import (
    MeasuredStep,
    StepKind,
    StepLimits,
    calibrate,
    evaluate,
    fit_steps,
)
from quickstep.errors import EngineError
from quickstep.types import (
    Admission,
    Grammar,
    Phase,
    RowFailure,
    RowOutput,
    StepPlan,
    StepResult,
)

LIMITS = StepLimits(
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_model_len=512,
    block_size=16,
    num_blocks=300,
    vocab_size=1000,
    grammar=Grammar("regex", "a{1000}"),
)
START = Coefficients.of_vocabulary(1000)
MACHINE = Coefficients(
    step_s=4e-3,
    token_s=1e-4,
    row_s=2e-5,
    kv_token_s=4e-7,
    pair_s=3e-8,
    score_s=5e-5,
    logits_row_s=5e-5,
    grammar_row_s=4e-4,
    logprobs_row_s=3e-4,
)


class DoneTicket:
    def __init__(self, outcome: StepResult) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._outcome

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)


class LinearExecutor:
    """Takes as long as `MACHINE`, on its own clock, and checks plans as a runner does. In one
    second of each `busy_every`, something else slows it down.
    """

    def __init__(
        self, limits: StepLimits, noise: float = 0.0, factor: float = 1.0, busy_every: int = 0
    ) -> None:
        self.now = 0.0
        self._busy_every = busy_every
        self.loads: list[StepLoad] = []
        self.failures: tuple[RowFailure, ...] = ()
        self._limits = limits
        self._noise = noise
        self._factor = factor
        self._rng = Random(0)
        self._costs = LinearCostModel(MACHINE)
        self._slots: dict[int, Admission] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._num_outputs: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> DoneTicket:
        for slot in plan.released:
            del self._slots[slot]
        for one in plan.admitted:
            assert one.slot not in self._slots
            assert 0 <= one.slot < self._limits.max_num_seqs
            self._slots[one.slot], self._blocks[one.slot] = one, ()
            self._num_outputs[one.slot] = 0
        assert plan.num_tokens <= self._limits.max_num_batched_tokens
        for row in plan.rows:
            self._blocks[row.slot] += row.new_block_ids
            assert len(row.token_ids) == row.num_tokens > 0
            assert row.end <= len(self._blocks[row.slot]) * self._limits.block_size
            assert row.end < len(self._slots[row.slot].token_ids)
            assert row.num_tokens == 1 or row.phase is Phase.PREFILL
            assert row.output_position == self._num_outputs[row.slot]
            self._num_outputs[row.slot] += row.emits
        used = [block for slot in self._slots for block in self._blocks[slot]]
        assert len(used) == len(set(used))
        sampling = {slot: one.sampling for slot, one in self._slots.items()}
        load = StepLoad.of_plan(plan, sampling)
        seconds = self._factor * self._costs.seconds(load)
        seconds *= 1.0 + self._noise * self._rng.uniform(-1, 1)
        if self._busy_every and int(self.now) % self._busy_every == 0:
            seconds *= 1.7
        if plan.rows:
            self.loads.append(load)
        self.now += seconds
        outputs = (RowOutput(),) * len(plan.rows)
        return DoneTicket(StepResult(plan.step_id, outputs, seconds, self.failures))

    def reset(self) -> None:
        pass

    def wait_until_captured(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("noise", "factor"), [(0.0, 1.0), (0.03, 1.0), (0.03, 20.0)])
def test_it_finds_the_costs_of_a_machine(noise: float, factor: float) -> None:
    executor = LinearExecutor(LIMITS, noise, factor)
    result = calibrate(executor, LIMITS, START, 5.0 * factor, lambda: executor.now)
    assert [one.kind for one in result.errors] == list(StepKind)
    for error in result.errors:
        assert error.num_steps > 10
        assert error.mean <= 0.01 + noise
        assert error.mean <= error.p95 <= 0.05 + noise
    machine, model = LinearCostModel(MACHINE), LinearCostModel.of_fit(result.fit)
    plain = StepLoad.of_span(100, 1, num_logits_rows=1)
    for changes in ({}, {"num_grammar_rows": 1}, {"num_logprobs_rows": 1}):
        load = msgspec.structs.replace(plain, **changes)
        assert model.seconds(load) == pytest.approx(factor * machine.seconds(load), rel=0.05)


def test_steps_during_other_work_do_not_change_the_fit() -> None:
    executor = LinearExecutor(LIMITS, noise=0.03, busy_every=5)
    result = calibrate(executor, LIMITS, START, 20.0, lambda: executor.now)
    num_steps = result.num_slow + result.fit.num_steps
    assert 0.1 * num_steps < result.num_slow < 0.3 * num_steps
    machine, model = LinearCostModel(MACHINE), LinearCostModel.of_fit(result.fit)
    for load in executor.loads:
        assert model.seconds(load) == pytest.approx(machine.seconds(load), rel=0.05)
    for error in result.errors:
        assert error.median < 0.03 < error.mean  # the errors have the busy seconds


@pytest.mark.parametrize(("noise", "least_error"), [(0.0, 0.0), (0.1, 0.1 * 2 / 3 / 2**0.5)])
def test_it_says_how_much_equal_steps_differ(noise: float, least_error: float) -> None:
    executor = LinearExecutor(LIMITS, noise)
    result = calibrate(executor, LIMITS, START, 10.0, lambda: executor.now)
    assert result.noise == pytest.approx(least_error, abs=0.01)


def test_it_measures_steps_of_all_sizes_within_its_time() -> None:
    executor = LinearExecutor(LIMITS)
    result = calibrate(executor, LIMITS, START, 5.0, lambda: executor.now)
    assert 5.0 <= executor.now < 5.13
    low, high = result.fit.lowest, result.fit.highest
    assert (low.num_rows, high.num_rows) == (1, 16)
    assert low.num_kv_tokens < 10
    assert high.num_kv_tokens > 1500
    assert high.num_tokens > 200
    assert min(high.num_scored, high.num_grammar_rows, high.num_logprobs_rows) > 0


def test_a_single_step_takes_a_small_part_of_the_time() -> None:
    executor = LinearExecutor(LIMITS)
    calibrate(executor, LIMITS, START, 0.8, lambda: executor.now)
    costs = LinearCostModel(MACHINE)
    # one decode row is the least that a step can have, the rest is bounded
    assert max(costs.seconds(load) for load in executor.loads[8:]) < 0.04


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1},
        {"num_blocks": 1},
        {"num_blocks": 3, "block_size": 2},
        {"max_model_len": 2},
        {"max_num_batched_tokens": 16},
        {"grammar": None},
    ],
    ids=str,
)
def test_it_runs_on_an_engine_of_any_size(changes: dict[str, object]) -> None:
    limits = msgspec.structs.replace(LIMITS, **changes)
    executor = LinearExecutor(limits)
    result = calibrate(executor, limits, START, 2.0, lambda: executor.now)
    assert result.fit.num_steps >= 20


def test_the_same_seed_runs_the_same_steps() -> None:
    executors = [LinearExecutor(LIMITS) for _ in range(2)]
    first, second = (
        calibrate(one, LIMITS, START, 1.0, lambda one=one: one.now) for one in executors
    )
    assert executors[0].loads == executors[1].loads
    assert first == second


def test_a_failing_step_is_an_error() -> None:
    executor = LinearExecutor(LIMITS)
    executor.failures = (RowFailure(0, "the device fell off"),)
    with pytest.raises(EngineError, match="the device fell off"):
        calibrate(executor, LIMITS, START, 1.0, lambda: executor.now)


def test_held_out_steps_are_not_in_the_fit_that_predicts_them() -> None:
    """A machine without any law cannot be predicted on steps that were not fitted."""
    rng = Random(3)
    loads = [StepLoad.of_span(rng.randrange(500), 1, num_logits_rows=1) for _ in range(30)]
    steps = [MeasuredStep(StepKind.DECODE, load, rng.choice((1e-3, 3e-3))) for load in loads]
    (error,) = evaluate(steps, START).errors
    assert error.num_extrapolated == 0
    assert error.mean > 0.3
    assert error.num_steps == 6


def test_one_slow_step_hardly_changes_the_fit() -> None:
    rng, machine = Random(4), LinearCostModel(MACHINE)
    loads = [
        StepLoad.of_span(rng.randrange(500), rng.choice((1, 30, 200)), num_logits_rows=1)
        for _ in range(200)
    ]
    steps = [MeasuredStep(StepKind.MIXED, load, machine.seconds(load)) for load in loads]
    steps[50] = msgspec.structs.replace(steps[50], seconds=10.0)
    model = LinearCostModel.of_fit(fit_steps(steps, START))
    for load in loads[:20]:
        assert model.seconds(load) == pytest.approx(machine.seconds(load), rel=0.1)
