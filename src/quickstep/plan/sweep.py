"""`quickstep simulate --sweep`: which combination of options serves a load within its targets.

Every combination gets the same clients. Its *knee* is the highest rate at which enough requests are
within the targets: the highest of the rates that are given, or found by a search from the one that
is: upwards by doubling, downwards in growing steps to a floor, then by bisection of the logarithm.
The recommendation is the combination that costs least among those that serve the rate.

The requests that arrive when the load is there are counted (`sim.window`). A simulation ends when
those have ended, or when too many of them are late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from quickstep.config import PolicyName
from quickstep.core.cost_model import StepLoad
from quickstep.plan.candidates import Candidate
from quickstep.plan.processes import map_in_processes
from quickstep.sim.outcome import Simulation
from quickstep.sim.summary import Summary, Targets, ending_times, summarize
from quickstep.sim.window import CountedWindow, requests_for_load, window_of_load
from quickstep.types import StepRecord

_CLOSE = 1.05  # the knee is known to that factor
_MAX_DOUBLINGS = 10
_LOWER = (2.0, 8.0, 128.0)  # the rate is divided by; the last one is the floor
_MAX_REQUESTS = 50_000  # of a simulation: no higher rate is tried
_NUM_SAMPLED_STEPS = 400
_FULL = 0.97  # part of the KV blocks
_USUALLY = 0.5  # part of the steps


class Combination(msgspec.Struct, frozen=True):
    """Options of engines: each is on `tensor` devices, `replicas` of them share the requests."""

    policy: PolicyName
    max_num_batched_tokens: int
    tensor: int
    replicas: int

    @property
    def num_devices(self) -> int:
        """Devices of all engines."""
        return self.tensor * self.replicas

    def __str__(self) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"{self.policy.value}, {self.max_num_batched_tokens} tokens, TP {self.tensor}{replicas}"
        )


class SweepQuery(msgspec.Struct, frozen=True):
    """What is required.

    Attributes:
        rates: Sessions per second. Of several, the knee is one; the highest is to be served.
        attainment: The part of the requests that must be within the targets.
        mean_turns, session_s: Requests of a session, and the seconds that it thinks between them.
        least_requests: Of a simulation.
    """

    rates: tuple[float, ...]
    targets: Targets
    attainment: float = 0.9
    mean_turns: float = 1.0
    session_s: float = 0.0
    least_requests: int = 300

    def num_requests(self, rate: float) -> int:
        """How many requests a simulation needs."""
        needed = requests_for_load(rate, self.mean_turns, self.session_s)
        return max(self.least_requests, needed)

    def window(self, rate: float) -> CountedWindow:
        """The requests that count."""
        num_requests = self.num_requests(rate)
        start_s, end_s = window_of_load(rate, num_requests, self.mean_turns, self.session_s)
        return CountedWindow(start_s, end_s, self.targets, self.attainment, num_requests)


class SweepPoint(msgspec.Struct, frozen=True):
    """One simulation.

    Attributes:
        is_complete: False if it ended when too many requests were late: its figures are those of
            the requests that had ended.
        ttft_met, tpot_met: The parts of the complete requests within each target.
        binding: What most of its time was spent on, or what requests waited for.
    """

    rate: float
    met: bool
    is_complete: bool
    figures: Summary
    ttft_met: float
    tpot_met: float
    binding: str


class SweepRow(msgspec.Struct, frozen=True):
    """A combination.

    Attributes:
        knee: The highest rate that met the targets; 0 if none did, down to the first of `points`.
        limit: What is late above the knee, and why; "" if every rate met the targets.
        points: By rate.
    """

    combination: Combination
    num_devices: int
    usd_per_hour: float | None
    knee: float
    limit: str
    points: tuple[SweepPoint, ...]


class Sweep(msgspec.Struct, frozen=True):
    """The answer: `recommended` is the place of a row, and `met` whether it serves `rate`."""

    rate: float
    rows: tuple[SweepRow, ...]
    recommended: int
    met: bool
    recommendation: str


# A simulation of a combination's engines at a rate, with at most so many requests as the window
# says.
SimulateAt = Callable[[Combination, Candidate, float, CountedWindow], Simulation]


def run_sweep(
    query: SweepQuery,
    candidates: Sequence[tuple[Combination, Candidate]],
    simulate_at: SimulateAt,
    progress: Callable[[str, int, int], None] | None = None,
    num_processes: int = 1,
) -> Sweep:
    """Simulate all combinations. `candidates` is not empty; `progress` gets what runs now, how many
    combinations are done, and how many there are. With several processes, `simulate_at` has to be
    picklable.
    """

    def started(place: int, num_done: int) -> None:
        if progress is not None:
            progress(str(candidates[place][0]), num_done, len(candidates))

    row = partial(_row, query, simulate_at)
    rows = map_in_processes(row, candidates, num_processes, started)
    rate = max(query.rates)
    best = min(range(len(rows)), key=lambda place: _preference(rows[place], rate))
    met = rows[best].knee >= rate
    return Sweep(rate, tuple(rows), best, met, _recommendation(rows[best], rate, met, query))


def _row(
    query: SweepQuery, simulate_at: SimulateAt, combined: tuple[Combination, Candidate]
) -> SweepRow:
    combination, candidate = combined

    def point(rate: float, gives_up: bool = True) -> SweepPoint:
        window = replace(query.window(rate), gives_up=gives_up)
        return measure(candidate, rate, window, simulate_at(combination, candidate, rate, window))

    points = _points(query, point)
    points.sort(key=lambda one: one.rate)
    knee = max((point.rate for point in points if point.met), default=0.0)
    above = next((point for point in points if not point.met and point.rate > knee), None)
    if above is not None and not above.is_complete:  # what limits it is known at the end only
        place = points.index(above)
        points[place] = above = point(above.rate, gives_up=False)
    price = candidate.hardware.device.price
    return SweepRow(
        combination,
        combination.num_devices,
        None if price is None else price.usd_per_hour * combination.num_devices,
        knee,
        "" if above is None else _limit(above, query),
        tuple(points),
    )


def _points(query: SweepQuery, point: Callable[[float], SweepPoint]) -> list[SweepPoint]:
    """Those of several rates; of a single one, those of a search for the knee that begins there."""
    rates = query.rates
    points = [point(rate) for rate in rates]
    if len(rates) > 1:
        return points
    low = high = rates[0]
    if points[0].met:
        for _ in range(_MAX_DOUBLINGS):
            if query.num_requests(2.0 * high) > _MAX_REQUESTS:
                return points
            low, high = high, 2.0 * high
            points.append(point(high))
            if not points[-1].met:
                break
        else:
            return points
    else:
        for divisor in _LOWER:
            low, high = rates[0] / divisor, low
            points.append(point(low))
            if points[-1].met:
                break
        else:
            return points
    while high / low > _CLOSE:
        middle = math.sqrt(low * high)
        points.append(point(middle))
        low, high = (middle, high) if points[-1].met else (low, middle)
    return points


def measure(
    candidate: Candidate, rate: float, window: CountedWindow, outcome: Simulation
) -> SweepPoint:
    """The point of a simulation, which has ended with its window or later."""
    start_s, end_s, targets = window.start_s, window.end_s, window.targets
    begun = [ending for ending in outcome.endings if ending.timings.arrival_s <= end_s]
    summary = summarize(replace(outcome, endings=begun), candidate.num_blocks, targets, start_s)
    counted = [ending for ending in begun if ending.timings.arrival_s >= start_s]
    times = [found for found in map(ending_times, counted) if found is not None]
    parts = []
    for place, limit in enumerate((targets.ttft_s, targets.tpot_s)):
        num_met = sum(limit is None or of_ending[place] <= limit for of_ending in times)
        parts.append(num_met / len(times) if times else 0.0)
    met = not window.is_missed and summary.attainment >= window.attainment
    records = [record for record in outcome.records if start_s <= record.committed_at_s <= end_s]
    binding = binding_of(records, candidate, summary)
    is_complete = not (window.is_missed and window.gives_up)
    return SweepPoint(rate, met, is_complete, summary, parts[0], parts[1], binding)


def binding_of(records: Sequence[StepRecord], candidate: Candidate, summary: Summary) -> str:
    """What requests wait for if they usually wait, or what most of the steps' time is spent on."""
    if not records:
        return "nothing"
    waiting = sum(record.num_waiting > 0 for record in records) / len(records)
    if waiting > _USUALLY and summary.kv_used > _FULL:
        return "KV blocks are full"
    most = max(record.num_running for record in records)
    if waiting > _USUALLY and most >= candidate.limits.max_num_seqs:
        return "--max-num-seqs is reached"
    seconds: dict[str, float] = {}
    for record in records[:: max(1, len(records) // _NUM_SAMPLED_STEPS)]:
        load = StepLoad(
            record.num_prefill_tokens + record.num_decode_tokens,
            record.num_prefill_rows + record.num_decode_rows,
            record.num_kv_tokens,
            record.num_pairs,
            record.num_scored,
        )
        cause = candidate.costs.parts(load).binding
        seconds[cause] = seconds.get(cause, 0.0) + record.seconds
    return max(seconds, key=lambda cause: seconds[cause])


def _limit(point: SweepPoint, query: SweepQuery) -> str:
    late = "the first token" if point.ttft_met <= point.tpot_met else "the time per token"
    return f"{late} is late: {point.binding}"


def _preference(row: SweepRow, rate: float) -> tuple[float, ...]:
    """The cheapest that serves the rate, and of those the one that serves most; else the most."""
    if row.knee >= rate:
        return (0, row.usd_per_hour or 0.0, row.num_devices, -row.knee)
    return (1, -row.knee, row.num_devices)


def _recommendation(row: SweepRow, rate: float, met: bool, query: SweepQuery) -> str:
    devices = f"{row.num_devices} device{'s' if row.num_devices > 1 else ''}"
    price = "" if row.usd_per_hour is None else f", ${row.usd_per_hour:.2f}/h"
    name = f"{row.combination} ({devices}{price})"
    if not met:
        lowest = row.points[0].rate
        knee = f"serves up to {row.knee:.3g}/s" if row.knee else f"is late from {lowest:.3g}/s on"
        return (
            f"no combination has {query.attainment:.0%} of the requests in time at {rate:g} "
            f"sessions/s; the best, {name}, {knee}, then {row.limit}"
        )
    limit = f"; above that {row.limit}" if row.limit else ""
    return f"for {rate:g} sessions/s: {name}, which serves up to {row.knee:.3g}/s{limit}"
