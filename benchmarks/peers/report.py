"""From token times to the figures of a run, and from runs to a table with ratios and spreads."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["HEADLINES", "figures", "show_progress", "table"]

# The figures that a workload is judged by, lower is better.
HEADLINES: Mapping[str, tuple[str, ...]] = {
    "w1": ("ttft_s", "tpot_ms"),
    "w2": ("wall_s",),
    "w3": ("wall_s",),
    "w4": ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms"),
    "footprint": ("cold_start_s", "rss_gb"),
}


def figures(answer: Mapping[str, Any], arrivals_s: Sequence[float]) -> dict[str, float]:
    """One run's figures: time to the first token and between tokens over all its requests.

    Raises:
        ValueError: A request came back without tokens.
    """
    start_s, marks = answer["start_s"], answer["marks"]
    if not all(marks):
        raise ValueError(f"{sum(not one for one in marks)} requests came back without a token")
    firsts = [one[0] - start_s - at_s for one, at_s in zip(marks, arrivals_s, strict=True)]
    tpots = [1e3 * (one[-1] - one[0]) / (len(one) - 1) for one in marks if len(one) > 1]
    return {
        "wall_s": max(one[-1] for one in marks) - start_s,
        "ttft_s": statistics.median(firsts),
        "tpot_ms": statistics.median(tpots) if tpots else 0.0,
    }


def show_progress(workload: str, repeat: int, results: Mapping[str, Any]) -> None:
    """A line of JSON on stderr per repeat: what an interrupted run has measured is not lost."""
    newest = {name: runs[-1] for name, runs in results.items() if runs}
    print(json.dumps({"workload": workload, "repeat": repeat, **newest}), file=sys.stderr)


def table(workload: str, results: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Markdown: medians with least and greatest, and the ratio to the first row's median."""
    names = HEADLINES[workload]
    results = {contestant: runs for contestant, runs in results.items() if runs}
    if not results:
        return f"{workload}: no engine ran it"
    lines = [
        f"| {workload} | " + " | ".join(f"{name} (min - max) | x" for name in names) + " |",
        "|---|" + "---|---|" * len(names),
    ]
    first = {name: _median(next(iter(results.values())), name) for name in names}
    for contestant, runs in results.items():
        cells = []
        for name in names:
            values = [run[name] for run in runs]
            spread = f"{min(values):.4g} - {max(values):.4g}"
            median = statistics.median(values)
            ratio = median / first[name] if first[name] else float("nan")
            cells.append(f"{median:.4g} ({spread}) | {ratio:.2f}")
        lines.append(f"| {contestant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _median(runs: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)
