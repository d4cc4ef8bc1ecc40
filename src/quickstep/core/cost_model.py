"""Step-time model: seconds = fixed + per token + per row + per KV token read + per attended pair +
per scored prompt position.

Fitted from measured steps while the engine runs; it sizes prefill chunks, divides a step's seconds
among its rows, and drives the simulator. Deterministic: the same observations give the same
predictions.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from quickstep.types import StepPlan, StepRow

__all__ = ["Coefficients", "CostModel", "LinearCostModel", "StepLoad"]

_STIFFNESS = 1e-3
_MIN_SECONDS = 1e-9
_MAX_SECONDS = 1e5
_LOGIT_S = 1e-9  # to compute a logit of a scored position, and its part of the log-probability

# How fast the pace follows a step, and how much a single step may change it. Replayed on steps of a
# shared machine, whose speed halves within seconds: a mean error of 0.12, and 0.19 without.
_PACE_GAIN = 0.3
_MAX_PACE_RATIO = 1.5


class StepLoad(msgspec.Struct, frozen=True):
    """What the cost of a step depends on: its tokens, rows, the KV tokens that its attention reads,
    the pairs of a token and a position that it attends to, and the positions whose logits score the
    prompt. A decode row has as many KV tokens as pairs; in a chunk of prefill the pairs grow with
    its tokens times the context before it. The cost of a scored position depends on the size of the
    model's vocabulary.
    """

    num_tokens: int = 0
    num_rows: int = 0
    num_kv_tokens: int = 0
    num_pairs: int = 0
    num_scored: int = 0

    @staticmethod
    def of_span(start: int, num_tokens: int, num_scored: int = 0) -> StepLoad:
        """The load of a row with `num_tokens` tokens from position `start` on."""
        num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return StepLoad(num_tokens, 1, start + num_tokens, num_pairs, num_scored)

    @staticmethod
    def of_row(row: StepRow) -> StepLoad:
        """The load of one row."""
        return StepLoad.of_span(row.start, row.num_tokens, row.num_scored)

    @staticmethod
    def of_plan(plan: StepPlan) -> StepLoad:
        """The load of all rows of a step."""
        return sum((StepLoad.of_row(row) for row in plan.rows), start=StepLoad())

    def __add__(self, other: StepLoad) -> StepLoad:
        if not self.num_rows or not other.num_rows:  # a load without rows is empty
            return self if self.num_rows else other
        return StepLoad(
            self.num_tokens + other.num_tokens,
            self.num_rows + other.num_rows,
            self.num_kv_tokens + other.num_kv_tokens,
            self.num_pairs + other.num_pairs,
            self.num_scored + other.num_scored,
        )


class CostModel(Protocol):
    """Predicts step seconds; learns from measured ones."""

    def seconds(self, load: StepLoad) -> float:
        """Predicted duration of a step. Changes nothing."""

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a measured step."""


class Coefficients(msgspec.Struct, frozen=True):
    """Seconds per step, token, row, KV token, pair and scored position.

    The defaults are those of a small model on a CPU with a vocabulary of 50,000.
    """

    step_s: float = 2e-3
    token_s: float = 1e-4
    row_s: float = 1e-4
    kv_token_s: float = 5e-8
    pair_s: float = 5e-8
    score_s: float = 50_000 * _LOGIT_S

    @staticmethod
    def of_vocabulary(size: int) -> Coefficients:
        """The defaults for a model with a vocabulary of this size."""
        return Coefficients(score_s=size * _LOGIT_S)


class LinearCostModel:
    """Non-negative recursive least squares of relative errors, with forgetting.

    Each observation is divided by its measured seconds, so that decode steps count as much as long
    prefills and an outlier weighs little. The normal equations decay by `forgetting` per step and
    stay solvable through a weak prior at the start values. The first observation scales all start
    values: only their proportions are assumed, the machine's speed is measured.

    The fit follows hundreds of steps; a machine may be slower for the next ten (other processes,
    heat). So predictions are the fit times a pace, which follows the last steps.
    """

    def __init__(self, start: Coefficients | None = None, forgetting: float = 0.99) -> None:
        begin = start or Coefficients()
        self._weights = (
            begin.step_s,
            begin.token_s,
            begin.row_s,
            begin.kv_token_s,
            begin.pair_s,
            begin.score_s,
        )
        self._pulls = tuple(map(_pull, self._weights))
        self._is_scaled = False
        self._pace = 1.0
        self._forgetting = forgetting
        self._gram = (0.0,) * 21  # the upper triangle, row by row
        self._moment = (0.0,) * 6

    @property
    def coefficients(self) -> Coefficients:
        """The current fit."""
        return Coefficients(*self._weights)

    def seconds(self, load: StepLoad) -> float:
        """Predicted duration of a step."""
        return self._pace * self._fitted(load)

    def _fitted(self, load: StepLoad) -> float:
        step_s, token_s, row_s, kv_token_s, pair_s, score_s = self._weights
        return (
            step_s
            + token_s * load.num_tokens
            + row_s * load.num_rows
            + kv_token_s * load.num_kv_tokens
            + pair_s * load.num_pairs
            + score_s * load.num_scored
        )

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a measured step; impossible durations are ignored."""
        if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
            return
        if not self._is_scaled:
            self._scale(seconds / max(self._fitted(load), _MIN_SECONDS))
        one, tokens, rows = 1.0 / seconds, load.num_tokens / seconds, load.num_rows / seconds
        kv_tokens, pairs = load.num_kv_tokens / seconds, load.num_pairs / seconds
        scored = load.num_scored / seconds
        # Written out: this runs in every step, and loops over 6 x 6 take longer than all of it.
        kept = self._forgetting
        m0, m1, m2, m3, m4, m5 = self._moment
        g00, g01, g02, g03, g04, g05, g11, g12, g13, g14, g15, *rest = self._gram
        g22, g23, g24, g25, g33, g34, g35, g44, g45, g55 = rest
        self._moment = (
            kept * m0 + one,
            kept * m1 + tokens,
            kept * m2 + rows,
            kept * m3 + kv_tokens,
            kept * m4 + pairs,
            kept * m5 + scored,
        )
        self._gram = (
            kept * g00 + one * one,
            kept * g01 + one * tokens,
            kept * g02 + one * rows,
            kept * g03 + one * kv_tokens,
            kept * g04 + one * pairs,
            kept * g05 + one * scored,
            kept * g11 + tokens * tokens,
            kept * g12 + tokens * rows,
            kept * g13 + tokens * kv_tokens,
            kept * g14 + tokens * pairs,
            kept * g15 + tokens * scored,
            kept * g22 + rows * rows,
            kept * g23 + rows * kv_tokens,
            kept * g24 + rows * pairs,
            kept * g25 + rows * scored,
            kept * g33 + kv_tokens * kv_tokens,
            kept * g34 + kv_tokens * pairs,
            kept * g35 + kv_tokens * scored,
            kept * g44 + pairs * pairs,
            kept * g45 + pairs * scored,
            kept * g55 + scored * scored,
        )
        self._sweep()
        ratio = seconds / max(self._fitted(load), _MIN_SECONDS)
        bounded = min(_MAX_PACE_RATIO, max(1.0 / _MAX_PACE_RATIO, ratio))
        self._pace += _PACE_GAIN * (bounded - self._pace)

    def _scale(self, factor: float) -> None:
        self._is_scaled = True
        step_s, token_s, row_s, kv_token_s, pair_s, score_s = (
            factor * weight for weight in self._weights
        )
        self._weights = (step_s, token_s, row_s, kv_token_s, pair_s, score_s)
        self._pulls = tuple(map(_pull, self._weights))

    def _sweep(self) -> None:
        """One pass of coordinate descent: each weight to its optimum, at least 0, others fixed.

        It starts at the previous solution.
        """
        w0, w1, w2, w3, w4, w5 = self._weights
        m0, m1, m2, m3, m4, m5 = self._moment
        g00, g01, g02, g03, g04, g05, g11, g12, g13, g14, g15, *rest = self._gram
        g22, g23, g24, g25, g33, g34, g35, g44, g45, g55 = rest
        (s0, p0), (s1, p1), (s2, p2), (s3, p3), (s4, p4), (s5, p5) = self._pulls
        # A feature that was never seen and has no prior keeps its weight.
        if (own := g00 + s0) > 0.0:
            others = g01 * w1 + g02 * w2 + g03 * w3 + g04 * w4 + g05 * w5
            w0 = max(0.0, (m0 - others + p0) / own)
        if (own := g11 + s1) > 0.0:
            others = g01 * w0 + g12 * w2 + g13 * w3 + g14 * w4 + g15 * w5
            w1 = max(0.0, (m1 - others + p1) / own)
        if (own := g22 + s2) > 0.0:
            others = g02 * w0 + g12 * w1 + g23 * w3 + g24 * w4 + g25 * w5
            w2 = max(0.0, (m2 - others + p2) / own)
        if (own := g33 + s3) > 0.0:
            others = g03 * w0 + g13 * w1 + g23 * w2 + g34 * w4 + g35 * w5
            w3 = max(0.0, (m3 - others + p3) / own)
        if (own := g44 + s4) > 0.0:
            others = g04 * w0 + g14 * w1 + g24 * w2 + g34 * w3 + g45 * w5
            w4 = max(0.0, (m4 - others + p4) / own)
        if (own := g55 + s5) > 0.0:
            others = g05 * w0 + g15 * w1 + g25 * w2 + g35 * w3 + g45 * w4
            w5 = max(0.0, (m5 - others + p5) / own)
        self._weights = (w0, w1, w2, w3, w4, w5)


def _pull(prior: float) -> tuple[float, float]:
    """The prior pulls `weight / prior` to 1 with the strength of a thousandth of a step: features
    that never vary separately keep the proportions of their start values.
    """
    stiffness = _STIFFNESS / prior**2 if prior > 0.0 else 0.0
    return stiffness, stiffness * prior
