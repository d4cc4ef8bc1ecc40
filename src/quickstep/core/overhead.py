"""What steps take besides the computation of the model: the engine's own work between them
(planning, delivery of tokens, tasks of the callers), and the way through stages of a pipeline.

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
        machine and of the load do not count. 0 without two steps. Of a pipeline, by steps that no
        other one overlaps.
        """
        gaps: dict[int, list[float]] = {}
        for before, step in pairwise(steps):
            num_rows = step.num_decode_rows + step.num_prefill_rows
            seconds = step.seconds
            if step.stage_s:
                seconds = sum(step.stage_s)
                if step.planned_at_s < before.committed_at_s:
                    continue
            gap_s = step.committed_at_s - before.committed_at_s - seconds
            gaps.setdefault(num_rows, []).append(gap_s)
        rows = [num_rows for num_rows, of in gaps.items() for _ in of]
        usual = [median(of) for of in gaps.values() for _ in of]
        if len(gaps) < 2:
            return EngineOverhead(max(0.0, *usual, 0.0), 0.0)
        row_s, step_s = linear_regression(rows, usual)
        return EngineOverhead(max(0.0, step_s), max(0.0, row_s))


class StageTimes(msgspec.Struct, frozen=True):
    """How a step passes the stages of a pipeline.

    Attributes:
        parts: What each stage computes of a step, of 1 together.
        hop_s: Seconds from the end of one stage to the begin of the next one.
        overhead_s: Seconds that the engine takes for a step after its last stage, in whose process
            it is.
    """

    parts: tuple[float, ...] = (1.0,)
    hop_s: float = 0.0
    overhead_s: float = 0.0

    @staticmethod
    def equal(num_stages: int) -> StageTimes:
        """Of stages that take equally long, without anything between them."""
        return StageTimes((1.0 / num_stages,) * num_stages)

    @property
    def num_stages(self) -> int:
        """1 for a model that is not divided into stages."""
        return len(self.parts)


class ScaledCosts:
    """A cost model whose seconds are multiplied: of the mean stage of a pipeline, or of all stages
    by that. It does not learn.
    """

    def __init__(self, model: CostModel, factor: float) -> None:
        self._model = model
        self._factor = factor

    def seconds(self, load: StepLoad) -> float:
        """`CostModel.seconds`."""
        return self._factor * self._model.seconds(load)

    def usual_seconds(self, load: StepLoad) -> float:
        """`CostModel.usual_seconds`."""
        return self._factor * self._model.usual_seconds(load)

    def unit_prices(self, step: StepLoad) -> UnitPrices:
        """The same: they are proportions."""
        return self._model.unit_prices(step)

    def predict(self, load: StepLoad) -> Prediction:
        """`CostModel.predict`."""
        return Prediction(self.seconds(load), self._model.predict(load).is_extrapolated)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Nothing is learnt."""


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
