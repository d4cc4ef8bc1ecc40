"""The picture of a plan: the memory adds up, and steps are below the roof."""

from __future__ import annotations

import math

import pytest

from quickstep.model.sizing import ElementBytes
from quickstep.plan.candidates import Load
from quickstep.plan.hardware import find_hardware, read_hardware
from quickstep.plan.models import find_model
from quickstep.plan.picture import report_of_plan
from quickstep.plan.planner import PlanQuery, make_plan
from quickstep.sim.summary import Targets


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b"])
def test_the_memory_adds_up_and_steps_are_below_the_roof(model: str) -> None:
    hardware = find_hardware("h100x2", read_hardware())
    load = Load(2.0, 1000, 200)
    query = PlanQuery(model, find_model(model), hardware, load, Targets(), ElementBytes(2, 4))
    plan = make_plan(query)
    report = report_of_plan(query, plan, ["split"], [[option.name] for option in plan.options])
    assert [part.num_bytes for part in report.memory] == [row.num_bytes for row in plan.memory]
    (chart,) = report.charts
    roof, decode, prefill = chart.lines
    highest = max(y for _, y in roof.points)
    slope = hardware.bytes_per_s / 1e12
    for intensity, rate in (*decode.points, *prefill.points):
        assert 0.0 < rate <= min(highest, slope * intensity) * (1 + 1e-9)
    assert max(x for x, _ in decode.points) < max(x for x, _ in prefill.points)
    assert math.isclose(decode.points[0][0], 1.0, rel_tol=0.1)  # one token, two bytes a parameter
