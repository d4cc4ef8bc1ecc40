"""A simulation as one HTML page without scripts or network: tables, and charts as inline SVG.

Latency distributions, throughput and goodput over the load, what steps were spent on over time, and
the KV cache. Lines of several runs have the colours of one legend.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import msgspec

from quickstep.sim.outcome import Ending, Simulation
from quickstep.sim.summary import Summary, ending_times

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 260, 56, 34
_NUM_BINS = 60
_STYLE = (
    "body{font:14px sans-serif;max-width:1000px;margin:2em auto;color:#222}"
    "table{border-collapse:collapse}td,th{padding:3px 10px;text-align:right;"
    "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
    "svg{margin:6px}text{font-size:11px;fill:#444}"
)

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


def html_report(title: str, runs: Sequence[Run]) -> str:
    """The page."""
    times = [[found for found in map(ending_times, run.counted) if found] for run in runs]
    charts = [
        _chart(
            f"{name}: part of the requests that are faster",
            "ms",
            "part",
            [_cdf([1e3 * of_ending[place] for of_ending in found]) for found in times],
        )
        for place, name in enumerate(("TTFT", "TPOT", "E2E"))
    ]
    if len({run.rate for run in runs}) > 1:
        by_load = sorted(runs, key=lambda run: run.rate)
        charts.append(
            _chart(
                "Completed (solid) and within the targets (dashed)",
                "sessions/s",
                "requests/s",
                [
                    [(run.rate, run.summary.requests_per_s) for run in by_load],
                    [(run.rate, run.summary.goodput_per_s) for run in by_load],
                ],
                dashed=(1,),
            )
        )
    for run in runs:
        prefill, decode, used = _timeline(run)
        charts.append(
            _chart(
                f"{run.name}: time of prefill (solid) and decode (dashed), KV in use (third)",
                "s",
                "part",
                [prefill, decode, used],
                dashed=(1,),
            )
        )
    names = [run.name for run in runs]
    return _page(title, _run_table(runs), names, charts)


def sweep_report(
    title: str,
    sentence: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    goodput: Sequence[Points],
) -> str:
    """The page of a sweep: its recommendation, a row for each combination, and the goodput of each
    over the load. The first cell of a row is the combination's name.
    """
    chart = _chart(
        "Requests within the targets",
        "sessions/s",
        "requests/s",
        goodput,
    )
    table = f"<p>{html.escape(sentence)}</p>{_table(header, rows)}"
    return _page(title, table, [row[0] for row in rows], [chart])


def _page(title: str, table: str, names: Sequence[str], charts: Sequence[str]) -> str:
    legend = " ".join(
        f'<span style="color:{_COLOURS[place % len(_COLOURS)]}">&#9632; {html.escape(name)}</span>'
        for place, name in enumerate(names)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>{table}<p>{legend}</p>"
        f"{''.join(charts)}</html>\n"
    )


def _run_table(runs: Sequence[Run]) -> str:
    header = (
        *("run", "requests", "requests/s", "tokens/s", "TTFT p50/p90/p99 ms"),
        *("TPOT p50/p90/p99 ms", "within targets", "busy", "KV", "preemptions"),
    )
    rows = []
    for run in runs:
        one = run.summary
        ttft, tpot = one.ttft_s, one.tpot_s
        rows.append(
            (
                run.name,
                str(one.num_requests),
                f"{one.requests_per_s:.3g}",
                f"{one.output_tokens_per_s:.0f}",
                f"{1e3 * ttft.p50:.0f} / {1e3 * ttft.p90:.0f} / {1e3 * ttft.p99:.0f}",
                f"{1e3 * tpot.p50:.1f} / {1e3 * tpot.p90:.1f} / {1e3 * tpot.p99:.1f}",
                f"{one.attainment:.1%}",
                f"{one.busy:.0%}",
                f"{one.kv_used:.0%}",
                str(one.num_preemptions),
            )
        )
    return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rows)
    return f"<table><tr>{head}{body}</table>"


def _cdf(values: Sequence[float]) -> Points:
    ordered = sorted(values)
    step = max(1, len(ordered) // 200)
    places = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return [(ordered[place], (place + 1) / len(ordered)) for place in places]


def _timeline(run: Run) -> tuple[Points, Points, Points]:
    """Parts of each interval that steps spent on prefill and decode, and the KV blocks in use."""
    width = max(run.outcome.finished_s / _NUM_BINS, 1e-9)
    prefill, decode, used = ([0.0] * _NUM_BINS for _ in range(3))
    for record in run.outcome.records:
        place = min(_NUM_BINS - 1, int(record.committed_at_s / width))
        prefill[place] += record.prefill_s / width
        decode[place] += record.decode_s / width
        used[place] = max(used[place], 1.0 - record.num_free_blocks / run.num_blocks)
    times = [(place + 0.5) * width for place in range(_NUM_BINS)]
    one, two, three = (list(zip(times, part, strict=True)) for part in (prefill, decode, used))
    return one, two, three


def _chart(
    title: str, x_unit: str, y_unit: str, lines: Sequence[Points], dashed: tuple[int, ...] = ()
) -> str:
    """Lines over axes that begin at 0."""
    points = [point for line in lines for point in line]
    x_most = max((x for x, _ in points), default=1.0) or 1.0
    y_most = max((y for _, y in points), default=1.0) or 1.0
    inner_width, inner_height = _WIDTH - _LEFT - 10, _HEIGHT - _BOTTOM - 24

    def place(x: float, y: float) -> str:
        across, up = _LEFT + x / x_most * inner_width, y / y_most * inner_height
        return f"{across:.1f},{_HEIGHT - _BOTTOM - up:.1f}"

    drawn = "".join(
        f'<polyline fill="none" stroke="{_COLOURS[index % len(_COLOURS)]}" stroke-width="1.5"'
        + (' stroke-dasharray="5 3"' if index in dashed else "")
        + f' points="{" ".join(place(x, y) for x, y in line)}"/>'
        for index, line in enumerate(lines)
    )
    floor = _HEIGHT - _BOTTOM
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img"><text x="{_LEFT}" y="14">'
        f"{html.escape(title)}</text>"
        f'<path d="M{_LEFT} 24V{floor}H{_WIDTH - 10}" fill="none" stroke="#888"/>{drawn}'
        f'<text x="{_LEFT}" y="{floor + 16}">0</text>'
        f'<text x="{_WIDTH - 10}" y="{floor + 16}" text-anchor="end">{x_most:.4g} {x_unit}</text>'
        f'<text x="{_LEFT - 4}" y="32" text-anchor="end">{y_most:.3g}</text>'
        f'<text x="{_LEFT - 4}" y="46" text-anchor="end">{html.escape(y_unit)}</text></svg>'
    )
