"""`python -m benchmarks.peers`: Quickstep and its peers, in turns, on this machine.

Every contestant is a server and every workload goes over HTTP to all of them, by the same client:
the engine's own server where it has one, and a thin front (`fronts/`) for OpenVINO GenAI and
transformers. Sets up what is missing under `--cache` (gigabytes, minutes to an hour), then prints
a report in Markdown: ratios with the losses first, figures with their spread, and what ran
(versions, command lines, orders). `--check` says what is missing and starts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.peers.checkpoints import (
    checkpoint_path,
    convert,
    converted_path,
    make_checkpoint,
    plain_tokens,
)
from benchmarks.peers.client import Api, send_all
from benchmarks.peers.contestants import PRECISIONS, VARIED, Contestant, Launch, group_of, select
from benchmarks.peers.environments import NEEDED, Environment, fault_of_environment, prepare
from benchmarks.peers.report import HEADLINES, LEGEND, Measured, ratio_table, value_table
from benchmarks.peers.rounds import LoadedServers, Plan, measure
from benchmarks.peers.servers import PeerServer
from benchmarks.peers.workloads import PeerRequest
from quickstep.bench.shapes import SHAPES

Results = dict[str, dict[str, Measured]]

# The front's cost is measured with this many streams, and tokens each.
_FRONT_STREAMS = (1, 32)
_FRONT_TOKENS = 256


def main() -> int:
    """Run what was requested; 1 if a contestant has no valid round."""
    args = _arguments()
    # a terminated run ends the processes that it started, as an interrupted one does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if args.check:
        return _check(args)
    contestants = _prepare(args)
    head = _head(args, contestants)
    results: Results = {name: {} for name in args.workloads}
    launches: dict[str, list[str]] = {}
    orders = [f"## Orders of the rounds, from seed {args.seed}", ""]
    _measure_all(args, contestants, results, launches, orders)
    pages = [head, _tables(results), _commands(launches), "\n".join(orders)]
    report = "\n\n".join(pages) + "\n"
    print(report)
    if args.out is not None:
        args.out.write_text(report)
        raw = {
            name: {contestant: asdict(found[contestant]) for contestant in found}
            for name, found in results.items()
        }
        args.out.with_suffix(".json").write_text(json.dumps(raw, indent=1))
    measured = [result for found in results.values() for result in found.values()]
    return 0 if all(result.rounds for result in measured) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--check", action="store_true", help="say what is set up and what is missing; run nothing")
    add("--quick", action="store_true", help="w1 and footprint in about 10 minutes")
    add("--workloads", nargs="+", choices=[*HEADLINES], default=["w1"])
    engines = [name for name in PRECISIONS if name != "quickstep_front"]
    add("--engines", nargs="+", choices=[*PRECISIONS], default=engines)
    precisions = ["bf16", "f16", "int8", "int4"]
    add("--precisions", nargs="+", choices=precisions, default=precisions)
    knobs = ", ".join(f"{engine} ({setting})" for engine, setting in VARIED.items())
    text = f"such as llama_cpp=4,16: a contestant for each value of a setting; of {knobs}"
    add("--vary", nargs="+", default=[], metavar="ENGINE=VALUES", help=text)
    add("--rounds", type=int, default=5)
    add("--minutes", type=float, help="no round begins after its workload's part of this time")
    add("--requests", type=int, default=64, help="of w2 and w4; half for w3")
    add("--rate", type=float, default=0.67, help="requests per second of w4")
    add("--shape", choices=[*SHAPES], default="qwen2.5-0.5b")
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=0, help="draws weights, prompts and the orders of rounds")
    add("--cache", type=Path, default=Path.home() / ".cache" / "quickstep-peers")
    add("--out", type=Path, help="the report; the figures of every round go next to it as JSON")
    args = parser.parse_args()
    args.varied = {}
    for text in args.vary:
        engine, _, values = text.partition("=")
        if engine not in VARIED or not values:
            parser.error(f"--vary is {text!r}, it must be ENGINE=VALUES with one of {knobs}")
        args.varied[engine] = values.split(",")
    if args.quick:
        args.workloads = ["w1", "footprint"]
        args.minutes = args.minutes or 10.0
    return args


def _check(args: argparse.Namespace) -> int:
    """What is set up; 1 if anything is missing. Starts and installs nothing."""
    checkpoint = checkpoint_path(args.shape, args.cache, args.seed)
    missing = []
    for engine in args.engines:
        for name in NEEDED[engine]:
            environment = Environment(name, args.cache / name)
            fault = fault_of_environment(environment)
            print(f"{engine}: {fault or environment.versions()}")
            missing += [fault] if fault else []
    for engine, precision, _ in select(args.engines, args.precisions, {}):
        path = converted_path(checkpoint, engine, precision)
        print(f"{engine} {precision}: {path}{'' if path.exists() else ' is missing'}")
        missing += [] if path.exists() else [str(path)]
    print(f"{len(missing)} missing; a run without --check makes them" if missing else "ready")
    return 1 if missing else 0


def _prepare(args: argparse.Namespace) -> list[Contestant]:
    """All that were chosen; makes environments and checkpoints."""
    args.cache.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(args.shape, args.cache, args.seed)
    found = []
    for engine, precision, variant in select(args.engines, args.precisions, args.varied):
        environments = [prepare(name, args.cache) for name in NEEDED[engine]]
        environments = environments or [Environment(engine, args.cache)]
        # the last one converts checkpoints, the first one runs the engine
        model = convert(checkpoint, engine, precision, environments[-1])
        found.append(Contestant(engine, precision, model, environments[0], args.threads, variant))
    return found


def _measure_all(
    args: argparse.Namespace,
    contestants: list[Contestant],
    results: Results,
    launches: dict[str, list[str]],
    orders: list[str],
) -> None:
    """Every workload of every group into `results`, with the command lines and the orders."""
    groups: dict[str, list[Contestant]] = {}
    for contestant in contestants:
        groups.setdefault(group_of(contestant.precision), []).append(contestant)
    # footprint ends the loaded servers, so it comes last
    workloads = sorted(args.workloads, key=lambda name: name == "footprint")
    parts = [(group, name) for group in groups for name in workloads]
    started_s = time.monotonic()
    token_ids = plain_tokens(checkpoint_path(args.shape, args.cache, args.seed))
    loaded = LoadedServers()
    try:
        for number, (group, workload) in enumerate(parts):
            until_s = float("inf")
            if args.minutes is not None:
                until_s = started_s + 60 * args.minutes * (number + 1) / len(parts)
            plan = Plan(
                workload,
                args.seed,
                args.rounds,
                args.requests,
                args.rate,
                token_ids,
                args.cache / "logs",
                until_s,
            )
            found, order_lines = measure(plan, groups[group], loaded)
            results[workload] |= found
            orders += [f"- {workload}, {group}, {line}" for line in order_lines]
            lines = launches.setdefault(workload, [])
            lines += [plan.launch(contestant).described(args.cache) for contestant in groups[group]]
    finally:
        loaded.close()


def _head(args: argparse.Namespace, contestants: list[Contestant]) -> str:
    """The machine, the versions, and what was run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    names = {name for contestant in contestants for name in NEEDED[contestant.engine]}
    lines = [
        "# Quickstep and its peers",
        f"{describe_machine()}, commit {commit.stdout.strip() or 'unknown'}",
        f"Linux {os.uname().release}, {_memory_gib():.0f} GiB, "
        f"load {os.getloadavg()[0]:.2f} at the start",
        *(f"- {Environment(name, args.cache / name).versions()}" for name in sorted(names)),
        f"{args.shape} with random weights, {args.threads} threads, greedy, seed {args.seed}. All "
        "over HTTP on this machine, one client; OpenVINO and transformers have no server of "
        "this kind and run in a small one of ours (`fronts/`). Without an engine, it and the "
        "client take",
        *_front_costs(args),
        "",
        LEGEND,
    ]
    text = "\n".join(lines)
    print(text, file=sys.stderr, flush=True)
    return text


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _front_costs(args: argparse.Namespace) -> list[str]:
    """What the front and the client take per token with no engine behind them."""
    front = Path(__file__).parent / "fronts" / "empty_front.py"
    launch = Launch((sys.executable, str(front)), (), Api.OPENAI)
    args.cache.joinpath("logs").mkdir(parents=True, exist_ok=True)
    server = PeerServer("front", launch, args.cache / "logs" / "front.log")
    lines = []
    try:
        server.start(PeerRequest((1,), 2))
        for num_streams in _FRONT_STREAMS:
            request = PeerRequest(tuple(range(512)), _FRONT_TOKENS)
            replies = send_all(server.port, server.api, [request] * num_streams)
            wall_s = max(reply.marks[-1] for reply in replies) - replies[0].due_s
            cost_us = 1e6 * wall_s / (num_streams * _FRONT_TOKENS)
            lines.append(
                f"- with {num_streams} streams {cost_us:.0f} us per token (client included)"
            )
    finally:
        server.close()
    return lines


def _tables(results: Results) -> str:
    return "\n\n".join(
        [
            "## Quickstep over each peer: below 1 Quickstep takes less; losses first",
            ratio_table(results),
            "## Figures: medians of valid rounds (least - greatest)",
            *(value_table(workload, found) for workload, found in results.items()),
        ]
    )


def _commands(launches: dict[str, list[str]]) -> str:
    pages = ["## Command lines"]
    for workload, lines in launches.items():
        pages += [f"{workload}:", "```\n" + "\n".join(lines) + "\n```"]
    return "\n\n".join(pages)


if __name__ == "__main__":
    sys.exit(main())
