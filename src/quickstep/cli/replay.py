"""`quickstep replay FILE`: repeat a recording of `quickstep serve`, and compare.

The same calls at the same times give the identical plans. A full recording also runs on its model,
and gives the identical tokens. A recording of a router gives the identical choices of replicas.
"""

from __future__ import annotations

import argparse
from typing import IO

from quickstep.cli.flags.parsing import Parser, command, readable_file


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "replay",
        "Repeat a recording of a server, and compare its plans.",
        run,
        examples="quickstep serve demo --record run.jsonl        # ends with the server\n"
        "quickstep replay run.jsonl                    # 1 if a plan differs",
    )
    parser.add_argument(
        "file",
        type=readable_file,
        metavar="FILE",
        help="of `quickstep serve --record`, `--record-full` or `--record-routing`",
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
            return _replay_routing(args.file.name, file)
        file.seek(0)
        recording = read_recording(file)
    if not recording.is_complete:
        print(f"{args.file} was cut off: the server was killed; replaying what there is")
    if recording.torn_line is not None:
        print(f"line {recording.torn_line} has no end and is left out")
    if recording.is_full and not args.plans_only:
        from quickstep.engine.records.replay_runner import open_runner

        runner = open_runner(recording)
        try:
            replayed = replay(recording, run=runner.run)
        finally:
            runner.close()
    else:
        replayed = replay(recording)
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
