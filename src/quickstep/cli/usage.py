"""`quickstep usage`: what the server's ledger adds up to, by key, model, adapter or day."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.screen import console_on, print_table
from quickstep.server.usage.ledger import GROUPS, UsageTotals, unwritten_files, usage_totals

_NANO = 1e9
_FIGURES = (
    *("sequences", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("queue_s", "prefill_s", "decode_s", "device_s", "cost_by_tokens_usd", "cost_by_device_usd"),
)
# figure -> heading of the table, which has to fit a terminal and so lacks some figures
_HEADINGS = {
    "sequences": "sequences",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "output_tokens": "output",
    "device_s": "device s",
    "cost_by_tokens_usd": "$ by tokens",
    "cost_by_device_usd": "$ by device",
}


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "usage",
        "Add up what clients have used, from the file of serve --usage-db.",
        run,
        examples="quickstep usage --db usage.db --by key,day --since 2026-11-01\n"
        "quickstep usage --db usage.db --by '' --format json",
    )
    parser.add_argument(
        "--db", required=True, type=Path, metavar="FILE", help="the file of serve --usage-db"
    )
    parser.add_argument(
        "--by",
        type=_groups,
        default=("key",),
        metavar="GROUPS",
        help=f"comma-separated, of {', '.join(GROUPS)}; '' for one total (default: key)",
    )
    parser.add_argument(
        "--since",
        type=_nanoseconds,
        metavar="TIME",
        help="only what finished at this time or later, such as 2026-11-01 or 2026-11-01T12:00 "
        "(UTC unless it has an offset)",
    )
    parser.add_argument(
        "--until", type=_nanoseconds, metavar="TIME", help="only what finished before this time"
    )
    parser.add_argument(
        "--format",
        choices=["table", "json", "csv"],
        default="table",
        help="how to print it (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the totals."""
    totals = usage_totals(args.db, args.by, since_ns=args.since, until_ns=args.until)
    rows = [_fields(total, args.by) for total in totals]
    for path in unwritten_files(args.db):
        print(
            f"quickstep usage: {path} has more rows, which the next `serve` inserts",
            file=sys.stderr,
        )
    if args.format == "json":
        print(json.dumps(rows, indent=2))
    elif args.format == "csv":
        writer = csv.DictWriter(sys.stdout, _names(args.by), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        headings = {name: name for name in args.by} | _HEADINGS
        cells = [[_text(name, row[name]) for name in headings] for row in rows]
        title = "tokens, device seconds and costs of finished sequences"
        print_table(console_on(sys.stdout), title, list(headings.values()), cells, len(args.by))
    return 0


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text.strip() else ()
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(GROUPS)}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a group twice")
    return names


def _nanoseconds(text: str) -> int:
    """A date or a time of ISO 8601, in nanoseconds since 1970."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no date or time, such as 2026-11-01 or 2026-11-01T12:00"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1e6) * 1000


def _names(by: Sequence[str]) -> list[str]:
    return [*by, *_FIGURES]


def _fields(totals: UsageTotals, by: Sequence[str]) -> Mapping[str, str | int | float]:
    figures = (
        totals.num_sequences,
        totals.num_prompt_tokens,
        totals.num_cached_tokens,
        totals.num_output_tokens,
        totals.queue_ns / _NANO,
        totals.prefill_ns / _NANO,
        totals.decode_ns / _NANO,
        totals.device_ns / _NANO,
        totals.cost_by_tokens_nusd / _NANO,
        totals.cost_by_device_nusd / _NANO,
    )
    return dict(zip(_names(by), (*totals.group, *figures), strict=True))


def _text(name: str, value: str | int | float) -> str:
    """A cell of the table: names as they are, seconds with 3 decimals, dollars with 6."""
    if isinstance(value, float):
        return f"{value:.6f}" if name.endswith("_usd") else f"{value:.3f}"
    return value or "-" if isinstance(value, str) else str(value)
