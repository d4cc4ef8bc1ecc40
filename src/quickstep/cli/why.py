"""`quickstep why REQUEST_ID`: where the time of a request of a running server went."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING
from urllib.parse import quote

from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.flags.server_url import add_server_url, get

if TYPE_CHECKING:
    from quickstep.core.explanation import Explanation

_HEADER = ("ms", "total", "own prefill", "others' prefill", "decode", "no step", "steps")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "why",
        "Explain where the time of a request went.",
        run,
        examples='curl -si localhost:8000/v1/completions --json \'{"prompt": "def f("}\' | '
        "grep x-request-id\nquickstep why REQUEST_ID --url http://127.0.0.1:8000",
    )
    parser.add_argument(
        "request_id",
        metavar="REQUEST_ID",
        help="the header x-request-id of its response, or an id that another command printed",
    )
    add_server_url(parser)
    parser.add_argument("--json", action="store_true", help="print the server's JSON")


def run(args: argparse.Namespace) -> int:
    """Print a table and a sentence per sequence."""
    body = get(args, f"/debug/requests/{quote(args.request_id, safe='')}")
    if args.json:
        print(body.decode())
        return 0
    import msgspec

    from quickstep.cli.screen import console_on, print_table
    from quickstep.core.explanation import ExplainedRequest

    console = console_on(sys.stdout)
    explained = msgspec.json.decode(body, type=ExplainedRequest)
    for attempt in explained.fallbacks:
        console.print(f"fallback: {attempt.sentence}", markup=False)
    if explained.fallbacks and not explained.sequences:
        console.print("no engine of this server has generated for it", markup=False)
    for sequence in explained.sequences:
        title = f"{sequence.request_id}#{sequence.index}"
        title += f" on replica {sequence.replica}" * bool(sequence.replica or sequence.num_moves)
        print_table(console, title, _HEADER, explanation_rows(sequence))
        console.print(f"\n{sequence.sentence}\n", markup=False)
    if explained.num_more:
        console.print(f"{explained.num_more} more sequences took less time", markup=False)
    return 0


def explanation_rows(one: Explanation) -> list[tuple[str, ...]]:
    """A row per activity in milliseconds, then what was predicted without other requests."""
    rows: list[tuple[str, ...]] = []
    if one.num_moves:
        rows.append(("on other engines", _ms(one.elsewhere_s), *[""] * 5))
    for part in one.parts:
        seconds = (
            part.seconds,
            part.own_prefill_s,
            part.others_prefill_s,
            part.decode_s,
            part.no_step_s,
        )
        rows.append((part.activity.value, *map(_ms, seconds), str(part.num_steps)))
    rows.append(("total", _ms(one.total_s), *[""] * 5))
    rows.append((_unloaded_label(one), _ms(one.unloaded_s), *[""] * 5))
    return rows


def _unloaded_label(one: Explanation) -> str:
    return "without other requests" + (" (extrapolated)" if one.is_extrapolated else "")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
