"""Candidates: which splits fit, the balance under a load, and how capacity grows."""

from __future__ import annotations

import pytest

from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.errors import ConfigError
from quickstep.model.sizing import ElementBytes
from quickstep.plan.candidates import (
    Candidate,
    EngineLimits,
    Load,
    capacity,
    fit,
    splits,
    steady_state,
)
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import find_hardware, read_hardware
from quickstep.plan.models import find_model
from quickstep.sim.summary import Targets

TABLE = read_hardware()
LOAD = Load(2.0, 1000, 300)


def sized(split: Split, quantization: str | None = "int4", hardware: str = "h100x8") -> Candidate:
    elements = ElementBytes(2, 8, quantization)
    devices = find_hardware(hardware, TABLE)
    return fit(find_model("llama-3-70b"), devices, split, elements, LOAD, EngineLimits())


def test_only_splits_that_the_heads_allow_are_listed() -> None:
    found = splits(find_model("llama-3-70b"), 6)
    assert {split.tensor for split in found} == {1, 2}
    assert all(split.num_devices == 6 for split in found)


def test_a_model_that_does_not_fit_is_refused_with_its_bytes() -> None:
    with pytest.raises(ConfigError, match=r"needs at least 131\.\d+ GiB"):
        sized(Split(), None)
    assert sized(Split(2), None).concurrency < sized(Split(2)).concurrency


def test_a_steady_state_balances_arrivals_and_steps() -> None:
    state = steady_state(sized(Split()), LOAD)
    assert state is not None
    assert state.num_rows == pytest.approx(LOAD.rate * state.step_s * 299)
    assert state.parts.seconds == pytest.approx(state.step_s, rel=1e-3)
    assert steady_state(sized(Split()), Load(100.0, 1000, 300)) is None


def test_replicas_and_stages_divide_the_requests() -> None:
    targets = Targets(ttft_s=0.5, tpot_s=0.05)
    one = capacity(sized(Split()), LOAD, targets)
    assert capacity(sized(Split(1, 1, 2)), LOAD, targets) == pytest.approx(2 * one, rel=0.01)
    staged = sized(Split(1, 2))
    assert staged.num_parallel_steps == 2
    assert one < capacity(staged, LOAD, targets) < 2.1 * one
    assert capacity(sized(Split()), LOAD, Targets(tpot_s=1e-4)) == 0.0


def test_measured_step_times_are_those_of_one_device() -> None:
    measured = LinearCostModel(Coefficients(step_s=0.1, row_s=0.01))
    elements, devices = ElementBytes(2, 8, "int4"), find_hardware("h100x8", TABLE)
    load = StepLoad.of_span(100, 1)
    for split, is_measured in ((Split(), True), (Split(1, 1, 4), True), (Split(2), False)):
        sizes = devices, split, elements, LOAD, EngineLimits()
        costs = fit(find_model("llama-3-70b"), *sizes, measured=measured).costs
        assert (costs.seconds(load) == pytest.approx(0.11)) is is_measured
        assert costs.parts(load).seconds == pytest.approx(costs.seconds(load))
        assert costs.parts(load).binding == "memory bandwidth (weights)"
