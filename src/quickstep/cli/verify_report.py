"""What `quickstep verify` prints of one verification."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from quickstep.cli.screen import console_on, print_table

if TYPE_CHECKING:
    from quickstep.verify.report import Mismatch, VerifyReport

__all__ = ["first_mismatch_text", "print_verify_report"]

_HEADER = (
    "scenario",
    "compared",
    "differ",
    "steps",
    "chunks",
    "hits",
    "preempted",
    "aborted",
    "paused",
    "overlap",
)


def print_verify_report(report: VerifyReport, name: str) -> None:
    """The table: what was compared, and what the runs went through; hits are cached tokens."""
    console = console_on(sys.stdout)
    rows = []
    for scenario, counts in report.scenarios.items():
        runs = counts.runs
        figures = (
            counts.comparisons,
            counts.mismatches,
            runs.steps,
            runs.chunked_rows,
            runs.prefix_hit_tokens,
            runs.preemptions,
            runs.aborts,
            runs.pauses,
            runs.overlapped_steps,
        )
        rows.append((scenario, *(str(figure) for figure in figures)))
    options = report.options
    title = f"{name}: {options.num_requests} requests, alone and in batches"
    print_table(console, title, _HEADER, rows)
    if report.first_mismatch is not None:
        console.print(first_mismatch_text(report.first_mismatch), style="red")
    threads = ",".join(str(count) for count in options.threads)
    console.print(
        f"{report.comparisons} comparisons, {report.mismatches} mismatches"
        f" (seed {options.seed}, threads {threads})",
        style="red" if report.mismatches else "green",
    )


def first_mismatch_text(found: Mismatch) -> str:
    """Where two runs parted, in lines."""
    return (
        f"first mismatch: {found.sequence_id}, output {found.position}, "
        f"in {found.scenario!r} at {found.threads} threads\n"
        f"  token     {found.expected_token} alone, {found.got_token} here\n"
        f"  logprobs  {found.expected_logprobs} alone\n"
        f"            {found.got_logprobs} here\n"
        f"  {found.detail}"
    )
