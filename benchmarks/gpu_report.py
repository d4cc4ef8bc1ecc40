"""The Markdown report of a run of `benchmarks.gpu`: results, goals, tables, and what was printed.

Stages print their figures as JSON objects, one a line, so those of a stage that was killed count.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_runs import Goal, Stage

_MOST_CHARACTERS = 6000  # of a stage's output
_COLUMNS = 12  # a table of more is printed as it is


@dataclass(frozen=True)
class Done:
    """How a stage ended: `passed`, or why not."""

    title: str
    command: Sequence[str]
    status: str
    seconds: float
    stdout: str = ""
    stderr: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The JSON objects that it printed."""
        return list(_objects(self.stdout))


def report(
    run: str, device: str, every: Sequence[Stage], finished: Mapping[str, Done]
) -> Iterator[str]:
    """The lines of the file."""
    yield f"# GPU run `{run}`\n"
    yield f"`python -m benchmarks.gpu {run} --device {device}`, {datetime.date.today()}\n"
    yield "| stage | result | s |\n|---|---|---|"
    for stage in every:
        done = finished.get(stage.title)
        cells = ("not run", "") if done is None else (done.status, f"{done.seconds:.0f}")
        yield f"| {stage.title} | {' | '.join(cells)} |"
    if any(stage.goals for stage in every):
        yield "\n| work | figure | measured | goal | |\n|---|---|---|---|---|"
    for stage in every:
        for goal in stage.goals:
            yield f"| {stage.title} | {' | '.join(_goal_cells(goal, finished))} |"
    for stage in every:
        if stage.title in finished:
            yield from _section(finished[stage.title])


def _goal_cells(goal: Goal, finished: Mapping[str, Done]) -> tuple[str, ...]:
    """Name, figure, goal, hit or miss."""
    bound = f"{'>=' if goal.is_least else '<='} {_text(goal.bound, goal.unit)}"
    rows = {title: done.rows for title, done in finished.items()}
    try:
        value = float(goal.read(rows))
    except (ValueError, KeyError, IndexError, TypeError, ZeroDivisionError, StopIteration):
        return goal.name, "not measured", bound, "miss"
    is_hit = value >= goal.bound if goal.is_least else value <= goal.bound
    return goal.name, _text(value, goal.unit), bound, "hit" if is_hit else "miss"


def _section(done: Done) -> Iterator[str]:
    yield f"\n## {done.title}\n\n`{' '.join(done.command)}`: {done.status}\n"
    yield from _tables(done.rows)
    texts = [line for line in done.stdout.splitlines() if not _is_object(line)]
    most = 1000 if done.status == "passed" and "pytest" in done.command else _MOST_CHARACTERS
    output = "\n".join(texts)[-most:].strip()
    if output:
        yield f"\n```\n{output}\n```"
    errors = done.stderr[-_MOST_CHARACTERS:].strip()
    if errors and done.status != "passed":
        yield f"\nstderr:\n\n```\n{errors}\n```"


def _tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rows with the same columns are a table; others are JSON."""
    tables: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        is_flat = not any(isinstance(value, dict | list) for value in row.values())
        columns = tuple(row) if is_flat and len(row) <= _COLUMNS else ()
        tables.setdefault(columns, []).append(row)
    for columns, members in tables.items():
        if not columns:
            for row in members:
                yield f"\n```\n{json.dumps(row)[:_MOST_CHARACTERS]}\n```"
            continue
        yield f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
        for row in members:
            yield f"| {' | '.join(_text(value) for value in row.values())} |"


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if _is_object(line):
            yield json.loads(line)


def _is_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _text(value: object, unit: str = "") -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).replace("|", "\\|")
    return f"{value:.1%}" if unit == "%" else f"{value:.4g} {unit}".strip()
