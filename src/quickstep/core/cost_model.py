"""Step-time model: seconds = fixed + per token + per row + per KV token read.

Fitted from measured steps while the engine runs; sizes prefill chunks, shares a step's seconds over
its rows, and drives the simulator. Deterministic: the same observations give the same predictions.
"""

from __future__ import annotations

from typing import Protocol

from quickstep.dataclass import dataclass
from quickstep.frozen import frozen
from quickstep.types import StepPlan, StepRow

__all__ = ["Coefficients", "CostModel", "LinearCostModel", "StepLoad"]

_STIFFNESS = 1e-3
_MIN_SECONDS = 1e-9
_MAX_SECONDS = 1e5


@frozen
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
        self._weights = (begin.step_s, begin.token_s, begin.row_s, begin.kv_token_s)
        self._pulls = tuple(map(_pull, self._weights))
        self._is_scaled = False
        self._forgetting = forgetting
        self._gram = (0.0,) * 10  # the upper triangle, row by row
        self._moment = (0.0,) * 4

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
        # Written out: this runs in every step, and loops over 4 x 4 took 4 us.
        kept = self._forgetting
        m0, m1, m2, m3 = self._moment
        g00, g01, g02, g03, g11, g12, g13, g22, g23, g33 = self._gram
        self._moment = (
            kept * m0 + one,
            kept * m1 + tokens,
            kept * m2 + rows,
            kept * m3 + kv_tokens,
        )
        self._gram = (
            kept * g00 + one * one,
            kept * g01 + one * tokens,
            kept * g02 + one * rows,
            kept * g03 + one * kv_tokens,
            kept * g11 + tokens * tokens,
            kept * g12 + tokens * rows,
            kept * g13 + tokens * kv_tokens,
            kept * g22 + rows * rows,
            kept * g23 + rows * kv_tokens,
            kept * g33 + kv_tokens * kv_tokens,
        )
        self._sweep()

    def _scale(self, factor: float) -> None:
        self._is_scaled = True
        step_s, token_s, row_s, kv_token_s = (factor * weight for weight in self._weights)
        self._weights = (step_s, token_s, row_s, kv_token_s)
        self._pulls = tuple(map(_pull, self._weights))

    def _sweep(self) -> None:
        """One pass of coordinate descent: each weight to its optimum, at least 0, others fixed.

        It starts at the previous solution.
        """
        w0, w1, w2, w3 = self._weights
        m0, m1, m2, m3 = self._moment
        g00, g01, g02, g03, g11, g12, g13, g22, g23, g33 = self._gram
        (s0, p0), (s1, p1), (s2, p2), (s3, p3) = self._pulls
        # A feature that was never seen and has no prior keeps its weight.
        if (own := g00 + s0) > 0.0:
            w0 = max(0.0, (m0 - (g01 * w1 + g02 * w2 + g03 * w3) + p0) / own)
        if (own := g11 + s1) > 0.0:
            w1 = max(0.0, (m1 - (g01 * w0 + g12 * w2 + g13 * w3) + p1) / own)
        if (own := g22 + s2) > 0.0:
            w2 = max(0.0, (m2 - (g02 * w0 + g12 * w1 + g23 * w3) + p2) / own)
        if (own := g33 + s3) > 0.0:
            w3 = max(0.0, (m3 - (g03 * w0 + g13 * w1 + g23 * w2) + p3) / own)
        self._weights = (w0, w1, w2, w3)


def _pull(prior: float) -> tuple[float, float]:
    """The prior pulls `weight / prior` to 1 with the strength of a thousandth of a step: features
    that were never seen apart stay where they started.
    """
    stiffness = _STIFFNESS / prior**2 if prior > 0.0 else 0.0
    return stiffness, stiffness * prior
