"""Step-time model: seconds = fixed + per token + per row + per KV token read.

Fitted from measured steps while the engine runs; sizes prefill chunks, shares a step's seconds over
its rows, and drives the simulator. Deterministic: the same observations give the same predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quickstep.types import StepPlan, StepRow

__all__ = ["Coefficients", "CostModel", "LinearCostModel", "StepLoad"]

_SWEEPS = 1  # of coordinate descent per observation; it starts at the previous solution
_STIFFNESS = 1e-3
_COLUMNS = range(4)  # of the features: one, tokens, rows, KV tokens
_OTHERS = ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2))
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
        if not self.num_rows or not other.num_rows:  # a load without rows is none
            return self if self.num_rows else other
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
        step_s, token_s, row_s, kv_token_s = self._weights
        tokens, rows, kv_tokens = load.num_tokens, load.num_rows, load.num_kv_tokens
        return step_s + token_s * tokens + row_s * rows + kv_token_s * kv_tokens

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a measured step; times that no step can take are left out."""
        if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
            return
        if not self._is_scaled:
            self._scale(seconds / max(self.seconds(load), _MIN_SECONDS))
        one, tokens = 1.0 / seconds, load.num_tokens / seconds
        rows, kv_tokens = load.num_rows / seconds, load.num_kv_tokens / seconds
        kept, moment = self._forgetting, self._moment
        for row, left in enumerate((one, tokens, rows, kv_tokens)):
            gram = self._gram[row]
            moment[row] = kept * moment[row] + left
            gram[0] = kept * gram[0] + left * one
            gram[1] = kept * gram[1] + left * tokens
            gram[2] = kept * gram[2] + left * rows
            gram[3] = kept * gram[3] + left * kv_tokens
        for _ in range(_SWEEPS):
            self._sweep()

    def _scale(self, factor: float) -> None:
        self._is_scaled = True
        self._weights = [factor * weight for weight in self._weights]
        self._prior = [factor * weight for weight in self._prior]

    def _sweep(self) -> None:
        """One pass of coordinate descent: each weight to its optimum, at least 0, others fixed."""
        weights = self._weights
        for row, gram, moment, prior in zip(
            _COLUMNS, self._gram, self._moment, self._prior, strict=True
        ):
            # The prior pulls `weight / prior` to 1 with the strength of a thousandth of a step:
            # features that were never seen apart stay where they started.
            stiffness = _STIFFNESS / prior**2 if prior > 0.0 else 0.0
            a, b, c = _OTHERS[row]
            others = gram[a] * weights[a] + gram[b] * weights[b] + gram[c] * weights[c]
            own = gram[row] + stiffness
            if own > 0.0:
                weights[row] = max(0.0, (moment - others + stiffness * prior) / own)
