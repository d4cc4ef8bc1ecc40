"""`quickstep trace`: the last seconds of a server as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.flags.server_url import add_server_url, get

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)")
_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "trace",
        "Write what a server did as a trace for ui.perfetto.dev.",
        run,
        examples="quickstep trace --last 1m -o trace.json",
    )
    add_server_url(parser)
    parser.add_argument(
        "--last",
        type=duration,
        default="30s",
        metavar="TIME",
        help="how far back, such as 30s or 2m (default: %(default)s)",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="trace.json",
        metavar="FILE",
        help="the file to write (default: %(default)s)",
    )


def duration(text: str) -> float:
    """Parse seconds: `30`, `30s`, `500ms`, `2m`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration, such as 30s or 2m")
    return float(match.group(1)) * _UNITS[match.group(2)]


def run(args: argparse.Namespace) -> int:
    """Read the records from the server and write the file."""
    import msgspec

    from quickstep.engine.records.step_log import LiveSequence, SequenceRecord
    from quickstep.engine.records.trace_events import trace_events
    from quickstep.types import StepRecord

    decoder = msgspec.json.Decoder(StepRecord | SequenceRecord | LiveSequence)
    lines = get(args, f"/debug/steps?last_s={args.last:g}").splitlines()
    records = [decoder.decode(line) for line in lines]
    steps = [record for record in records if isinstance(record, StepRecord)]
    sequences = [record for record in records if not isinstance(record, StepRecord)]
    Path(args.output).write_bytes(msgspec.json.encode(trace_events(steps, sequences)))
    print(
        f"{args.output}: {len(steps)} steps, {len(sequences)} sequences; open it at "
        "https://ui.perfetto.dev",
        file=sys.stderr,
    )
    return 0
