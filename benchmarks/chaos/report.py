"""Prints what a chaos run found: the faults in a table, reasons of errors, broken promises."""

from __future__ import annotations

from collections import Counter

from benchmarks.chaos.run import Run

__all__ = ["print_report"]

_ENDS = ("answer", "timeout", "error", "refused", "left", "cut")
_MOST_LINES = 40


def print_report(run: Run, missing: list[str]) -> bool:
    """Print it. Returns whether every promise was kept; faults in `missing` could not be had."""
    met: dict[str, Counter[str]] = {fault.name: Counter() for fault in run.faults}
    undisturbed: Counter[str] = Counter()
    for outcome in run.outcomes:
        names = {meeting.fault.name for meeting in run.meetings_of(outcome)}
        for name in names:
            met[name][outcome.end] += 1
        if not names:
            undisturbed[outcome.end] += 1
    counts = Counter(meeting.fault.name for meeting in run.meetings)
    head = "".join(f"{end:>9}" for end in _ENDS)
    print(f"{'fault':<50}{'times':>6}{'met by':>8}{head}  verdict")
    for name, ends in met.items():
        if counts[name]:
            verdict = f"{run.blamed[name]} BROKEN" if run.blamed[name] else "kept"
            print(f"{name:<50}{counts[name]:>6}{_row(ends)}  {verdict}")
    print(f"{'no fault':<50}{'':>6}{_row(undisturbed)}")
    print(f"{'all':<50}{counts.total():>6}{_row(Counter(outcome.end for outcome in run.outcomes))}")
    reasons = Counter(_reason(outcome.reason) for outcome in run.outcomes if outcome.end == "error")
    for reason, count in reasons.most_common(_MOST_LINES):
        print(f"  {count} x {reason}")
    print(*run.facts, sep="\n")
    if missing:
        print(f"not run here, since this user may not mount or has no compiler: {missing}")
    print(f"{len(run.broken)} promises broken" if run.broken else "every promise was kept")
    for sentence in run.broken[:_MOST_LINES]:
        print(f"  {sentence}")
    return not run.broken


def _row(ends: Counter[str]) -> str:
    return f"{ends.total():>8}" + "".join(f"{ends[end]:>9}" for end in _ENDS)


def _reason(text: str) -> str:
    """The beginning of a reason, without numbers, so that equal ones are counted together."""
    return "".join("N" if char.isdigit() else char for char in text)[:140]
