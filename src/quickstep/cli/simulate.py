"""`quickstep simulate MODEL`: the engine's scheduler under simulated clients, on any hardware.

A run for each rate and policy given; a table, JSON, CSV of the requests, or an HTML page.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quickstep.cli.flags.hardware import (
    add_engine_sizes,
    add_hardware,
    element_bytes,
    hardware_of,
)
from quickstep.cli.flags.parsing import (
    Parser,
    command,
    positive_int,
    positive_number,
    token_count,
)
from quickstep.config import PolicyName
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.plan.candidates import Candidate
    from quickstep.sim.html_report import Run

__all__ = ["add_parser", "run"]

_PRESETS = ("chat", "rag", "code", "agent", "batch", "prefill-heavy", "decode-heavy")
_ARRIVALS = ("gamma", "ramp", "diurnal", "closed-loop")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(subparsers, "simulate", "Simulate clients of an engine on any hardware.", run)
    add_hardware(parser)
    _add_clients(parser.add_argument_group("clients"))
    engine = parser.add_argument_group("engine")
    add_engine_sizes(engine)
    engine.add_argument(
        "--scheduling-policy",
        type=_policies,
        default=(PolicyName.MIXED,),
        metavar="NAMES",
        help="policies to compare, separated by commas (default: mixed)",
    )
    engine.add_argument(
        "--padded",
        action="store_true",
        help="compute every row of a step as long as its longest, as engines without packed rows "
        "do",
    )
    engine.add_argument(
        "--max-model-len",
        type=token_count,
        metavar="N",
        help="longest sequence in tokens (default: the model's limit, at most 16384)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--csv", type=Path, metavar="FILE", help="write a line per request")
    output.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page")


def _add_clients(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset", choices=_PRESETS, default="chat", help="what they request (default: chat)"
    )
    group.add_argument(
        "--rate",
        type=_rates,
        default=(1.0,),
        metavar="RATES",
        help="sessions per second; several, separated by commas, are compared (default: 1)",
    )
    group.add_argument(
        "--arrivals", choices=_ARRIVALS, default="gamma", help="when (default: %(default)s)"
    )
    group.add_argument(
        "--burstiness",
        type=positive_number,
        default=1.0,
        metavar="N",
        help="of gamma arrivals: 1 is Poisson, smaller is burstier (default: %(default)s)",
    )
    group.add_argument(
        "--max-concurrency",
        type=positive_int,
        default=16,
        metavar="N",
        help="clients of a closed loop (default: %(default)s)",
    )
    group.add_argument(
        "--num-prompts",
        type=positive_int,
        default=300,
        metavar="N",
        help="requests (default: %(default)s)",
    )
    group.add_argument(
        "--input", type=token_count, metavar="TOKENS", help="new tokens of every prompt"
    )
    group.add_argument("--output", type=token_count, metavar="TOKENS", help="tokens of an output")
    group.add_argument(
        "--ttft-ms", type=positive_number, metavar="MS", help="target of the first token"
    )
    group.add_argument(
        "--tpot-ms", type=positive_number, metavar="MS", help="target per output token"
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests of a Mooncake, Azure or BurstGPT trace instead of --preset",
    )
    group.add_argument(
        "--from-recording",
        type=Path,
        metavar="FILE",
        help="requests of a recording of `quickstep serve --record` instead of --preset",
    )
    group.add_argument(
        "--trace-speed",
        type=positive_number,
        default=1.0,
        metavar="N",
        help="how many times as fast as recorded (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Simulate, and print the figures."""
    import msgspec

    from quickstep.plan.candidates import Load, StepLimits, fit
    from quickstep.plan.formulas import Split
    from quickstep.plan.models import find_model

    if args.trace is not None and args.from_recording is not None:
        raise ConfigError("--trace and --from-recording are given; choose one")
    spec, hardware = find_model(args.model), hardware_of(args)
    max_model_len = min(args.max_model_len or 16384, spec.max_model_len)
    candidate = fit(
        spec,
        hardware,
        Split(hardware.count),
        element_bytes(spec, args.quantization, args.kv_cache_dtype),
        Load(1.0, max_model_len - 1, 1),
        StepLimits(args.max_num_seqs, args.max_num_batched_tokens),
    )
    runs = [
        _simulated(args, candidate, rate, policy, max_model_len)
        for policy in args.scheduling_policy
        for rate in (args.rate if _file(args) is None else args.rate[:1])
    ]
    if args.json:
        rows = [{"run": one.name, "rate": one.rate, "figures": one.summary} for one in runs]
        print(msgspec.json.encode(rows).decode())
    else:
        _print_runs(_title(args, candidate), runs)
    if args.csv is not None:
        _write_csv(args.csv, runs)
    if args.report is not None:
        from quickstep.sim.html_report import html_report

        args.report.write_text(html_report(_title(args, candidate), runs), encoding="utf-8")
        print(f"{args.report}: written", file=sys.stderr)
    return 0


def _simulated(
    args: argparse.Namespace,
    candidate: Candidate,
    rate: float,
    policy: PolicyName,
    max_model_len: int,
) -> Run:
    from quickstep.plan.traffic import Traffic, simulate_arrivals, simulate_traffic
    from quickstep.sim.html_report import Run
    from quickstep.sim.summary import Targets, summarize
    from quickstep.sim.traces import read_trace, recorded_traffic
    from quickstep.sim.workload import WORKLOADS, with_lengths

    traffic = Traffic(
        workload=with_lengths(WORKLOADS[args.preset], args.input, args.output),
        arrivals=args.arrivals,
        rate=rate,
        num_requests=args.num_prompts,
        burstiness=args.burstiness,
        num_clients=args.max_concurrency,
        seed=args.seed,
    )
    file = _file(args)
    if file is None:
        outcome = simulate_traffic(candidate, traffic, max_model_len, policy, args.padded)
    else:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        read = read_trace if args.from_recording is None else recorded_traffic
        arrivals = read(lines, args.trace_speed)[: args.num_prompts]
        outcome = simulate_arrivals(candidate, arrivals, max_model_len, policy, pads=args.padded)
    limits = (None if limit is None else limit / 1e3 for limit in (args.ttft_ms, args.tpot_ms))
    summary = summarize(outcome, candidate.num_blocks, Targets(*limits))
    load = f"{args.max_concurrency} clients"
    if file is not None:
        load = f"{args.trace_speed:g} x {file.name}"
    elif args.arrivals != "closed-loop":
        load = f"{rate:g}/s"
    return Run(
        f"{policy.value}, {load}",
        rate,
        candidate.num_blocks,
        summary,
        outcome,
    )


def _file(args: argparse.Namespace) -> Path | None:
    """The file that has the requests; None for a preset."""
    file: Path | None = args.trace or args.from_recording
    return file


def _title(args: argparse.Namespace, candidate: Candidate) -> str:
    hardware, file = candidate.hardware, _file(args)
    name = args.preset if file is None else file.name
    padded = ", padded rows" if args.padded else ""
    return f"{name} with {args.model} on {hardware.count} x {hardware.device.label}{padded}"


def _print_runs(title: str, runs: list[Run]) -> None:
    from quickstep.cli.screen import console_on, print_table

    header = ("run", "requests/s", "tokens/s", "TTFT p50/p90", "TPOT p50/p90", "in time", "busy")
    rows = []
    for one in runs:
        figures = one.summary
        ttft, tpot = figures.ttft_s, figures.tpot_s
        rows.append(
            (
                one.name,
                f"{figures.requests_per_s:.3g}",
                f"{figures.output_tokens_per_s:.0f}",
                f"{1e3 * ttft.p50:.0f}/{1e3 * ttft.p90:.0f} ms",
                f"{1e3 * tpot.p50:.1f}/{1e3 * tpot.p90:.1f} ms",
                f"{figures.attainment:.0%}",
                f"{figures.busy:.0%}",
            )
        )
    print_table(console_on(sys.stdout), title, header, rows)


def _write_csv(file: Path, runs: list[Run]) -> None:
    """A line per sequence, in the order of their ends."""
    names = ("arrival_s", "queue_s", "first_token_s", "finished_s", "num_preemptions")
    counts = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "device_s")
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("run", "request_id", "finish_reason", *names, *counts))
        for one in runs:
            for ending in one.outcome.endings:
                values = [getattr(ending.timings, name) for name in (*names, *counts)]
                writer.writerow((one.name, ending.request_id, ending.reason.value, *values))


def _rates(text: str) -> tuple[float, ...]:
    return tuple(positive_number(part) for part in text.split(","))


def _policies(text: str) -> tuple[PolicyName, ...]:
    known = [policy.value for policy in PolicyName]
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return tuple(map(PolicyName, text.split(",")))
