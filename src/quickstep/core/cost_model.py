"""Step-time model: seconds = fixed + per token + per row + per KV token read.

Fitted from measured steps while the engine runs; sizes prefill chunks, shares a step's seconds over
its rows, and drives the simulator. Deterministic: the same observations give the same predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quickstep.types import StepPlan, StepRow

__all__ = ["Coefficients", "CostModel", "LinearCostModel", "StepLoad"]

_SWEEPS = 4  # of coordinate descent per observation; it starts at the previous solution
_MIN_SECONDS = 1e-9
_MAX_SECONDS = 1e5


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step costs by: its tokens, rows, and the KV tokens that its attention reads."""

    num_tokens: int = 0
    num_rows: int = 0
    num_kv_tokens: int = 0

    @staticmethod
    def of_row(row: StepRow) -> StepLoad:
        """The load of one row."""
        return StepLoad(row.num_tokens, 1, row.end)

    @staticmethod
    def of_plan(plan: StepPlan) -> StepLoad:
        """The load of a whole step."""
        num_kv_tokens = sum(row.end for row in plan.rows)
        return StepLoad(plan.num_tokens, len(plan.rows), num_kv_tokens)

    def __add__(self, other: StepLoad) -> StepLoad:
        return StepLoad(
            self.num_tokens + other.num_tokens,
            self.num_rows + other.num_rows,
            self.num_kv_tokens + other.num_kv_tokens,
        )


class CostModel(Protocol):
    """Predicts step seconds; learns from measured ones."""

    def seconds(self, load: StepLoad) -> float:
        """Predicted duration of a step. A question: changes nothing."""

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a measured step."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per step, per token, per row and per KV token. The defaults are a small CPU model."""

    step_s: float = 2e-3
    token_s: float = 1e-4
    row_s: float = 1e-4
    kv_token_s: float = 1e-7


class LinearCostModel:
    """Non-negative recursive least squares of relative errors, with forgetting.

    Each observation is divided by its measured seconds, so that decode steps count as much as long
    prefills and a hiccup weighs little. The normal equations decay by `forgetting` per step and
    are kept solvable by a weak prior at the start values. The first observation scales them all:
    they say what costs how much more than what, the machine says how fast it is.
    """

    def __init__(self, start: Coefficients | None = None, forgetting: float = 0.99) -> None:
        begin = start or Coefficients()
        self._weights = [begin.step_s, begin.token_s, begin.row_s, begin.kv_token_s]
        self._prior = list(self._weights)
        self._is_scaled = False
        self._forgetting = forgetting
        self._gram = [[0.0] * 4 for _ in range(4)]
        self._moment = [0.0] * 4

    @property
    def coefficients(self) -> Coefficients:
        """The fit so far."""
        return Coefficients(*self._weights)

    def seconds(self, load: StepLoad) -> float:
        """Predicted duration of a step."""
        return sum(
            weight * value for weight, value in zip(self._weights, _features(load), strict=True)
        )

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a measured step; times that no step can take are left out."""
        if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
            return
        if not self._is_scaled:
            self._scale(seconds / max(self.seconds(load), _MIN_SECONDS))
        scaled = [value / seconds for value in _features(load)]
        for row, left in enumerate(scaled):
            self._moment[row] = self._forgetting * self._moment[row] + left
            for column, right in enumerate(scaled):
                self._gram[row][column] *= self._forgetting
                self._gram[row][column] += left * right
        for _ in range(_SWEEPS):
            self._sweep()

    def _scale(self, factor: float) -> None:
        self._is_scaled = True
        self._weights = [factor * weight for weight in self._weights]
        self._prior = [factor * weight for weight in self._prior]

    def _sweep(self) -> None:
        """One pass of coordinate descent: each weight to its optimum, at least 0, others fixed."""
        for row, gram in enumerate(self._gram):
            # The prior pulls `weight / prior` to 1 with the strength of a thousandth of a step:
            # features that were never seen apart stay where they started.
            prior = self._prior[row]
            stiffness = 1e-3 / prior**2 if prior > 0.0 else 0.0
            others = sum(
                gram[column] * weight
                for column, weight in enumerate(self._weights)
                if column != row
            )
            pull = self._moment[row] - others + stiffness * prior
            if gram[row] + stiffness > 0.0:
                self._weights[row] = max(0.0, pull / (gram[row] + stiffness))


def _features(load: StepLoad) -> tuple[float, float, float, float]:
    return (1.0, float(load.num_tokens), float(load.num_rows), float(load.num_kv_tokens))
