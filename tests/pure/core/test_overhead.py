"""The engine's own time between steps: found in a step log, added to each simulated step."""

from __future__ import annotations

import pytest

from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.core.overhead import EngineOverhead, WithOverhead
from quickstep.types import StepRecord


def steps_of(overhead: EngineOverhead, rows: list[int]) -> list[StepRecord]:
    """A busy engine's steps; every tenth is followed by a pause of the load."""
    now, steps = 0.0, []
    for place, num_rows in enumerate(rows):
        now += 5e-3 + overhead.seconds(num_rows) + (3.0 if place % 10 == 9 else 0.0)
        steps.append(
            StepRecord(place, 0.0, now, 5e-3, 5e-3, 0, num_rows, 0, num_rows, 0, 0, 0, 9, 0, 1, 0)
        )
    return steps


def test_the_overhead_of_a_step_and_of_a_row_are_found_in_spite_of_pauses() -> None:
    overhead = EngineOverhead(4e-4, 2e-5)
    found = EngineOverhead.of_steps(steps_of(overhead, [1 + n % 7 for n in range(300)]))
    assert found.step_s == pytest.approx(overhead.step_s)
    assert found.row_s == pytest.approx(overhead.row_s)


def test_few_steps_and_one_number_of_rows_give_what_they_can() -> None:
    overhead = EngineOverhead(4e-4, 2e-5)
    assert EngineOverhead.of_steps([]) == EngineOverhead(0.0, 0.0)
    alike = EngineOverhead.of_steps(steps_of(overhead, [3] * 9))
    assert (alike.step_s, alike.row_s) == (pytest.approx(4.6e-4), 0.0)
    with pytest.raises(ValueError, match="negative or not a number"):
        EngineOverhead(-1.0, 0.0)


def test_it_is_added_to_steps_and_to_rows() -> None:
    model = LinearCostModel(Coefficients(step_s=1e-3, row_s=1e-4))
    costs = WithOverhead(model, EngineOverhead(5e-4, 1e-5))
    row = StepLoad.of_span(10, 1, num_logits_rows=1)
    load = row + row
    assert costs.seconds(load) == pytest.approx(model.seconds(load) + 5.2e-4)
    assert costs.predict(load).seconds == costs.seconds(load)
    prices, own = costs.unit_prices(load), model.unit_prices(load)
    assert prices.of(row) == pytest.approx(own.of(row) + 1e-5)
    before = model.fit()
    costs.observe(load, 9.0)
    assert model.fit() == before
