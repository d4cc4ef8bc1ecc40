"""`quickstep replay FILE`: repeat a recording of `quickstep serve`, and compare.

The same calls at the same times give the identical plans. A full recording also runs on its model,
and gives the identical tokens. A recording of a router gives the identical choices of replicas.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from quickstep.cli.flags.parsing import Parser, command, readable_file
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.core.recordings.replay import SchedulerRecording
    from quickstep.sim.outcome import Simulation
    from quickstep.types import SequenceOutput, StepRecord


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "replay",
        "Repeat a recording of a server, and compare its plans.",
        run,
        examples="quickstep serve demo --record run.jsonl        # ends with the server\n"
        "quickstep replay run.jsonl                    # 1 if a plan differs\n"
        "quickstep replay run.jsonl --report run.html  # its timeline, in a browser",
    )
    parser.add_argument(
        "file",
        type=readable_file,
        metavar="FILE",
        help="of `quickstep serve --record`, `--record-full` or `--record-routing`",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write an HTML page with the timeline of the recorded steps and requests",
    )
    parser.add_argument(
        "--plans-only",
        action="store_true",
        help="do not run the model of a full recording to compare its tokens",
    )


def run(args: argparse.Namespace) -> int:
    """Print what was compared. The exit code is 1 if anything differs."""
    from quickstep.core.recordings.replay import read_recording, replay
    from quickstep.core.recordings.routing import is_routing

    with args.file.open("rb") as file:
        if is_routing(file.readline()):
            file.seek(0)
            if args.report is not None:
                raise ConfigError("--report goes with recordings of steps; this one has routes")
            return _replay_routing(args.file.name, file)
        file.seek(0)
        recording = read_recording(file)
    if not recording.is_complete:
        print(f"{args.file} was cut off: the server was killed; replaying what there is")
    if recording.torn_line is not None:
        print(f"line {recording.torn_line} has no end and is left out")
    shown = _Shown(recording)
    if recording.is_full and not args.plans_only:
        from quickstep.engine.records.replay_runner import open_runner

        runner = open_runner(recording)
        try:
            replayed = replay(recording, run=runner.run, watch=shown.add)
        finally:
            runner.close()
    else:
        replayed = replay(recording, watch=shown.add)
    if args.report is not None:
        shown.write(args.report, f"recording {args.file.name}")
    if replayed.different_tokens:
        print(f"different: {replayed.different_tokens}")
        return 1
    if replayed.different_line is not None:
        print(
            f"different: plan {replayed.num_plans + 1} is not that of line "
            f"{replayed.different_line} of {args.file}"
        )
        if recording.running:
            print(
                "The server was killed: a plan that reuses cached outputs of the "
                f"{len(recording.running)} requests that were running then cannot be repeated."
            )
        return 1
    if replayed.cut_at_line is not None:
        print(
            f"ended at line {replayed.cut_at_line}: the request that it adds has no line, because "
            "the server was killed"
        )
    elif recording.running:
        print(f"ended at the last line; {len(recording.running)} requests were running then")
    tokens = f" and {replayed.num_tokens} tokens" if replayed.num_tokens else ""
    print(f"identical: {replayed.num_plans} plans{tokens} of {len(recording.requests)} requests")
    return 0


class _Shown:
    """What a report shows of a recording: the records that its replay makes, which are those of
    the server as long as the plans are.
    """

    def __init__(self, recording: SchedulerRecording) -> None:
        from quickstep.sim.outcome import Simulation

        self._recording = recording
        self._outcome: Simulation = Simulation()

    def add(self, outputs: Sequence[SequenceOutput], record: StepRecord | None) -> None:
        """Take what a call of the scheduler put out."""
        from quickstep.sim.outcome import Ending

        if record is not None:
            self._outcome.records.append(record)
            self._outcome.finished_s = record.committed_at_s
        for output in outputs:
            if output.timings is None or output.finish_reason is None:
                continue
            tenant = self._recording.requests[int(output.request_id)].request.tenant
            self._outcome.endings.append(
                Ending(
                    output.request_id, output.index, output.finish_reason, output.timings, tenant
                )
            )

    def write(self, path: Path, title: str) -> None:
        """Write the page."""
        from quickstep.server.page.single_file import page_with_report
        from quickstep.sim.report import Run, report_of_runs
        from quickstep.sim.summary import summarize

        num_blocks = self._recording.engine.num_blocks
        run = Run(title, 0.0, num_blocks, summarize(self._outcome, num_blocks), self._outcome)
        path.write_text(page_with_report(title, report_of_runs(title, [run])), encoding="utf-8")
        print(f"{path}: written", file=sys.stderr)


def _replay_routing(name: str, file: IO[bytes]) -> int:
    from quickstep.core.recordings.routing import replay_routing

    replayed = replay_routing(file)
    if replayed.different_line is not None:
        print(
            f"different: choice {replayed.num_choices} is not that of line "
            f"{replayed.different_line} of {name}"
        )
        return 1
    print(
        f"identical: {replayed.num_choices} choices of the router {replayed.router} among "
        f"{replayed.num_replicas} replicas"
    )
    return 0
