"""`quickstep verify --formats`: one verification for each pair of weight and KV formats.

Called by `cli.verify`, which knows the checkpoint. Prints a row per pair, and the first mismatch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quickstep.cli.flags.quantization import FormatPair
from quickstep.cli.screen import console_on, print_table
from quickstep.cli.verify_report import first_mismatch_text

if TYPE_CHECKING:
    from quickstep.verify.report import VerifyReport

__all__ = ["FormatResult", "verify_formats"]

_HEADER = ("weights", "KV", "compared", "differ", "fingerprint")


class FormatResult(NamedTuple):
    """What one pair gave."""

    pair: FormatPair
    fingerprint: str
    report: VerifyReport


def verify_formats(
    model_name: str,
    pairs: Sequence[FormatPair],
    verify_pair: Callable[[FormatPair], FormatResult],
    as_json: bool,
) -> int:
    """Verify pair after pair and print all. Returns the exit code: 1 if anything differed."""
    results = [verify_pair(pair) for pair in pairs]
    if as_json:
        json.dump({"model": model_name, "formats": [_as_json(one) for one in results]}, sys.stdout)
        print()
    else:
        _print(model_name, results)
    return 1 if any(result.report.mismatches for result in results) else 0


def _as_json(result: FormatResult) -> dict[str, object]:
    return {
        "weights": result.pair.weights,
        "kv": result.pair.kv,
        "fingerprint": result.fingerprint,
        **result.report.to_json(),
    }


def _print(model_name: str, results: Sequence[FormatResult]) -> None:
    console = console_on(sys.stdout)
    options = results[0].report.options
    rows = [
        (
            result.pair.weights,
            result.pair.kv,
            str(result.report.comparisons),
            str(result.report.mismatches),
            result.fingerprint,
        )
        for result in results
    ]
    title = f"{model_name}: {options.num_requests} requests in each format, alone and in batches"
    print_table(console, title, _HEADER, rows)
    for result in results:
        if result.report.first_mismatch is not None:
            name = f"{result.pair.weights} over {result.pair.kv} KV"
            console.print(
                f"{name}: {first_mismatch_text(result.report.first_mismatch)}", style="red"
            )
            break
    mismatches = sum(result.report.mismatches for result in results)
    comparisons = sum(result.report.comparisons for result in results)
    threads = ",".join(str(count) for count in options.threads)
    console.print(
        f"{len(results)} formats, {comparisons} comparisons, {mismatches} mismatches"
        f" (seed {options.seed}, threads {threads})",
        style="red" if mismatches else "green",
    )
