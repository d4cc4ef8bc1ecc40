"""What an engine does between its steps: planning, delivery of tokens, tasks of the callers.

`quickstep calibrate` measures it next to the step times and stores both; simulations of this
machine add it to each step. For models with short steps it is as long as the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import linear_regression, median

import msgspec
from msgspec.structs import replace

from quickstep.core.cost_model import CostModel, Prediction, StepLoad, UnitPrices
from quickstep.types import StepRecord


class EngineOverhead(msgspec.Struct, frozen=True):
    """Seconds between two steps of a busy engine: of each, and for each row of it."""

    step_s: float
    row_s: float

    def __post_init__(self) -> None:
        if not (self.step_s >= 0.0 and self.row_s >= 0.0):
            raise ValueError("an overhead is negative or not a number")

    def seconds(self, num_rows: int) -> float:
        """Of a step with so many rows."""
        return self.step_s + num_rows * self.row_s

    @staticmethod
    def of_steps(steps: Sequence[StepRecord]) -> EngineOverhead:
        """By the times between commits: the median for each number of rows, so that pauses of the
        machine and of the load do not count. 0 without two steps.
        """
        gaps: dict[int, list[float]] = {}
        for before, one in pairwise(steps):
            num_rows = one.num_decode_rows + one.num_prefill_rows
            gap_s = one.committed_at_s - before.committed_at_s - one.seconds
            gaps.setdefault(num_rows, []).append(gap_s)
        rows = [num_rows for num_rows, of in gaps.items() for _ in of]
        usual = [median(of) for of in gaps.values() for _ in of]
        if len(gaps) < 2:
            return EngineOverhead(max(0.0, *usual, 0.0), 0.0)
        row_s, step_s = linear_regression(rows, usual)
        return EngineOverhead(max(0.0, step_s), max(0.0, row_s))


class WithOverhead:
    """A cost model with the time that the engine itself takes. It does not learn."""

    def __init__(self, model: CostModel, overhead: EngineOverhead) -> None:
        self._model = model
        self._overhead = overhead

    def seconds(self, load: StepLoad) -> float:
        """Predicted time from the end of the step before to the end of this one."""
        return self._model.seconds(load) + self._overhead.seconds(load.num_rows)

    def usual_seconds(self, load: StepLoad) -> float:
        """The same at the usual pace of the steps."""
        return self._model.usual_seconds(load) + self._overhead.seconds(load.num_rows)

    def unit_prices(self, step: StepLoad) -> UnitPrices:
        """What a row's units cost, with the engine's time for it."""
        prices = self._model.unit_prices(step)
        return replace(prices, row=prices.row + self._overhead.row_s)

    def predict(self, load: StepLoad) -> Prediction:
        """The same, and whether `load` is outside of what was measured."""
        return Prediction(self.seconds(load), self._model.predict(load).is_extrapolated)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Nothing is learnt."""
