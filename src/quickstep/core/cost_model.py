"""Step-time model: seconds = fixed + a cost for each unit of a `StepLoad`.

A step with few tokens takes as long as reading the weights does, and one with many as long as their
computation, so a token beyond the 32nd, and beyond the 256th, of a step has a further cost. A step
that computes logits also reads the output layer's weights, once.

Fitted from measured steps while the engine runs; it sizes prefill chunks, divides a step's seconds
among its rows, and drives the simulator. Deterministic: the same observations give the same
predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import ge, le, mul
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import astuple

from quickstep.types import SamplingParams, StepPlan, StepRow

# From these numbers of tokens on, a further one may cost more. CPUs begin to compute longer than
# they read at 16 to 64 tokens, by format, and GPUs at some hundreds.
_FEW_TOKENS, _MANY_TOKENS = 32, 256

_STIFFNESS = 1e-3
_MIN_SECONDS = 1e-9
_MIN_PART = 16  # tokens of a prompt in a step of a pipeline
_MAX_SECONDS = 1e5
_USUAL_VOCABULARY = 50_000
_LOGIT_S = 1e-9  # to compute a logit, and its part of the log-probability or of the sampling
_ROW_S = 2e-5  # to prepare what a row needs, and to read its result

# How fast the pace follows a step, and how much a single step may change it. Replayed on steps of a
# shared machine, whose speed halves within seconds: a mean error of 0.12, and 0.19 without.
_PACE_GAIN = 0.3
_MAX_PACE_RATIO = 1.5

# A step that took this many times its prediction, or less than this part of it, counts as if it had
# taken just that: a page fault hardly moves the fit, a wrong coefficient is still corrected.
# No prediction is taken to be below the shortest of about the last hundred steps, which a wrong fit
# would not get above otherwise.
_MAX_RATIO = 4.0
_LEAST_GROWTH = 1.01
_COLD_RATIO = 8.0  # of a step that says nothing of others to one that does
_NUM_COLD_STEPS = 8  # of a start, in which memory and kernels may not be ready
_MAX_GAIN = 1e9

# Learning from a step takes 15 to 30 us: of short steps, one in this time is learnt from. Those
# after a start always are, because the machine may be slower or faster than when a fit was stored.
_LEARNING_PERIOD_S = 2e-3
_NUM_FIRST_STEPS = 64

_EXACT = 1e-9  # relative error of a prediction that is only rounded
_MAX_SWEEPS = 2000
_CONVERGED = 1e-6  # relative change of a coefficient in one pass

_Number = TypeVar("_Number", int, float)

_NO_SAMPLING: Mapping[int, SamplingParams] = MappingProxyType({})


class StepLoad(msgspec.Struct, frozen=True, gc=False):
    """What the cost of a step depends on. The sum of the loads of its rows.

    A decode row has as many KV tokens as pairs; in a chunk of prefill the pairs grow with its
    tokens times the context before it. A row with speculative drafts has tokens, logits rows and
    masks for the drafts as well.

    Attributes:
        num_tokens: Tokens to compute.
        num_rows: Rows, one per sequence.
        num_kv_tokens: KV tokens that the attention reads.
        num_pairs: Pairs of a token and a position that it attends to.
        num_scored: Positions whose logits score the prompt.
        num_logits_rows: Positions whose logits are sampled from: one per row that emits a token,
            and one per draft. They cost by the size of the vocabulary.
        num_grammar_rows: Logits rows that a grammar restricts: a mask for each.
        num_logprobs_rows: Logits rows that list log-probabilities, as those of every beam.
        num_adapter_rows: Rows that use an adapter.
    """

    num_tokens: int = 0
    num_rows: int = 0
    num_kv_tokens: int = 0
    num_pairs: int = 0
    num_scored: int = 0
    num_logits_rows: int = 0
    num_grammar_rows: int = 0
    num_logprobs_rows: int = 0
    num_adapter_rows: int = 0

    @staticmethod
    def of_span(
        start: int, num_tokens: int, num_scored: int = 0, num_logits_rows: int = 0
    ) -> StepLoad:
        """The load of a row with `num_tokens` tokens from position `start` on."""
        num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return StepLoad(num_tokens, 1, start + num_tokens, num_pairs, num_scored, num_logits_rows)

    @staticmethod
    def of_row(row: StepRow, sampling: SamplingParams | None = None) -> StepLoad:
        """The load of one row; without its `sampling`, a plain one."""
        num_tokens = row.num_tokens
        num_logits = 1 + row.num_drafts if row.emits else 0
        return StepLoad(
            num_tokens,
            1,
            row.start + num_tokens,
            num_tokens * row.start + num_tokens * (num_tokens + 1) // 2,
            row.num_scored,
            num_logits,
            num_logits if sampling is not None and sampling.grammar is not None else 0,
            num_logits if sampling is not None and sampling.logprobs is not None else 0,
            int(row.adapter != ""),
        )

    @staticmethod
    def total(loads: Sequence[StepLoad]) -> StepLoad:
        """The sum of loads: one call for a step with many rows."""
        if len(loads) < 2:
            return loads[0] if loads else StepLoad()
        return StepLoad(*map(sum, zip(*map(astuple, loads), strict=True)))

    @staticmethod
    def of_plan(
        plan: StepPlan, sampling_of_slot: Mapping[int, SamplingParams] = _NO_SAMPLING
    ) -> StepLoad:
        """The load of all rows of a step; rows of slots without an entry are plain."""
        loads = (StepLoad.of_row(row, sampling_of_slot.get(row.slot)) for row in plan.rows)
        num, num_kv_tokens = plan.num_grouped_rows, plan.num_grouped_kv_tokens
        grouped = StepLoad(num, num, num_kv_tokens, num_kv_tokens, num_logits_rows=num)
        return sum(loads, start=grouped)

    def __add__(self, other: StepLoad) -> StepLoad:
        if not self.num_rows or not other.num_rows:  # a load without rows is empty
            return self if self.num_rows else other
        return StepLoad(
            self.num_tokens + other.num_tokens,
            self.num_rows + other.num_rows,
            self.num_kv_tokens + other.num_kv_tokens,
            self.num_pairs + other.num_pairs,
            self.num_scored + other.num_scored,
            self.num_logits_rows + other.num_logits_rows,
            self.num_grammar_rows + other.num_grammar_rows,
            self.num_logprobs_rows + other.num_logprobs_rows,
            self.num_adapter_rows + other.num_adapter_rows,
        )


class Prediction(msgspec.Struct, frozen=True):
    """Seconds of a step, and whether no measured step had so little or so much of a unit."""

    seconds: float
    is_extrapolated: bool


class PerUnit(msgspec.Struct, Generic[_Number], frozen=True, gc=False):
    """A number for a unit of each field of `StepLoad`, in its order."""

    token: _Number
    row: _Number
    kv_token: _Number
    pair: _Number
    score: _Number
    logits_row: _Number
    grammar_row: _Number
    logprobs_row: _Number
    adapter_row: _Number

    def of(self, load: StepLoad) -> _Number:
        """The sum over the units of a load."""
        return (  # written out, as the sum of loads
            self.token * load.num_tokens
            + self.row * load.num_rows
            + self.kv_token * load.num_kv_tokens
            + self.pair * load.num_pairs
            + self.score * load.num_scored
            + self.logits_row * load.num_logits_rows
            + self.grammar_row * load.num_grammar_rows
            + self.logprobs_row * load.num_logprobs_rows
            + self.adapter_row * load.num_adapter_rows
        )


class UnitPrices(PerUnit[float], frozen=True, gc=False):
    """Prices: by these, the seconds of a step are divided among its rows."""

    token: float = 0.0
    row: float = 0.0
    kv_token: float = 0.0
    pair: float = 0.0
    score: float = 0.0
    logits_row: float = 0.0
    grammar_row: float = 0.0
    logprobs_row: float = 0.0
    adapter_row: float = 0.0


class CostModel(Protocol):
    """Predicts step seconds; learns from measured ones."""

    def seconds(self, load: StepLoad) -> float:
        """Predicted duration of a step. Changes nothing."""

    def usual_seconds(self, load: StepLoad) -> float:
        """The same, whether or not the last steps were slower or faster than predicted."""

    def unit_prices(self, step: StepLoad) -> UnitPrices:
        """What a row's units cost in a step with the load `step`, in proportion to each other:
        without what the step costs once.
        """

    def predict(self, load: StepLoad) -> Prediction:
        """The same, and whether `load` is outside of what was measured."""

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a measured step."""


def tokens_of_part(cost_model: CostModel, num_tokens: int, max_tokens: int, num_stages: int) -> int:
    """How many of a prompt's tokens each step computes, at most `max_tokens`, in a pipeline whose
    stages compute as many steps at the same time: n steps of about the same time have passed all
    stages after n + `num_stages` - 1 of these times. `max_tokens` without stages.
    """
    if num_stages == 1:
        return max_tokens
    best, best_s = max(1, min(num_tokens, max_tokens)), math.inf
    num_parts = max(1, -(-num_tokens // max_tokens))
    while (part := -(-num_tokens // num_parts)) >= _MIN_PART or num_parts == 1:
        part_s = cost_model.seconds(StepLoad.of_span(0, part, num_logits_rows=0))
        seconds = (num_parts + num_stages - 1) * part_s
        if seconds < best_s:
            best, best_s = part, seconds
        num_parts *= 2
    return best


def prompt_latency_s(
    cost_model: CostModel, start: int, num_tokens: int, max_tokens: int, num_stages: int
) -> float:
    """How long a prompt's tokens from position `start` on take by themselves, in steps of at most
    `max_tokens` that follow each other through a pipeline: the last one has to pass all stages.
    """
    part = tokens_of_part(cost_model, num_tokens, max_tokens, num_stages)
    num_steps = max(1, -(-num_tokens // part))
    seconds = cost_model.seconds(StepLoad.of_span(start, num_tokens, num_logits_rows=1))
    if num_steps > 1:
        seconds += (num_steps - 1) * cost_model.seconds(StepLoad())
    return seconds * (1.0 + (num_stages - 1) / num_steps)


class Coefficients(msgspec.Struct, frozen=True):
    """Seconds per step, then per unit of each field of `StepLoad`, in its order; then per step with
    logits, and per token of a step beyond the 32nd and beyond the 256th.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    row_s: float = 0.0
    kv_token_s: float = 0.0
    pair_s: float = 0.0
    score_s: float = 0.0
    logits_row_s: float = 0.0
    grammar_row_s: float = 0.0
    logprobs_row_s: float = 0.0
    adapter_row_s: float = 0.0
    logits_step_s: float = 0.0
    token_beyond_32_s: float = 0.0
    token_beyond_256_s: float = 0.0

    @staticmethod
    def of_vocabulary(size: int) -> Coefficients:
        """Start values: a small model on a CPU, with a vocabulary of this size."""
        logits_s = size * _LOGIT_S
        return Coefficients(
            step_s=2e-3,
            token_s=1e-4,
            row_s=5e-5,
            kv_token_s=5e-8,
            pair_s=5e-8,
            score_s=logits_s,
            logits_row_s=_ROW_S + logits_s,
            grammar_row_s=_ROW_S,
            logprobs_row_s=_ROW_S + logits_s,
            adapter_row_s=_ROW_S,
            logits_step_s=4e-4,
        )


class CostFit(msgspec.Struct, frozen=True):
    """What a `LinearCostModel` has learnt: it can be stored, and another model continues from it.

    Attributes:
        coefficients: Seconds per unit.
        gram: The matrix of the normal equations, [C, C] for C coefficients; a step counts 1.
        moment: Their right side, [C].
        lowest: The least of each unit in a measured step.
        highest: The most of each unit in a measured step.
        num_steps: Steps that were learnt from.
    """

    coefficients: Coefficients
    gram: tuple[tuple[float, ...], ...]
    moment: tuple[float, ...]
    lowest: StepLoad
    highest: StepLoad
    num_steps: int

    def __post_init__(self) -> None:
        weights = astuple(self.coefficients)
        size = len(weights)
        if any(len(line) != size for line in (self.moment, self.gram, *self.gram)):
            raise ValueError(f"the equations of a fit do not have {size} coefficients")
        values = (*weights, *self.moment, *(value for row in self.gram for value in row))
        if not all(math.isfinite(value) for value in values) or min(weights) < 0.0:
            raise ValueError("a fit has coefficients that are negative or not finite")


class LinearCostModel:
    """Non-negative recursive least squares of relative errors, with forgetting.

    Each observation is divided by its seconds, measured or predicted, whichever are more: decode
    steps count as much as long prefills, and an outlier weighs little. The normal equations decay
    by `forgetting` per step and stay solvable through a weak prior at the start values. The first
    observation scales all start values: only their proportions are assumed, the machine's speed is
    measured; so does one of the next ones that is many times faster.

    The fit follows hundreds of steps; a machine may be slower for the next ten (other processes,
    heat). So predictions are the fit times a pace, which follows the last steps.
    """

    def __init__(self, start: Coefficients | None = None, forgetting: float = 0.99) -> None:
        self._weights: list[float] = list(
            astuple(start or Coefficients.of_vocabulary(_USUAL_VOCABULARY))
        )
        self._pulls = _pulls(self._weights)
        self._is_scaled = False
        self._pace = 1.0
        self._ratios = (1.0, 1.0)  # of the last two steps
        self._forgetting = forgetting
        num_weights = len(self._weights)
        self._gain = 1.0  # of the newest step: instead of the old ones' decay, its weight grows
        self._gram = [[0.0] * num_weights for _ in range(num_weights)]
        self._moment = [0.0] * num_weights
        self._lowest: tuple[int, ...] | None = None
        self._highest: tuple[int, ...] = ()
        self._num_steps = 0
        self._num_learnt = 0  # without those of a stored fit
        self._least_s = 0.0  # of the last steps; 0 before the first one
        self._unlearnt_s = 0.0  # of the steps since the last one that was learnt from

    @staticmethod
    def of_fit(fit: CostFit, forgetting: float = 0.99) -> LinearCostModel:
        """A model that continues from a fit, at the usual pace."""
        model = LinearCostModel(fit.coefficients, forgetting)
        model._is_scaled = True
        model._gram = [list(row) for row in fit.gram]
        model._moment = list(fit.moment)
        model._lowest, model._highest = astuple(fit.lowest), astuple(fit.highest)
        model._num_steps = fit.num_steps
        return model

    def fit(self) -> CostFit | None:
        """What was learnt so far; None before the first step."""
        if self._lowest is None:
            return None
        return CostFit(
            self.coefficients,
            tuple(tuple(value / self._gain for value in row) for row in self._gram),
            tuple(value / self._gain for value in self._moment),
            StepLoad(*self._lowest),
            StepLoad(*self._highest),
            self._num_steps,
        )

    @property
    def num_steps(self) -> int:
        """Steps that were learnt from, those of a stored fit included."""
        return self._num_steps

    @property
    def coefficients(self) -> Coefficients:
        """The current fit."""
        return Coefficients(*self._weights)

    @property
    def range(self) -> tuple[StepLoad, StepLoad] | None:
        """The least and the most of each unit in a measured step; None before the first."""
        if self._lowest is None:
            return None
        return StepLoad(*self._lowest), StepLoad(*self._highest)

    def seconds(self, load: StepLoad) -> float:
        """Predicted duration of a step."""
        return self._pace * self.usual_seconds(load)

    def usual_seconds(self, load: StepLoad) -> float:
        """The fit, whose pace is 1."""
        (
            step,
            token,
            row,
            kv_token,
            pair,
            score,
            logits,
            grammar,
            logprobs,
            adapter,
            logits_step,
            beyond_few,
            beyond_many,
        ) = self._weights
        num_tokens = load.num_tokens
        seconds = (  # written out, as the sum of loads
            step
            + token * num_tokens
            + row * load.num_rows
            + kv_token * load.num_kv_tokens
            + pair * load.num_pairs
            + score * load.num_scored
            + logits * load.num_logits_rows
            + grammar * load.num_grammar_rows
            + logprobs * load.num_logprobs_rows
            + adapter * load.num_adapter_rows
        )
        if load.num_logits_rows or load.num_scored:
            seconds += logits_step
        if num_tokens > _FEW_TOKENS:
            seconds += beyond_few * (num_tokens - _FEW_TOKENS)
        if num_tokens > _MANY_TOKENS:
            seconds += beyond_many * (num_tokens - _MANY_TOKENS)
        return seconds

    def unit_prices(self, step: StepLoad) -> UnitPrices:
        """The fit; the last token's price is that of all. A pace would change all of them alike."""
        weights, num_tokens = self._weights, step.num_tokens
        last_token_s = weights[1]
        if num_tokens > _FEW_TOKENS:
            last_token_s += weights[-2]
        if num_tokens > _MANY_TOKENS:
            last_token_s += weights[-1]
        return UnitPrices(last_token_s, *weights[2:10])

    def predict(self, load: StepLoad) -> Prediction:
        """The same, and whether `load` is outside of what was measured."""
        if self._lowest is None:
            return Prediction(self.seconds(load), is_extrapolated=True)
        return Prediction(self.seconds(load), not self._is_inside(astuple(load)))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a measured step, unless it and those since the last one that was learnt from
        are so short that learning would slow them down.
        """
        self._unlearnt_s += seconds
        if self._num_learnt >= _NUM_FIRST_STEPS and self._unlearnt_s < _LEARNING_PERIOD_S:
            return
        self._unlearnt_s = 0.0
        self.learn(load, seconds)

    def learn(self, load: StepLoad, seconds: float) -> None:
        """Learn from a measured step; impossible durations are ignored."""
        if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
            return
        fitted = self.usual_seconds(load)
        predicted = max(fitted, self._least_s, _MIN_SECONDS)
        self._least_s = min(seconds, _LEAST_GROWTH * self._least_s or seconds)
        is_early = self._num_learnt < _NUM_COLD_STEPS
        if not self._is_scaled or (is_early and self._was_cold(seconds, predicted)):
            self._scale(seconds / max(fitted, _MIN_SECONDS))
            predicted = seconds
        values = astuple(load)
        self._num_steps += 1
        self._num_learnt += 1
        self._widen(values)
        # the equations stay as they are where they hold exactly, as in the simulator
        if abs(seconds - fitted) > _EXACT * seconds:
            self._learn_from(load, values, seconds, predicted)
            fitted = self.usual_seconds(load)
        ratio = seconds / max(fitted, _MIN_SECONDS)
        # A single slow step says nothing of the next one: the median of three leaves it out.
        usual = sorted((*self._ratios, ratio))[1]
        self._ratios = self._ratios[1], ratio
        bounded = min(_MAX_PACE_RATIO, max(1.0 / _MAX_PACE_RATIO, usual))
        self._pace += _PACE_GAIN * (bounded - self._pace)

    def _learn_from(
        self, load: StepLoad, values: tuple[int, ...], seconds: float, predicted: float
    ) -> None:
        once_or_beyond = (
            int(load.num_logits_rows + load.num_scored > 0),
            max(0, load.num_tokens - _FEW_TOKENS),
            max(0, load.num_tokens - _MANY_TOKENS),
        )
        bounded_s = min(_MAX_RATIO * predicted, max(predicted / _MAX_RATIO, seconds))
        scale = max(predicted, bounded_s)  # of the step in the normal equations
        if self._gain > _MAX_GAIN:
            self._moment = [value / self._gain for value in self._moment]
            self._gram = [[value / self._gain for value in row] for row in self._gram]
            self._gain = 1.0
        self._gain /= self._forgetting
        terms: list[tuple[int, float]] = []
        for index, value in enumerate((1, *values, *once_or_beyond)):
            if value:
                terms.append((index, value / scale))
        for index, term in terms:
            weighted, row = self._gain * term, self._gram[index]
            self._moment[index] += weighted * (bounded_s / scale)
            for other, factor in terms:
                row[other] += weighted * factor
        self._sweep()

    def converge(self) -> None:
        """Solve the equations to the end, for a fit of many steps at once: `observe` does one pass
        of the solver per step.
        """
        for _ in range(_MAX_SWEEPS):
            before = list(self._weights)
            self._sweep()
            pairs = zip(before, self._weights, strict=True)
            if all(abs(new - old) <= _CONVERGED * old for old, new in pairs):
                return

    def _is_inside(self, values: tuple[int, ...]) -> bool:
        """Whether measured steps had as little and as much of each unit."""
        lowest = self._lowest or ()
        return all(map(le, lowest, values)) and all(map(ge, self._highest, values))

    def _widen(self, values: tuple[int, ...]) -> None:
        if self._lowest is None:
            self._lowest = self._highest = values
        elif not self._is_inside(values):
            self._lowest = tuple(map(min, self._lowest, values))
            self._highest = tuple(map(max, self._highest, values))

    def _was_cold(self, seconds: float, predicted: float) -> bool:
        """Whether the first steps were so slow, against this one, which is one of them, that they
        say nothing of others: memory and kernels were not ready.
        """
        return self._num_learnt == self._num_steps and seconds * _COLD_RATIO < predicted

    def _scale(self, factor: float) -> None:
        """Multiply all start values, as the only thing that is known."""
        num_weights = len(self._weights)
        self._gain = 1.0
        self._gram = [[0.0] * num_weights for _ in range(num_weights)]
        self._moment = [0.0] * num_weights
        self._is_scaled = True
        self._weights = [factor * weight for weight in self._weights]
        self._pulls = _pulls(self._weights)

    def _sweep(self) -> None:
        """One pass of coordinate descent: each weight to its optimum, at least 0, others fixed.

        It starts at the previous solution. A unit that was never seen keeps its weight.
        """
        weights, gain = self._weights, self._gain
        for index, row in enumerate(self._gram):
            if not row[index]:
                continue
            stiffness, pull = self._pulls[index]
            weight = weights[index]
            missing = self._moment[index] - sum(map(mul, row, weights))
            missing += gain * (pull - stiffness * weight)
            weights[index] = max(0.0, weight + missing / (row[index] + gain * stiffness))


def _pulls(priors: Sequence[float]) -> list[tuple[float, float]]:
    """The prior pulls `weight / prior` to 1 with the strength of a thousandth of a step: features
    that never vary separately keep the proportions of their start values. A cost that begins at 0
    is pulled there, as if it were that of a token.
    """
    stiffness = [_STIFFNESS / (prior or priors[1] or math.inf) ** 2 for prior in priors]
    return [(one, one * prior) for one, prior in zip(stiffness, priors, strict=True)]
