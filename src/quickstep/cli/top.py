"""`quickstep top`: the requests of a running server and what its steps do, like `top`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.flags.server_url import add_server_url, get
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Group

    from quickstep.engine.records.step_log import LiveSequence
    from quickstep.types import StepRecord

_HEADER = ("request", "phase", "s", "prompt", "cached", "output", "device s")
_BAR = 24
_RESERVED_LINES = 8  # of the terminal: figures and headers


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "top",
        "Display the requests of a running server, and what its steps do.",
        run,
        examples="quickstep top --url http://127.0.0.1:8000",
    )
    add_server_url(parser)
    parser.add_argument(
        "--every-s",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="seconds between two reads, over which rates are computed (default: %(default)s)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print once and exit, as without a terminal"
    )


def run(args: argparse.Namespace) -> int:
    """Display until interrupted. Raises ConfigError and EngineError."""
    if not 0.1 <= args.every_s <= 3600.0:
        raise ConfigError(f"--every-s is {args.every_s:g}, it must be from 0.1 to 3600")
    from rich.live import Live

    from quickstep.cli.screen import console_on

    console = console_on(sys.stdout)
    state = _read(args, num_blocks=0)
    if args.once or not console.is_terminal:
        console.print(_frame(state, args.every_s, max_rows=len(state.live)))
        return 0
    with Live(console=console, screen=True, auto_refresh=False) as display:
        while True:
            rows = max(1, console.size.height - _RESERVED_LINES)
            display.update(_frame(state, args.every_s, rows), refresh=True)
            time.sleep(args.every_s)
            state = _read(args, state.num_blocks)


class ReportedState(NamedTuple):
    """What the server reported: the steps of the last seconds, and the sequences that have not
    ended. `num_blocks` is the largest number of free KV blocks so far.
    """

    steps: Sequence[StepRecord]
    num_ended: int
    live: Sequence[LiveSequence]
    num_blocks: int


def _read(args: argparse.Namespace, num_blocks: int) -> ReportedState:
    import msgspec

    from quickstep.engine.records.step_log import LiveSequence, SequenceRecord
    from quickstep.types import StepRecord

    decoder = msgspec.json.Decoder(StepRecord | SequenceRecord | LiveSequence)
    lines: list[StepRecord | SequenceRecord | LiveSequence] = decoder.decode_lines(
        get(args, f"/debug/steps?last_s={args.every_s:g}")
    )
    steps = [line for line in lines if isinstance(line, StepRecord)]
    live = [line for line in lines if isinstance(line, LiveSequence)]
    most_free = max((step.num_free_blocks for step in steps), default=0)
    num_ended = len(lines) - len(steps) - len(live)
    return ReportedState(steps, num_ended, live, max(num_blocks, most_free))


def _frame(state: ReportedState, every_s: float, max_rows: int) -> Group:
    """What is displayed: figures, then a row per sequence, those with most device time first."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(_HEADER):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=True)
    by_time = sorted(state.live, key=lambda live: live.timings.device_s, reverse=True)
    for live in by_time[:max_rows]:
        table.add_row(*map(Text, sequence_row(live)))
    return Group(Text("\n".join(figures(state, every_s))), table)


def figures(state: ReportedState, every_s: float) -> list[str]:
    """The lines above the requests."""
    steps = state.steps
    tokens = sum(step.num_decode_tokens - step.num_drafts + step.num_accepted for step in steps)
    prefilled = sum(step.num_prefill_tokens for step in steps)
    busy = sum(step.seconds for step in steps) / every_s
    drafts = sum(step.num_drafts for step in steps)
    accepted = sum(step.num_accepted for step in steps)
    lines = [
        f"{len(steps) / every_s:.0f} steps/s   {tokens / every_s:.0f} tokens/s   "
        f"{prefilled / every_s:.0f} prompt tokens/s   {state.num_ended} ended",
        f"busy {_bar(busy)}",
    ]
    if steps:
        last = steps[-1]
        used = 1.0 - last.num_free_blocks / state.num_blocks if state.num_blocks else 0.0
        predicted = sum(step.predicted_s for step in steps)
        measured = sum(step.seconds for step in steps)
        lines.append(f"KV   {_bar(used)}   {state.num_blocks - last.num_free_blocks} blocks")
        lines.append(
            f"running {last.num_running}   waiting {last.num_waiting}   "
            f"step {1e3 * measured / len(steps):.2f} ms   "
            f"predicted {1e3 * predicted / len(steps):.2f} ms"
            + (f"   drafts {accepted}/{drafts}" if drafts else "")
        )
    else:
        lines.append(f"no steps in the last {every_s:g} s")
    return lines


def sequence_row(live: LiveSequence) -> tuple[str, ...]:
    """The cells of a sequence, under `_HEADER`."""
    timings = live.timings
    phase = timings.activities[-1][0].value if timings.activities else "-"
    return (
        f"{live.request_id[-32:]}#{live.index}",
        phase,
        f"{timings.finished_s - timings.arrival_s:.1f}",
        str(timings.num_prompt_tokens),
        str(timings.num_cached_tokens),
        str(timings.num_output_tokens),
        f"{timings.device_s:.2f}",
    )


def _bar(part: float) -> str:
    filled = round(min(max(part, 0.0), 1.0) * _BAR)
    return f"[{'|' * filled}{' ' * (_BAR - filled)}] {part:4.0%}"
