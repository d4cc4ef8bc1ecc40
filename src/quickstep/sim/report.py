"""A simulation, or a recording, as the data of a report: a table, curves, and its records.

Made for the `--report` of `simulate`, `replay` and `plan`, which write them into a page
(`server.page.single_file`).
The page has the timeline of the server's page, so the records are those of its step log.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quickstep.core.explanation import explain
from quickstep.sim.outcome import Ending, Simulation
from quickstep.sim.summary import Summary, ending_times
from quickstep.types import SequenceTimings, StepRecord

_MAX_STEPS = 20_000  # of each run; the newest
_MAX_SEQUENCES = 4_000
_MAX_EXPLAINED = 500  # those that took longest
_MAX_POINTS = 200

Points = Sequence[tuple[float, float]]


class Run(msgspec.Struct, frozen=True):
    """One simulation of the report: its name, its load in sessions per second, the KV blocks.

    Requests that arrive before `counted_from_s` are not in its figures.
    """

    name: str
    rate: float
    num_blocks: int
    summary: Summary
    outcome: Simulation
    counted_from_s: float = 0.0

    @property
    def counted(self) -> list[Ending]:
        """The endings of the figures."""
        since_s = self.counted_from_s
        return [ending for ending in self.outcome.endings if ending.timings.arrival_s >= since_s]


class Line(msgspec.Struct, frozen=True):
    """A named line of a chart: its points (x, y), which are not joined if it `is_scattered`."""

    name: str
    points: Points
    is_scattered: bool = False


class Chart(msgspec.Struct, frozen=True):
    """Lines over one axis; the units are those of the axes. Both may be logarithmic."""

    title: str
    x_unit: str
    y_unit: str
    lines: tuple[Line, ...]
    is_logarithmic: bool = False


class MemoryPart(msgspec.Struct, frozen=True):
    """A part of a device's memory: what it is for, its bytes, and what they are made of."""

    name: str
    num_bytes: int
    detail: str


class Cell(msgspec.Struct, frozen=True):
    """A simulation in a grid: the part of its requests within the targets, and whether those are
    enough.
    """

    part: float
    is_met: bool


class Grid(msgspec.Struct, frozen=True):
    """Simulations by combination (rows) and load (columns); None for what was not simulated."""

    title: str
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]


class EndedSequence(msgspec.Struct, frozen=True, tag_field="kind", tag="sequence"):
    """A sequence, with the fields of the step log's records that the timeline reads."""

    request_id: str
    index: int
    timings: SequenceTimings
    tenant: str = ""


class RunRecords(msgspec.Struct, frozen=True):
    """The records of a run, and where the time of its slowest requests went, by request."""

    name: str
    num_blocks: int
    records: tuple[StepRecord | EndedSequence, ...]
    sentences: dict[str, str]


class Report(msgspec.Struct, frozen=True):
    """What the page displays: a sentence, a table, charts, the runs of the timeline, the memory
    of a device, and the grid of a sweep.
    """

    title: str
    sentence: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    charts: tuple[Chart, ...]
    runs: tuple[RunRecords, ...] = ()
    memory: tuple[MemoryPart, ...] = ()
    grid: Grid | None = None


def report_of_runs(title: str, runs: Sequence[Run]) -> Report:
    """The report of simulations."""
    times = [[found for found in map(ending_times, run.counted) if found] for run in runs]
    charts = [
        Chart(
            f"{name}: part of the requests that are faster",
            "ms",
            "part",
            tuple(
                Line(run.name, _cdf([1e3 * of_ending[place] for of_ending in found]))
                for run, found in zip(runs, times, strict=True)
            ),
        )
        for place, name in enumerate(("TTFT", "TPOT", "E2E"))
    ]
    if len({run.rate for run in runs}) > 1:
        by_load = sorted(runs, key=lambda run: run.rate)
        completed = tuple((run.rate, run.summary.requests_per_s) for run in by_load)
        good = tuple((run.rate, run.summary.goodput_per_s) for run in by_load)
        lines = (Line("completed", completed), Line("within the targets", good))
        charts.append(Chart("Requests over the load", "sessions/s", "requests/s", lines))
    header, rows = _run_table(runs)
    return Report(title, "", header, rows, tuple(charts), tuple(map(_records, runs)))


class Swept(msgspec.Struct, frozen=True):
    """One simulation of a sweep: its load in sessions per second, its figures, and whether enough
    requests are within the targets.
    """

    rate: float
    figures: Summary
    is_met: bool


def report_of_sweep(
    title: str,
    sentence: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    simulations: Sequence[Sequence[Swept]],
) -> Report:
    """The report of a sweep: its recommendation, a row of the table for each combination, and its
    simulations as a grid over the loads and as curves of goodput. The first cell of a row is the
    combination's name.
    """
    names = tuple(row[0] for row in rows)
    lines = tuple(
        Line(name, [(swept.rate, swept.figures.goodput_per_s) for swept in of_row])
        for name, of_row in zip(names, simulations, strict=True)
    )
    chart = Chart("Requests within the targets", "sessions/s", "requests/s", lines)
    table = tuple(map(tuple, rows))
    return Report(title, sentence, tuple(header), table, (chart,), grid=_grid(names, simulations))


def _grid(names: tuple[str, ...], simulations: Sequence[Sequence[Swept]]) -> Grid:
    rates = sorted({swept.rate for of_row in simulations for swept in of_row})
    cells = []
    for of_row in simulations:
        found = {swept.rate: Cell(swept.figures.attainment, swept.is_met) for swept in of_row}
        cells.append(tuple(found.get(rate) for rate in rates))
    title = "Part of the requests within the targets, by combination and load"
    return Grid(title, names, tuple(f"{rate:.3g}/s" for rate in rates), tuple(cells))


def _run_table(runs: Sequence[Run]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    header = (
        *("run", "requests", "requests/s", "tokens/s", "TTFT p50/p90/p99 ms"),
        *("TPOT p50/p90/p99 ms", "within targets", "busy", "KV", "preemptions"),
    )
    rows = []
    for run in runs:
        summary = run.summary
        ttft, tpot = summary.ttft_s, summary.tpot_s
        rows.append(
            (
                run.name,
                str(summary.num_requests),
                f"{summary.requests_per_s:.3g}",
                f"{summary.output_tokens_per_s:.0f}",
                f"{1e3 * ttft.p50:.0f} / {1e3 * ttft.p90:.0f} / {1e3 * ttft.p99:.0f}",
                f"{1e3 * tpot.p50:.1f} / {1e3 * tpot.p90:.1f} / {1e3 * tpot.p99:.1f}",
                f"{summary.attainment:.1%}",
                f"{summary.busy:.0%}",
                f"{summary.kv_used:.0%}",
                str(summary.num_preemptions),
            )
        )
    return header, tuple(rows)


def _cdf(values: Sequence[float]) -> Points:
    ordered = sorted(values)
    step = max(1, len(ordered) // _MAX_POINTS)
    places = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return [(ordered[place], (place + 1) / len(ordered)) for place in places]


def _records(run: Run) -> RunRecords:
    outcome = run.outcome
    by_end = sorted(outcome.endings, key=lambda ending: ending.timings.finished_s)
    sequences = [
        EndedSequence(ending.request_id, ending.index, ending.timings, ending.tenant)
        for ending in by_end[-_MAX_SEQUENCES:]
    ]
    by_time = sorted(sequences, key=lambda item: item.timings.arrival_s - item.timings.finished_s)
    replicas = {item.timings.replica for item in sequences}
    steps_of = {
        replica: [step for step in outcome.records if step.replica == replica]
        for replica in replicas
    }
    sentences = {
        item.request_id: explain(
            item.request_id, item.timings, steps_of[item.timings.replica], index=item.index
        ).sentence
        for item in by_time[:_MAX_EXPLAINED]
    }
    records: list[StepRecord | EndedSequence] = [*outcome.records[-_MAX_STEPS:]]
    return RunRecords(run.name, run.num_blocks, (*records, *sequences), sentences)
