"""`python -m benchmarks.published`: the planner against published figures of LLM serving.

The cases are in `published_cases.yaml`, with their sources. Each is simulated as it was measured:
all requests at once, a closed loop of clients, or a rate, with the constants of its engine in
`plan/engines.yaml`. `--fit` computes these constants from the cases and writes them, with what is
left unexplained. A case is predicted in three ways: by the fit of all cases, without the case,
without all cases of its page, and without all cases of its publisher.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from quickstep.config import PolicyName
from quickstep.core.cost_model import StepLoad
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.errors import ConfigError
from quickstep.model.sizing import ElementBytes
from quickstep.plan.candidates import BLOCK_SIZE, Candidate, EngineLimits, Load, fit
from quickstep.plan.engines import (
    ENGINES_FILE,
    RANGE_POINTS,
    EngineFit,
    Errors,
    slowed,
    with_engine,
)
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import (
    Achieved,
    Hardware,
    HardwareTable,
    find_hardware,
    read_hardware,
)
from quickstep.plan.models import find_model
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival, Ending, Simulation
from quickstep.sim.simulate import simulate
from quickstep.sim.summary import percentile, summarize
from quickstep.types import Request, SamplingParams, StepRecord
from quickstep.yaml_file import read_yaml

Array = np.ndarray[Any, np.dtype[np.float64]]

CASES = Path(__file__).with_name("published_cases.yaml")
_SCRATCH_BYTES = 4
_PEAK = Achieved(0.95, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0)
_FEW = 20  # cases of an engine, below which its range is that of all engines


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where cases were read. `publisher`: Of several pages."""

    title: str
    address: str
    date: str
    publisher: str
    note: str = ""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured figure; see the head of `published_cases.yaml`."""

    source: str
    engine: str
    version: str
    gpu: str
    gpus: int
    model: str
    format: str
    inputs: int
    outputs: int
    requests: int
    max_num_seqs: int
    max_num_batched_tokens: int
    unit: str
    figure: float
    clients: int | None = None
    rate: float | None = None
    longest: int | None = None
    http: bool = True
    kv: str = "auto"

    @property
    def is_speed(self) -> bool:
        """Whether more is better."""
        return self.unit == "output tokens/s"


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of cases."""

    sources: dict[str, Source]
    cases: tuple[Case, ...]


def read_cases(file: Path = CASES) -> Published:
    """The cases, of which each has a source."""
    published = read_yaml(file, Published, "the cases")
    unknown = {case.source for case in published.cases} - set(published.sources)
    assert not unknown, f"cases without a source: {unknown}"
    return published


# -- simulation -----------------------------------------------------------------------------------


def lengths(mean: int, longest: int | None, count: int, rng: random.Random) -> list[int]:
    """Tokens of so many prompts or outputs: all equal, or with the tail of real conversations (an
    exponential distribution up to the longest, with the same mean), in random order.
    """
    if longest is None:
        return [mean] * count
    depths = [-math.log1p(-(place + 0.5) / count) for place in range(count)]
    low, high = 0.0, 1e6
    for _ in range(60):
        scale = 0.5 * (low + high)
        total = sum(min(float(longest), scale * depth) for depth in depths)
        low, high = (scale, high) if total < mean * count else (low, scale)
    found = [max(1, round(min(float(longest), high * depth))) for depth in depths]
    rng.shuffle(found)
    return found


def candidate_of(case: Case, achieved: Achieved, table: HardwareTable) -> Candidate:
    """The engine of a case with some constants."""
    hardware = find_hardware(f"{case.gpu}x{case.gpus}", table)
    return candidate_on(case, replace(hardware, achieved=achieved))


def candidate_on(case: Case, hardware: Hardware) -> Candidate:
    """The engine of a case on some hardware."""
    spec = find_model(case.model)
    longest = 2 * case.longest if case.longest else case.inputs + case.outputs
    spec = replace(spec, max_model_len=max(spec.max_model_len, longest))
    quantization = None if case.format == "bf16" else case.format
    kv_dtype = "fp8" if case.kv == "fp8" else "auto"
    return fit(
        spec,
        hardware,
        Split(case.gpus),
        ElementBytes(2, _SCRATCH_BYTES, quantization, kv_dtype),
        Load(1.0, longest - 1, 1),
        EngineLimits(case.max_num_seqs, case.max_num_batched_tokens),
    )


def simulated(case: Case, candidate: Candidate) -> Simulation:
    """The requests of a case; of many equal ones as many as the engine runs at once in three
    rounds, as their throughput is that of a steady state.
    """
    rng = random.Random(0)
    num_requests = case.requests
    if case.longest is None and case.is_speed:
        num_requests = min(num_requests, max(100, 3 * candidate.concurrency))
    num_inputs = lengths(case.inputs, case.longest, num_requests, rng)
    num_outputs = lengths(case.outputs, case.longest, num_requests, rng)

    def request(number: int) -> Request:
        sampling = SamplingParams(max_tokens=num_outputs[number], ignore_eos=True)
        return Request(str(number), (number,) * num_inputs[number], sampling, number)

    waiting = iter(range(num_requests))
    if case.rate is not None:
        at_s, arrivals = 0.0, []
        for number in waiting:
            at_s += rng.expovariate(case.rate)
            arrivals.append(Arrival(at_s, request(number)))
    else:
        first = range(min(case.clients or num_requests, num_requests))
        arrivals = [Arrival(0.0, request(next(waiting))) for _ in first]

    def follow(ending: Ending) -> Iterable[Arrival]:
        number = next(waiting, None)
        return () if number is None else (Arrival(ending.timings.finished_s, request(number)),)

    config = replace(
        candidate.scheduler_config,
        policy=PolicyName.MIXED if case.http else PolicyName.PREFILL_FIRST,
    )
    pool = KVBlockPool(candidate.num_blocks, BLOCK_SIZE, prefix_caching=False)
    outcome = simulate(
        arrivals,
        GroupedScheduler(config, pool, make_policy(config), candidate.stage_costs),
        candidate.costs,
        None if case.clients is None else follow,
        stages=candidate.stages,
    )
    assert len(outcome.endings) == num_requests, (case, outcome.refused[:1])
    return outcome


def figure_of(case: Case, candidate: Candidate, outcome: Simulation) -> float:
    """What was simulated, in the unit of the case."""
    if case.is_speed:
        num_tokens = sum(ending.timings.num_output_tokens for ending in outcome.endings)
        return num_tokens / outcome.finished_s
    summary = summarize(outcome, candidate.num_blocks)
    times = {"TTFT ms": summary.ttft_s, "TPOT ms": summary.tpot_s, "E2E ms": summary.e2e_s}
    return 1e3 * times[case.unit].mean


# -- the fit --------------------------------------------------------------------------------------

# (prior, standard deviation of its logarithm over all engines, and of an engine's from that)
PRIORS = {
    "memory": (0.75, 0.15, 0.1),
    "kv": (0.65, 0.3, 0.15),
    "compute": (0.55, 0.3, 0.15),
    "fp8": (0.45, 0.3, 0.15),
    "int8": (0.45, 0.3, 0.15),
    "int4": (0.35, 0.4, 0.15),
    "experts": (0.6, 0.4, 0.2),
    "link": (0.5, 0.4, 0.15),
    "half_tokens": (100.0, 1.0, 0.3),
    "step_overhead_s": (1e-3, 0.7, 0.3),
    "layer_overhead_s": (15e-6, 0.7, 0.3),
    "row_overhead_s": (30e-6, 1.0, 0.4),
    "offline_row_s": (10e-6, 1.0, 0.4),
}
NAMES = tuple(PRIORS)
_BOUNDED = ("memory", "kv", "compute", "fp8", "int8", "int4", "experts", "link")
_NOISE = 0.2  # of a figure, in its logarithm: from one host and version to another
_HUBER = 1.5  # standard deviations beyond which a case pulls no harder
_DELTA = 0.02  # half a step of the derivatives
_ROUNDS = 8


class Steps(msgspec.Struct, frozen=True):
    """The steps of a simulated case, with their parts at the data sheet's figures."""

    case: Case
    value: float  # of the simulation
    seconds: Array  # of the simulation
    weights: Array
    products: Array
    kv: Array
    pairs: Array
    latency: Array
    link: Array
    tokens: Array
    rows: Array
    decode_rows: Array
    prefills: Array
    num_layers: int
    is_mixture: bool

    @property
    def key(self) -> str:
        """The parameter of its products."""
        return "compute" if self.case.format == "bf16" else self.case.format

    def times(self, constants: dict[str, float]) -> Array:
        """Seconds of the steps, as `RooflineCostModel` has them."""
        experts = constants["experts"] if self.is_mixture else 1.0
        half = constants["half_tokens"]
        diluted = self.products * (1.0 + half / np.maximum(self.tokens, half))
        matrix = np.maximum(
            self.weights / (experts * constants["memory"]),
            diluted / (experts * constants[self.key]),
        )
        attention = np.maximum(self.kv / constants["kv"], self.pairs / constants["compute"])
        row_s = constants["row_overhead_s" if self.case.http else "offline_row_s"]
        overhead = constants["step_overhead_s"] + self.num_layers * constants["layer_overhead_s"]
        transfer = self.latency + self.link / constants["link"]
        return matrix + attention + transfer + overhead + row_s * self.rows

    def predicted(self, constants: dict[str, float]) -> float:
        """The figure with other constants: the same steps, each as long as it takes then."""
        counts = {"TPOT ms": self.decode_rows, "TTFT ms": self.prefills}.get(self.case.unit)
        if counts is None:
            counts = np.ones(1)
        ratio = float(np.sum(counts * self.times(constants)) / np.sum(counts * self.seconds))
        return self.value / ratio if self.case.is_speed else self.value * ratio

    def log_error(self, constants: dict[str, float]) -> float:
        """The logarithm of how many times as fast as predicted the engine was."""
        error = math.log(self.case.figure / self.predicted(constants))
        return error if self.case.is_speed else -error


def constants_of(logs: Array) -> dict[str, float]:
    """By name, of their logarithms."""
    found = dict(zip(NAMES, np.exp(logs).tolist(), strict=True))
    return {name: min(1.0, at) if name in _BOUNDED else at for name, at in found.items()}


def achieved_of(constants: dict[str, float], http: bool = True) -> Achieved:
    """For a cost model."""
    known = dict(constants)
    offline = known.pop("offline_row_s")
    if not http:
        known["row_overhead_s"] = offline
    return Achieved(capacity=_PEAK.capacity, **known)


def steps_of(case: Case, constants: dict[str, float], table: HardwareTable) -> Steps:
    """Simulate a case with some constants."""
    candidate = candidate_of(case, achieved_of(constants, case.http), table)
    outcome = simulated(case, candidate)
    peak = candidate_of(case, _PEAK, table).costs
    slow = candidate_of(case, replace(_PEAK, link=0.5), table).costs
    parts = []
    for record in outcome.records:
        load = load_of(record)
        at_peak = peak.parts(load)
        link = slow.parts(load).transfer_s - at_peak.transfer_s if case.gpus > 1 else 0.0
        parts.append(
            (
                record.seconds,
                at_peak.weights_read_s,
                at_peak.matrix_compute_s,
                at_peak.kv_read_s,
                at_peak.attention_compute_s,
                at_peak.transfer_s - link,
                link,
                load.num_tokens,
                load.num_rows,
                record.num_decode_rows,
                float(record.num_prefill_rows > 0),
            )
        )
    columns = [np.array(column, dtype=np.float64) for column in zip(*parts, strict=True)]
    value = figure_of(case, candidate, outcome)
    spec = candidate.spec
    return Steps(case, value, *columns, spec.num_layers, spec.moe is not None)


def load_of(record: StepRecord) -> StepLoad:
    """Of a step of the log."""
    return StepLoad(
        record.num_prefill_tokens + record.num_decode_tokens,
        record.num_prefill_rows + record.num_decode_rows,
        record.num_kv_tokens,
        record.num_pairs,
    )


class Fitted(msgspec.Struct):
    """All engines: `logs` of the shared constants, then each engine's distance from them."""

    engines: tuple[str, ...]
    logs: Array

    def of(self, engine: str) -> Array:
        """The logarithms of an engine's constants."""
        size = len(NAMES)
        start = size * (1 + self.engines.index(engine))
        return self.logs[:size] + self.logs[start : start + size]


def page_weights(cases: Sequence[Case]) -> Array:
    """Cases of one page are not independent: n of them count as the root of n."""
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.source] = counts.get(case.source, 0) + 1
    return np.array([counts[case.source] ** -0.5 for case in cases])


class Fit:
    """Least squares of logarithms with priors, and weights that bound what a case can pull."""

    def __init__(self, steps: Sequence[Steps]) -> None:
        self.steps = steps
        self.engines = tuple(sorted({simulated_case.case.engine for simulated_case in steps}))
        size = len(NAMES)
        middle = np.array([math.log(prior) for prior, _, _ in PRIORS.values()])
        spread = np.array([spread for _, spread, _ in PRIORS.values()])
        own = np.array([own for _, _, own in PRIORS.values()])
        self.start = np.concatenate([middle, np.zeros(size * len(self.engines))])
        widths = np.concatenate([spread, np.tile(own, len(self.engines))])
        self.precision = np.diag(widths**-2)
        self.weights = page_weights([simulated_case.case for simulated_case in steps]) / _NOISE**2

    def errors(self, fitted: Fitted, chosen: Iterable[int]) -> Array:
        """Of some cases."""
        known = {engine: constants_of(fitted.of(engine)) for engine in self.engines}
        return np.array(
            [self.steps[at].log_error(known[self.steps[at].case.engine]) for at in chosen]
        )

    def slopes(self, fitted: Fitted, chosen: Sequence[int]) -> Array:
        """How the errors change with the logarithms."""
        size = len(NAMES)
        found = np.zeros((len(chosen), len(self.start)))
        for row, at in enumerate(chosen):
            one = self.steps[at]
            logs = fitted.of(one.case.engine)
            start = size * (1 + self.engines.index(one.case.engine))
            for column in range(size):
                moved = np.zeros(size)
                moved[column] = _DELTA
                above = one.log_error(constants_of(logs + moved))
                below = one.log_error(constants_of(logs - moved))
                slope = (above - below) / (2.0 * _DELTA)
                found[row, column] = found[row, start + column] = slope
        return found

    def solve(self, chosen: Sequence[int], logs: Array, rounds: int) -> Fitted:
        """The constants for some cases, from a start."""
        fitted = Fitted(self.engines, logs.copy())
        for _ in range(rounds):
            errors, slopes = self.errors(fitted, chosen), self.slopes(fitted, chosen)
            pull = np.minimum(1.0, _HUBER * _NOISE / np.maximum(np.abs(errors), 1e-9))
            weights = self.weights[list(chosen)] * pull
            left = slopes.T @ (weights[:, None] * slopes) + self.precision
            right = slopes.T @ (weights * errors) + self.precision @ (fitted.logs - self.start)
            change = np.linalg.solve(left, -right)
            fitted.logs = fitted.logs + np.clip(change, -0.5, 0.5)
        return fitted

    def without(
        self, fitted: Fitted, groups: Sequence[str], rounds: int, errors: Array, slopes: Array
    ) -> Array:
        """The error of each case, predicted without all cases of its group: one step of the fit
        from the constants of all cases, where `errors` and `slopes` are, and then some rounds.
        """
        pull = np.minimum(1.0, _HUBER * _NOISE / np.maximum(np.abs(errors), 1e-9))
        weights = self.weights * pull
        left = slopes.T @ (weights[:, None] * slopes) + self.precision
        found = np.zeros(len(self.steps))
        for group in sorted(set(groups)):
            chosen = [at for at, own in enumerate(groups) if own == group]
            rest = [at for at, own in enumerate(groups) if own != group]
            heavy = weights[chosen, None] * slopes[chosen]
            change = np.linalg.solve(left - slopes[chosen].T @ heavy, heavy.T @ errors[chosen])
            logs = fitted.logs + np.clip(change, -0.5, 0.5)
            found[chosen] = self.errors(self.solve(rest, logs, rounds), chosen)
        return found


# -- the score ------------------------------------------------------------------------------------


def distance(error: float) -> float:
    """How far a prediction is from the figure, as a part of the figure."""
    return math.exp(abs(error)) - 1.0


def factors_of(errors: Sequence[float]) -> tuple[float, ...]:
    """How many times as fast as in the median case engines were, at the points of the range: with
    all cases, the median is where the fit predicts.
    """
    ordered = sorted(errors)
    middle = percentile(ordered, 0.5)
    points = (percentile(ordered, point) for point in RANGE_POINTS)
    return tuple([round(math.exp(point - middle), 3) for point in points])


def is_inside(error: float, factors: Sequence[float]) -> bool:
    """Whether a figure is in the range."""
    return factors[0] <= math.exp(error) <= factors[-1]


class Score(msgspec.Struct, frozen=True):
    """The errors of all cases, in their order: predicted by the fit of all; without the case;
    without its page; without its publisher; without its GPU.
    """

    fitted: Array
    alone: Array
    page: Array
    publisher: Array
    gpu: Array


def scored(known: Fit, fitted: Fitted, published: Published) -> Score:
    """Predict each case in all ways."""
    chosen = range(len(known.steps))
    errors, slopes = known.errors(fitted, chosen), known.slopes(fitted, chosen)
    cases = [simulated_case.case for simulated_case in known.steps]
    publishers = [published.sources[case.source].publisher for case in cases]
    known_as = (
        [str(place) for place in chosen],
        [case.source for case in cases],
        publishers,
        [case.gpu for case in cases],
    )
    left_out = [
        known.without(fitted, groups, rounds, errors, slopes)
        for groups, rounds in zip(known_as, (0, 0, 1, 1), strict=True)
    ]
    return Score(errors, *left_out)


def pool(cases: Sequence[Case], engine: str, errors: Array) -> list[float]:
    """The errors that an engine's range is made of: its own, or those of all engines if it has few
    cases.
    """
    own = [float(error) for case, error in zip(cases, errors, strict=True) if case.engine == engine]
    return own if len(own) >= _FEW else [float(error) for error in errors]


def engine_fits(cases: Sequence[Case], fitted: Fitted, score: Score) -> dict[str, EngineFit]:
    """What is written for each engine."""
    found = {}
    for engine in fitted.engines:
        constants = constants_of(fitted.of(engine))
        factors = factors_of(pool(cases, engine, score.publisher))
        elsewhere = factors_of(pool(cases, engine, score.gpu))
        own = [at for at, case in enumerate(cases) if case.engine == engine]

        def errors_by(name: str, own: list[int] = own) -> dict[str, Errors]:
            keys = sorted({str(getattr(cases[at], name)) for at in own})
            return {
                key: errors_of([at for at in own if str(getattr(cases[at], name)) == key])
                for key in keys
            }

        def errors_of(chosen: list[int], engine: str = engine) -> Errors:
            return Errors(
                len(chosen),
                round(float(np.median([distance(score.alone[at]) for at in chosen])), 3),
                round(coverage(cases, score, score.alone, chosen), 3),
            )

        found[engine] = EngineFit(
            rounded(achieved_of(constants)),
            float(f"{constants['offline_row_s']:.3g}"),
            factors,
            elsewhere,
            errors_of(own),
            errors_by("gpu"),
            errors_by("format"),
        )
    return found


def coverage(cases: Sequence[Case], score: Score, errors: Array, chosen: Sequence[int]) -> float:
    """The part of some cases, with these errors, that is inside the range which the other cases
    give: the case's own error is not in it.
    """
    inside = 0
    for at in chosen:
        others = np.arange(len(cases)) != at
        rest = [case for case, other in zip(cases, others, strict=True) if other]
        factors = factors_of(pool(rest, cases[at].engine, score.publisher[others]))
        inside += is_inside(float(errors[at]), factors)
    return inside / len(chosen)


def rounded(achieved: Achieved) -> Achieved:
    """With three digits."""
    return Achieved(
        **{name: float(f"{at:.3g}") for name, at in msgspec.structs.asdict(achieved).items()}
    )


# -- the command ----------------------------------------------------------------------------------

_HEAD = """\
# What inference engines reach on GPUs that were not measured here. Written by
# `python -m benchmarks.published --fit` from `benchmarks/published_cases.yaml`; do not edit.
#
# achieved: as in hardware.yaml, fitted. factors: how many times as fast an engine was as in the
# median case, at 10, 30, 50, 70 and 90 % of the cases, each predicted without its publisher's;
# other_gpu_factors: without its GPU's. errors, gpus, formats: of cases that were predicted each
# without itself: the median distance from the figure, and the part inside the range.
# An engine with fewer than 20 cases has the factors of all engines.
"""


def written(found: dict[str, EngineFit]) -> str:
    """The content of `engines.yaml`."""
    lines = [_HEAD, "engines:"]
    for engine, fitted in found.items():
        values = {
            name: at
            for name, at in msgspec.structs.asdict(fitted.achieved).items()
            if at is not None
        }
        lines += [f"  {engine}:", "    achieved:"]
        lines += [f"      {name}: {_number(at)}" for name, at in values.items()]
        lines.append(f"    offline_row_overhead_s: {_number(fitted.offline_row_overhead_s)}")
        lines.append(f"    factors: {list(fitted.factors)}")
        lines.append(f"    other_gpu_factors: {list(fitted.other_gpu_factors)}")
        lines.append(f"    errors: {_errors_text(fitted.errors)}")
        for what, groups in (("gpus", fitted.gpus), ("formats", fitted.formats)):
            lines.append(f"    {what}:")
            lines += [f"      {name}: {_errors_text(errors)}" for name, errors in groups.items()]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".") if value < 1 else f"{value:g}"


def _errors_text(errors: Errors) -> str:
    return (
        f"{{num_cases: {errors.num_cases}, median_error: {errors.median_error:g}, "
        f"inside: {errors.inside:g}}}"
    )


def summary_lines(published: Published, cases: Sequence[Case], score: Score) -> list[str]:
    """What is left unexplained: of all cases, and by engine, GPU class, format and unit."""
    lines = ["| cases | | predicted with | median error | within 20 % | in the range |"]
    lines.append("|---|---|---|---|---|---|")
    ways = (
        ("all cases", score.fitted),
        ("all but the case", score.alone),
        ("all but its page", score.page),
        ("all but its publisher", score.publisher),
        ("all but its GPU", score.gpu),
    )
    everything = list(range(len(cases)))
    for name, errors in ways:
        lines.append(_row("all", everything, name, cases, errors, score))
    for what in ("engine", "gpu", "format", "unit", "http"):
        for key in sorted({str(getattr(case, what)) for case in cases}):
            chosen = [at for at in everything if str(getattr(cases[at], what)) == key]
            for name, errors in (ways[1], ways[3]):
                lines.append(_row(f"{what} {key}", chosen, name, cases, errors, score))
    return lines


def _row(
    what: str,
    chosen: Sequence[int],
    way: str,
    cases: Sequence[Case],
    errors: Array,
    score: Score,
) -> str:
    distances = [distance(float(errors[at])) for at in chosen]
    near = sum(error <= 0.2 for error in distances) / len(chosen)
    inside = coverage(cases, score, errors, chosen)
    return (
        f"| {what} | {len(chosen)} | {way} | {float(np.median(distances)):.0%} | {near:.0%} "
        f"| {inside:.0%} |"
    )


def case_lines(published: Published, cases: Sequence[Case], score: Score) -> list[str]:
    """A row for each case, the worst first."""
    lines = [
        "| engine | GPUs | model | in/out | requests | figure | without it | without its publisher "
        "| source |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for at in sorted(range(len(cases)), key=lambda at: -abs(float(score.publisher[at]))):
        case = cases[at]
        load = f"{case.requests} at once"
        if case.clients is not None:
            load = f"{case.clients} clients"
        elif case.rate is not None:
            load = f"{case.rate:g}/s"
        way = "" if case.http else ", no HTTP"
        lines.append(
            f"| {case.engine} {case.version} | {case.gpus} x {case.gpu} | {case.model} "
            f"{case.format} | {case.inputs}/{case.outputs} | {load}{way} "
            f"| {case.figure:,g} {case.unit} | {_signed(case, score.alone[at])} "
            f"| {_signed(case, score.publisher[at])} | {case.source} |"
        )
    return lines


def _signed(case: Case, error: float) -> str:
    """How far the predicted figure is from the published one."""
    return f"{math.exp(-error if case.is_speed else error) - 1.0:+.0%}"


def fit_all(published: Published) -> tuple[Fit, Fitted]:
    """The constants: simulate and fit. Where the load depends on the step times, because requests
    arrive at a rate, once more with what was found.
    """
    table = read_hardware()
    start = {name: prior[0] for name, prior in PRIORS.items()}
    steps = []
    for place, case in enumerate(published.cases):
        print(f"\r{place + 1} of {len(published.cases)}", end="", file=sys.stderr, flush=True)
        try:
            steps.append(steps_of(case, start, table))
        except ConfigError as error:
            print(f"\nthe planner refuses a case of {case.source}: {error}", file=sys.stderr)
    print(file=sys.stderr)
    return fit_steps(steps, table)


def fit_steps(steps: list[Steps], table: HardwareTable) -> tuple[Fit, Fitted]:
    """The constants of simulated cases."""
    known = Fit(steps)
    fitted = known.solve(range(len(steps)), known.start, _ROUNDS)
    for at, one in enumerate(steps):
        if one.case.rate is not None:
            steps[at] = steps_of(one.case, constants_of(fitted.of(one.case.engine)), table)
    known = Fit(steps)
    return known, known.solve(range(len(steps)), fitted.logs, _ROUNDS)


def check(published: Published) -> None:
    """Simulate all cases with the constants of `engines.yaml`, and print a row for each."""
    table = read_hardware()
    errors = []
    print("| case | published | low | likely | high | error |")
    print("|---|---|---|---|---|---|")
    for case in published.cases:
        hardware = find_hardware(f"{case.gpu}x{case.gpus}", table)
        hardware, evidence = with_engine(hardware, case.engine, not case.http)
        values = []
        try:
            for factor in (evidence.factors[0], 1.0, evidence.factors[-1]):
                candidate = candidate_on(case, slowed(hardware, 1.0 / factor))
                values.append(figure_of(case, candidate, simulated(case, candidate)))
        except ConfigError as error:
            print(f"the planner refuses a case of {case.source}: {error}", file=sys.stderr)
            continue
        errors.append(math.log(case.figure / values[1]))
        low, likely, high = sorted(values)
        name = f"{case.engine}, {case.gpus} x {case.gpu}, {case.model} {case.format}"
        print(
            f"| {name}, {case.inputs}/{case.outputs} | {case.figure:,g} {case.unit} | {low:,.4g} "
            f"| {likely:,.4g} | {high:,.4g} | {math.exp(-errors[-1]) - 1.0:+.0%} |",
            flush=True,
        )
    middle = float(np.median([distance(error) for error in errors]))
    print(f"\n{len(errors)} cases, median error {middle:.0%}")


def main() -> None:
    """Print how each case is predicted; or compute the constants anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="write plan/engines.yaml")
    args = parser.parse_args()
    published = read_cases()
    if not args.fit:
        check(published)
        return
    known, fitted = fit_all(published)
    score = scored(known, fitted, published)
    cases = [simulated_case.case for simulated_case in known.steps]
    ENGINES_FILE.write_text(written(engine_fits(cases, fitted, score)), encoding="utf-8")
    print("\n".join(summary_lines(published, cases, score)))
    print()
    print("\n".join(case_lines(published, cases, score)))


if __name__ == "__main__":
    main()
