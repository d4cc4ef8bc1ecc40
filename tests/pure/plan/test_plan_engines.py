"""Engines on hardware that was not measured: their constants, their cases, and ranges."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import asdict, replace

from quickstep.core.cost_model import StepLoad
from quickstep.model.sizing import ElementBytes
from quickstep.plan.engines import (
    ENGINES,
    RANGE_POINTS,
    Evidence,
    over_range,
    read_engines,
    slowed,
    with_engine,
)
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import Achieved, find_hardware, read_hardware
from quickstep.plan.models import find_model
from quickstep.plan.roofline import RooflineCostModel

TABLE = read_hardware()
H100 = find_hardware("h100x2", TABLE)
DECODE = StepLoad(64, 64, 64 * 1000, 64 * 1000)
PROMPT = StepLoad.of_span(0, 2000)
EVIDENCE = Evidence("vllm", "h100", 10, 20, 0.1, (0.5, 0.8, 1.0, 1.25, 2.0))


def costs(achieved: Achieved, model: str = "llama-3.1-8b", quantization: str | None = None):
    elements = ElementBytes(2, 8, quantization)
    return RooflineCostModel(
        find_model(model), elements, replace(H100, achieved=achieved), Split(2)
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_constants_cases_and_a_range_about_its_prediction(engine: str) -> None:
    fitted = read_engines()[engine]
    assert fitted.errors.num_cases == sum(item.num_cases for item in fitted.gpus.values())
    assert fitted.errors.num_cases == sum(item.num_cases for item in fitted.formats.values())
    assert set(fitted.gpus) <= set(TABLE.devices)
    for factors in (fitted.factors, fitted.other_gpu_factors):
        assert len(factors) == len(RANGE_POINTS)
        assert list(factors) == sorted(factors)
        assert factors[2] == 1.0
        assert factors[0] < 1.0 < factors[-1]


def test_a_gpu_without_cases_has_the_errors_of_gpus_that_were_left_out() -> None:
    _, known = with_engine(find_hardware("h100", TABLE), "vllm")
    _, unknown = with_engine(find_hardware("mi300x", TABLE), "vllm")
    assert known.num_cases == read_engines()["vllm"].gpus["h100"].num_cases
    assert known.factors == read_engines()["vllm"].factors
    assert unknown.num_cases == 0
    assert unknown.factors == read_engines()["vllm"].other_gpu_factors
    assert f"{known.num_cases} published cases of vllm on h100" in known.text
    assert "no published case of vllm on mi300x" in unknown.text


def test_a_program_without_http_has_the_host_time_of_its_rows() -> None:
    hardware, _ = with_engine(H100, "vllm", is_offline=True)
    assert hardware.achieved.row_overhead_s == read_engines()["vllm"].offline_row_overhead_s


@pytest.mark.parametrize("load", [DECODE, PROMPT])
def test_slower_hardware_takes_that_many_times_as_long(load: StepLoad) -> None:
    hardware, _ = with_engine(H100, "sglang")
    elements = ElementBytes(2, 8, None)
    model = find_model("llama-3.1-8b")
    likely = RooflineCostModel(model, elements, hardware, Split(2)).seconds(load)
    slow = RooflineCostModel(model, elements, slowed(hardware, 1.5), Split(2)).seconds(load)
    assert slow == pytest.approx(1.5 * likely)


def test_nothing_is_faster_than_its_data_sheet() -> None:
    fast = slowed(H100, 0.01).achieved
    assert fast.memory == fast.compute == fast.link == 1.0
    assert fast.capacity == H100.achieved.capacity
    assert fast.step_overhead_s == pytest.approx(0.01 * H100.achieved.step_overhead_s)


@pytest.mark.parametrize(
    ("field", "value", "load", "model", "quantization"),
    [
        ("kv", 0.1, DECODE, "llama-3.1-8b", None),
        ("half_tokens", 4000.0, PROMPT, "llama-3.1-8b", None),
        ("layer_overhead_s", 1e-4, DECODE, "llama-3.1-8b", None),
        ("row_overhead_s", 1e-4, DECODE, "llama-3.1-8b", None),
        ("experts", 0.5, PROMPT, "mixtral-8x7b", None),
        ("fp8", 0.1, PROMPT, "llama-3.1-8b", "fp8"),
        ("int8", 0.1, PROMPT, "llama-3.1-8b", "int8"),
        ("int4", 0.1, PROMPT, "llama-3.1-8b", "int4"),
    ],
)
def test_each_constant_has_its_effect(field, value, load, model, quantization) -> None:
    plain = Achieved(0.95, 0.75, 0.5, 0.7, 0.0005)
    changed = Achieved(**(asdict(plain) | {field: value}))
    before = costs(plain, model, quantization).seconds(load)
    assert costs(changed, model, quantization).seconds(load) > 1.05 * before
    if quantization is None and field != "experts":
        dense = costs(changed, model, "int8").seconds(load)
        assert dense > costs(plain, model, "int8").seconds(load)


def test_formats_of_weights_have_the_peak_of_their_products() -> None:
    achieved = Achieved(0.95, 0.75, 0.5, 0.7, 0.0005, fp8=0.4, int8=0.3, int4=0.2)
    h100 = replace(H100, achieved=achieved)
    assert h100.flops_per_s("fp8") == pytest.approx(0.4 * 1978.9e12)
    assert h100.flops_per_s("int8") == pytest.approx(0.3 * 1978.9e12)
    assert h100.flops_per_s("int4-g128") == pytest.approx(0.2 * 989.4e12)
    a100 = replace(find_hardware("a100-80", TABLE), achieved=achieved)
    assert a100.flops_per_s("fp8") == pytest.approx(0.4 * 312e12)  # it multiplies in 16 bits


@pytest.mark.parametrize(
    ("limit", "part", "num_made"),
    [(0.4, 1.0, 2), (0.6, 0.8, 3), (0.9, 0.6, 3), (1.1, 0.4, 3), (1.5, 0.2, 3), (2.5, 0.0, 2)],
)
def test_a_target_is_met_in_the_part_of_the_range_that_is_fast_enough(
    limit: float, part: float, num_made: int
) -> None:
    made: list[float] = []

    def speed(factor: float) -> float:
        made.append(factor)
        return 1.0 / factor

    low, high, met = over_range(EVIDENCE, 1.0, speed, lambda one: one >= limit)
    assert (low, high) == (0.5, 2.0)
    assert met == pytest.approx(part)
    assert len(made) == num_made


def test_constants_out_of_bounds_are_refused() -> None:
    for field, value in (("kv", 1.5), ("fp8", 0.0), ("experts", 2.0), ("half_tokens", -1.0)):
        plain = asdict(TABLE.achieved["gpu"])
        with pytest.raises(ValueError, match=field):
            Achieved(**(plain | {field: value}))
    assert math.isfinite(read_engines()["vllm"].achieved.half_tokens)
