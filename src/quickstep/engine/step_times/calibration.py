"""Calibration: synthetic steps on an engine's executor, and the fit of the step-time model to them.

`quickstep calibrate` calls it. Rounds of up to `max_num_seqs` sequences with random contexts run
decode steps, chunks of a prompt, and both together, until the time is over; some rows list
log-probabilities, have a grammar, or score their prompt. Contexts are not computed: attention reads
zeros, which takes as long. The first step of a round is not measured: it reads contexts that no
cache holds, where a real step reads those of the step before it. Each fifth step is held out to
measure the error of predictions; pairs of equal steps show how much of it is the machine's noise.
Steps that took far longer than the fit says, because something else had the cores, are left out of
the fit, but not of the errors.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import msgspec
from msgspec.structs import replace

from quickstep.core.cost_model import Coefficients, CostFit, LinearCostModel, StepLoad
from quickstep.core.overhead import EngineOverhead, StageTimes
from quickstep.errors import EngineError
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import HostTensor
from quickstep.types import (
    Admission,
    Executor,
    Grammar,
    Phase,
    RowState,
    SamplingParams,
    StepPlan,
    StepResult,
    StepRow,
)

_HELD_OUT = 5  # every fifth step
_NUM_WARM_UP = 4  # steps that are not measured
_MIN_STEPS = 20
_MAX_STEP_PART = 1 / 40  # of all the time, for a single step
_STEPS_PER_ROUND = 8
# Steps that took so many times as long as the median step next to the fit are left out of it; the
# fit without them finds others. With another process on a core, a sixth of the steps took 1.7 times
# as long: the fit was 9 % off for steps on the idle machine, and 5 % without them, as much as a fit
# to steps on the idle machine.
_SLOW = 1.3
_NUM_FITS = 4
_MAX_KV_BYTES = 2**30  # of KV that contexts are spread over


class StepKind(enum.Enum):
    """Which rows a step has."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


_KIND_OF_PHASE = {Phase.DECODE: StepKind.DECODE, Phase.PREFILL: StepKind.PREFILL}


class MeasuredStep(msgspec.Struct, frozen=True):
    """A step and how long it took; `is_repeat`: its rows are those of the step before it."""

    kind: StepKind
    load: StepLoad
    seconds: float
    is_repeat: bool = False


class PhaseError(msgspec.Struct, frozen=True):
    """Relative errors of predictions on held-out steps of one kind; `num_extrapolated` of them
    are outside of what the fit has seen.
    """

    kind: StepKind
    num_steps: int
    num_extrapolated: int
    mean: float
    median: float
    p95: float


class Calibration(msgspec.Struct, frozen=True):
    """The fit to all steps, and the errors of a fit to four fifths of them on the others.

    `noise` is the least mean error of any prediction on this machine, by pairs of decode steps with
    the same rows: how much their times differ, over the square root of 2. None without pairs.
    `overhead` is the engine's own time between steps; None until it was measured. `num_slow` of the
    steps are left out of the fit. `stages` are those of a pipeline, whose mean stage the fit is of.
    """

    fit: CostFit
    errors: tuple[PhaseError, ...]
    num_slow: int
    noise: float | None = None
    overhead: EngineOverhead | None = None
    stages: StageTimes | None = None


class StepLimits(msgspec.Struct, frozen=True):
    """Sizes of the engine that runs the steps, in tokens and blocks.

    `grammar` is one that the engine has compiled and that no few tokens complete; None for rows
    without grammars. `has_states`: each sequence has a state, of which there are slots enough.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    grammar: Grammar | None = None
    eos_token_ids: frozenset[int] = frozenset()
    has_states: bool = False


class _Sequence(msgspec.Struct):
    """A synthetic sequence in a slot; `start` is its next position."""

    slot: int
    start: int
    end: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    num_outputs: int = 0
    has_state: bool = False

    def row(self, num_tokens: int, phase: Phase, emits: bool, token_id: int) -> StepRow:
        """The next row. It brings all blocks the first time."""
        is_scored = phase is Phase.PREFILL and self.sampling.prompt_logprobs is not None
        row = StepRow(
            self.slot,
            self.start,
            num_tokens,
            (token_id,) * num_tokens,
            self.block_ids,
            phase,
            emits,
            self.num_outputs,
            score_start=self.start if is_scored else 0,
            num_scored=num_tokens if is_scored else 0,
            state=RowState(self.slot, self.slot) if self.has_state else None,
        )
        self.start += num_tokens
        self.num_outputs += emits
        self.block_ids = ()
        return row


def write_kv(kv: KVCache) -> int:
    """Write zeros to as many blocks as contexts are spread over, and return their number: memory
    that was never written is not there yet, and reading it takes no time.
    """
    tensors = kv.tensors
    num_blocks = tensors[0].shape[0]
    block_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors) // num_blocks
    num_used = max(1, min(num_blocks, _MAX_KV_BYTES // block_bytes))
    for tensor in tensors:
        elements = tensor.numpy() if isinstance(tensor, HostTensor) else tensor
        elements[:num_used] = 0
    return int(num_used)


class _Rounds:
    """Runs rounds of steps and collects the measured ones."""

    def __init__(
        self,
        executor: Executor,
        limits: StepLimits,
        start: Coefficients,
        seconds: float,
        clock: Callable[[], float],
        seed: int,
    ) -> None:
        self.steps: list[MeasuredStep] = []
        self._executor = executor
        self._limits = limits
        self._model = LinearCostModel(start)  # so far: it bounds the time of a step
        self._max_step_s = seconds * _MAX_STEP_PART
        self._clock = clock
        self._until_s = clock() + seconds
        self._rng = Random(seed)
        self._num_sequences = 0
        self._num_rounds = 0
        self._num_steps = 0
        self._released: tuple[int, ...] = ()
        self._newest_rows: list[_Sequence] = []  # that decoded in the last step
        self._stage_s: list[float] = []  # of a pipeline, of all measured steps
        self._hops_s: list[float] = []  # what those took in addition

    @property
    def is_over(self) -> bool:
        """Whether the time is over, with enough steps."""
        return self._clock() >= self._until_s and len(self.steps) >= _MIN_STEPS

    def run(self) -> None:
        """One round: new sequences, then steps of each kind."""
        limits, most = self._limits, min(self._limits.max_num_seqs, self._limits.num_blocks)
        num_rows = _log_uniform(self._rng, 1, most)
        if self._num_rounds < 2:  # the extremes first
            num_rows = (1, most)[self._num_rounds]
        self._num_rounds += 1
        num_sequences = min(most, num_rows + 1)
        room = limits.num_blocks // num_sequences * limits.block_size
        max_len = min(limits.max_model_len, room)
        longest = _log_uniform(self._rng, min(max_len, 2 * _STEPS_PER_ROUND), max_len)
        sequences = [self._sequence(slot, longest, _STEPS_PER_ROUND) for slot in range(num_rows)]
        prompt = None
        if num_sequences > num_rows:
            prompt = self._sequence(num_rows, max_len, max_len // 2, is_prompt=True)
        self._place((*sequences, prompt) if prompt else sequences)
        admitted = tuple(map(self._admission, (*sequences, prompt) if prompt else sequences))
        self._submit((), admitted)
        for number in range(_STEPS_PER_ROUND):
            if self.is_over:
                break
            kind = (StepKind.DECODE, StepKind.DECODE, StepKind.MIXED, StepKind.PREFILL)[number % 4]
            self._step(kind, sequences, prompt, number)
        self._released = tuple(range(num_sequences))

    def _sequence(
        self, slot: int, max_len: int, reserve: int, is_prompt: bool = False
    ) -> _Sequence:
        """A sequence with a random context that leaves `reserve` tokens for its steps."""
        rng = self._rng
        longest = max(0, max_len - reserve - 1)
        start = 0 if is_prompt and rng.random() < 0.5 else rng.randint(0, longest)
        end = min(max_len, start + reserve)
        return _Sequence(
            slot, start, end, (), self._sampling(is_prompt), has_state=self._limits.has_states
        )

    def _sampling(self, is_prompt: bool) -> SamplingParams:
        rng = self._rng
        sampling = SamplingParams()
        if is_prompt:
            return replace(sampling, prompt_logprobs=0) if rng.random() < 0.3 else sampling
        if rng.random() < 0.2:
            sampling = replace(sampling, logprobs=2)
        if self._limits.grammar is not None and rng.random() < 0.2:
            sampling = replace(sampling, grammar=self._limits.grammar)
        return sampling

    def _place(self, sequences: Sequence[_Sequence]) -> None:
        """Give each sequence its blocks, in random order as in a pool in use."""
        block_ids = list(range(self._limits.num_blocks))
        self._rng.shuffle(block_ids)
        for sequence in sequences:
            count = -(-sequence.end // self._limits.block_size)
            sequence.block_ids = tuple(block_ids[:count])
            assert len(sequence.block_ids) == count, "the contexts fit into the blocks"
            del block_ids[:count]

    def _admission(self, one: _Sequence) -> Admission:
        self._num_sequences += 1
        # a scored position needs the token after it
        prompt = (self._token_id(),) * (one.end + 1)
        return Admission(
            one.slot,
            f"calibration-{self._num_sequences}",
            prompt,
            len(prompt),
            one.sampling,
            seed=self._num_sequences,
            eos_token_ids=self._limits.eos_token_ids,
        )

    def _token_id(self) -> int:
        return self._rng.randrange(self._limits.vocab_size)

    def _step(
        self, kind: StepKind, decodes: list[_Sequence], prompt: _Sequence | None, number: int
    ) -> None:
        """Run step `number` of the round; the second of each four repeats the first."""
        rng = self._rng
        chosen = [decode for decode in decodes if decode.start < decode.end]
        is_repeat = number % 4 == 1 and all(
            sequence.start < sequence.end for sequence in self._newest_rows
        )
        if kind is StepKind.PREFILL:
            chosen = []
        elif is_repeat:
            chosen = self._newest_rows
        elif chosen and number:
            chosen = rng.sample(chosen, rng.randint(1, len(chosen)))
        self._newest_rows = chosen
        rows = [sequence.row(1, Phase.DECODE, True, self._token_id()) for sequence in chosen]
        samplings = [sequence.sampling for sequence in chosen]
        load = sum(map(StepLoad.of_row, rows, samplings), start=StepLoad())
        left = prompt.end - prompt.start if prompt else 0
        if kind is not StepKind.DECODE and prompt and left:
            room = max(1, self._limits.max_num_batched_tokens - len(chosen))
            num_tokens = self._shortened(load, prompt.start, _log_uniform(rng, 1, min(room, left)))
            emits = rng.random() < 0.5
            rows.append(prompt.row(num_tokens, Phase.PREFILL, emits, self._token_id()))
            load += StepLoad.of_row(rows[-1], prompt.sampling)
        if not rows:
            return
        result = self._submit(tuple(rows), ())
        self._model.learn(load, result.seconds)
        if self._num_steps > _NUM_WARM_UP and number:
            kinds = {row.phase for row in rows}
            kind = StepKind.MIXED if len(kinds) > 1 else _KIND_OF_PHASE[kinds.pop()]
            is_repeat = is_repeat and number > 1  # the first step was not measured
            self.steps.append(MeasuredStep(kind, load, result.seconds, is_repeat))

    def _shortened(self, load: StepLoad, start: int, num_tokens: int) -> int:
        """The largest half, quarter, ... of a chunk that keeps the step short enough."""
        while num_tokens > 1:
            chunk = StepLoad.of_span(start, num_tokens)
            if self._model.seconds(load + chunk) <= self._max_step_s:
                break
            num_tokens //= 2
        return num_tokens

    def _submit(self, rows: tuple[StepRow, ...], admitted: tuple[Admission, ...]) -> StepResult:
        plan = StepPlan(self._num_steps, rows, admitted, self._released)
        self._released = ()
        self._num_steps += bool(rows)
        begin_s = self._clock()
        result = self._executor.submit(plan).result()
        if result.failures:
            raise EngineError(f"a step of the calibration failed: {result.failures[0].reason}")
        if result.stage_s and self._num_steps > _NUM_WARM_UP:
            self._hops_s.append(self._clock() - begin_s - sum(result.stage_s))
            sums = self._stage_s or [0.0] * len(result.stage_s)
            self._stage_s = [sum(pair) for pair in zip(sums, result.stage_s, strict=True)]
        return result

    @property
    def stages(self) -> StageTimes | None:
        """How steps passed the stages of a pipeline; None without one."""
        if not self._stage_s:
            return None
        total_s = sum(self._stage_s)
        hop_s = statistics.median(self._hops_s) / (len(self._stage_s) - 1)
        return StageTimes(tuple([part / total_s for part in self._stage_s]), max(0.0, hop_s))


def calibrate(
    executor: Executor,
    limits: StepLimits,
    start: Coefficients,
    seconds: float,
    clock: Callable[[], float],
    seed: int = 0,
    elapsed: Callable[[float], None] | None = None,
) -> Calibration:
    """Run steps for about `seconds` and fit the model to them; `elapsed` is called with those that
    are over.

    The executor must be new or have no sequences left. `clock` gives monotonic seconds.

    Raises:
        EngineError: A step failed.
    """
    rounds = _Rounds(executor, limits, start, seconds, clock, seed)
    begin_s = clock()
    while not rounds.is_over:
        rounds.run()
        if elapsed is not None:
            elapsed(min(clock() - begin_s, seconds))
    return replace(evaluate(rounds.steps, start, seed), stages=rounds.stages)


def evaluate(steps: Sequence[MeasuredStep], start: Coefficients, seed: int = 0) -> Calibration:
    """Fit measured steps, which are shuffled: of their order, only repeated steps matter."""
    shuffled = list(steps)
    Random(seed).shuffle(shuffled)
    held_out = shuffled[::_HELD_OUT]
    others = [one for place, one in enumerate(shuffled) if place % _HELD_OUT]
    model = LinearCostModel.of_fit(fit_steps(others, start))
    errors = []
    for kind in StepKind:
        steps_of_kind = [step for step in held_out if step.kind is kind]
        predictions = [model.predict(step.load) for step in steps_of_kind]
        of_kind = [
            abs(prediction.seconds / one.seconds - 1.0)
            for prediction, one in zip(predictions, steps_of_kind, strict=True)
        ]
        if of_kind:
            num_extrapolated = sum(prediction.is_extrapolated for prediction in predictions)
            p95 = sorted(of_kind)[math.ceil(0.95 * len(of_kind)) - 1]
            mean, median = statistics.fmean(of_kind), statistics.median(of_kind)
            errors.append(PhaseError(kind, len(of_kind), num_extrapolated, mean, median, p95))
    fit = fit_steps(shuffled, start)
    return Calibration(fit, tuple(errors), len(shuffled) - fit.num_steps, _noise(steps))


def _noise(steps: Sequence[MeasuredStep]) -> float | None:
    """`Calibration.noise`."""
    differences = [
        abs(repeat.seconds / first.seconds - 1.0)
        for first, repeat in pairwise(steps)
        if repeat.is_repeat
    ]
    return statistics.fmean(differences) / math.sqrt(2.0) if differences else None


def fit_steps(steps: Sequence[MeasuredStep], start: Coefficients) -> CostFit:
    """The fit in which all steps count alike, but for those that are left out as slow."""
    kept = list(steps)
    for _ in range(_NUM_FITS):
        fit = _fit_all(kept, start)
        model = LinearCostModel.of_fit(fit)
        ratios = [step.seconds / model.seconds(step.load) for step in steps]
        limit = _SLOW * statistics.median(ratios)
        usual = [one for one, ratio in zip(steps, ratios, strict=True) if ratio < limit]
        if len(usual) == len(kept):
            break
        kept = usual
    return fit


def _fit_all(steps: Sequence[MeasuredStep], start: Coefficients) -> CostFit:
    """The fit in which all steps count alike.

    A first pass brings the coefficients near, so that the bounds on outliers of the second pass do
    not depend on the start values.
    """
    near = LinearCostModel(start)
    for _ in range(2):
        for step in steps:
            near.learn(step.load, step.seconds)
    near.converge()
    model = LinearCostModel(near.coefficients, forgetting=1.0)
    for step in steps:
        model.learn(step.load, step.seconds)
    model.converge()
    fit = model.fit()
    assert fit is not None, "there are measured steps"
    return fit


def _log_uniform(rng: Random, low: int, high: int) -> int:
    """A random integer from `low` to `high`, small ones more often; `low` if there is no range."""
    value = math.exp(rng.uniform(math.log(low + 1), math.log(max(low, high) + 1))) - 1
    return min(max(low, high), max(low, round(value)))
