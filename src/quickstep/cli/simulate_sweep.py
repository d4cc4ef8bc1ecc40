"""`quickstep simulate --sweep`: the combinations of some options, their knees, a recommendation."""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quickstep.cli.flags.engine import model_of
from quickstep.cli.flags.parsing import fraction
from quickstep.config import PolicyName
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.plan.candidates import Candidate
    from quickstep.plan.hardware import Hardware
    from quickstep.plan.sweep import Combination, Sweep, SweepRow
    from quickstep.plan.traffic import Replicas
    from quickstep.sim.outcome import Simulation
    from quickstep.sim.report import Run
    from quickstep.sim.window import CountedWindow

    # An engine on so many devices, with so many tokens of a step. Raises ConfigError.
    NewEngine = Callable[[int, int], Candidate]
    # Its simulation by the flags, with a rate, a policy, replicas, and the requests that count.
    Simulated = Callable[
        [argparse.Namespace, Candidate, float, PolicyName, Replicas, CountedWindow], Run
    ]

_AXES = ("policy", "chunk", "tp", "replicas")
_POLICIES = (PolicyName.MIXED, PolicyName.PREFILL_FIRST, PolicyName.DECODE_FIRST)
_CHUNKS = (512, 2048, 8192)
_LEAST_REQUESTS = 300


def add_sweep(group: argparse._ArgumentGroup) -> None:
    """Add `--sweep` and `--attainment`."""
    group.add_argument(
        "--sweep",
        type=_axes,
        metavar="OPTIONS",
        help="compare combinations of policy, chunk, tp, replicas (some of them, separated by "
        "commas): the highest rate at which each meets --ttft-ms and --tpot-ms, searched from "
        "--rate or among several, and which one to use. policy: those of --scheduling-policy; "
        "chunk: --max-num-batched-tokens 512, 2048, 8192; tp: tensor-parallel sizes up to the "
        "devices of --hardware; replicas: those of --replicas, else as many as there are devices "
        "for",
    )
    group.add_argument(
        "--attainment",
        type=fraction,
        default=0.9,
        metavar="PART",
        help="part of the requests that must be within the targets (default: %(default)s)",
    )


def run_sweep(
    args: argparse.Namespace, hardware: Hardware, new_engine: NewEngine, simulated: Simulated
) -> int:
    """Simulate all combinations and print the answer; 0 if one serves the highest rate, else 1.

    Raises:
        ConfigError: There is no target, nothing to vary the rate of, or nothing fits.
    """
    import msgspec

    from quickstep.cli.screen import counting_bar
    from quickstep.engine.machine import usable_cores
    from quickstep.plan.sweep import SweepQuery
    from quickstep.plan.sweep import run_sweep as sweep_all
    from quickstep.sim.summary import Targets
    from quickstep.sim.workload import WORKLOADS

    targets = Targets(*(None if ms is None else ms / 1e3 for ms in (args.ttft_ms, args.tpot_ms)))
    _check(args, targets)
    found, problems = _candidates(args, hardware, new_engine)
    workload = WORKLOADS[args.preset]
    query = SweepQuery(
        args.rate,
        targets,
        args.attainment,
        workload.mean_turns,
        workload.session_s,
        args.num_prompts or _LEAST_REQUESTS,
    )
    with counting_bar() as progress:
        # a parser cannot be sent to another process
        flags = {name: value for name, value in vars(args).items() if name != "parser"}
        simulate_at = partial(_simulate_at, argparse.Namespace(**flags), simulated)
        answer = sweep_all(query, found, simulate_at, progress, usable_cores())
    title = (
        f"{args.preset} with {model_of(args)} on {hardware.device.label}, up to {hardware.count}"
    )
    if args.json:
        print(msgspec.json.encode(answer).decode())
    else:
        _print(args, title, answer, problems)
    if args.csv is not None:
        _write_csv(args.csv, answer)
    if args.report is not None:
        from quickstep.server.page.single_file import page_with_report
        from quickstep.sim.report import Swept, report_of_sweep

        header = ("combination", *_header(args), "limited by")
        rows = [(str(row.combination), *_cells(args, row), row.limit or "-") for row in answer.rows]
        swept = [
            [Swept(point.rate, point.figures, point.met) for point in row.points]
            for row in answer.rows
        ]
        report = report_of_sweep(title, answer.recommendation, header, rows, swept)
        args.report.write_text(page_with_report(title, report), encoding="utf-8")
        print(f"{args.report}: written", file=sys.stderr)
    return 0 if answer.met else 1


def _simulate_at(
    args: argparse.Namespace,
    simulated: Simulated,
    combination: Combination,
    candidate: Candidate,
    rate: float,
    window: CountedWindow,
) -> Simulation:
    from quickstep.plan.traffic import Replicas

    replicas = Replicas(combination.replicas, args.router, args.faults, args.seed)
    return simulated(args, candidate, rate, combination.policy, replicas, window).outcome


def _check(args: argparse.Namespace, targets: object) -> None:
    if args.ttft_ms is None and args.tpot_ms is None:
        raise ConfigError("--sweep needs a target: --ttft-ms, --tpot-ms, or both")
    if args.trace is not None or args.from_recording is not None:
        raise ConfigError("--sweep varies the rate, and a file has its own; use --preset")
    if args.arrivals == "closed-loop":
        raise ConfigError("--sweep varies the rate, and a closed loop has none; use other arrivals")


def _candidates(
    args: argparse.Namespace, hardware: Hardware, new_engine: NewEngine
) -> tuple[list[tuple[Combination, Candidate]], list[str]]:
    """The combinations that fit, and why others do not."""
    from quickstep.plan.sweep import Combination

    policies: tuple[PolicyName, ...] = args.scheduling_policy
    if "policy" in args.sweep and len(policies) == 1:
        policies = _POLICIES
    chunks = _CHUNKS if "chunk" in args.sweep else (args.max_num_batched_tokens,)
    problems: dict[str, None] = {}
    found = []
    for tensor in _tensor_sizes(args, hardware):
        for chunk in chunks:
            try:
                candidate = new_engine(tensor, chunk)
            except ConfigError as error:
                problems[f"TP {tensor}: {error}"] = None
                continue
            for policy, count in itertools.product(policies, _counts(args, hardware, tensor)):
                found.append((Combination(policy, chunk, tensor, count), candidate))
        if found and "tp" not in args.sweep:
            break  # replicas of the smallest engine that fits
    if not found:
        raise ConfigError(f"nothing fits: {'; '.join(problems)}")
    return found, list(problems)


def _tensor_sizes(args: argparse.Namespace, hardware: Hardware) -> Iterator[int]:
    if "tp" not in args.sweep and "replicas" not in args.sweep:
        yield hardware.count
        return
    size = 1
    while size <= hardware.count:
        yield size
        size *= 2


def _counts(args: argparse.Namespace, hardware: Hardware, tensor: int) -> tuple[int, ...]:
    """Numbers of replicas."""
    counts: tuple[int, ...] = args.replicas
    if "replicas" not in args.sweep:
        return counts[:1]
    if len(counts) > 1:
        return counts
    most = hardware.count // tensor
    return tuple(1 << power for power in range(most.bit_length()))


def _header(args: argparse.Namespace) -> tuple[str, ...]:
    return (*args.sweep, "devices", "$/h", "up to", "TTFT p90", "TPOT p90")


def _cells(args: argparse.Namespace, row: SweepRow) -> tuple[str, ...]:
    """The options that vary, and the figures. Latencies are those at the knee, or those of the
    lowest rate if there is none.
    """
    of = row.combination
    options = {
        "policy": of.policy.value,
        "chunk": str(of.max_num_batched_tokens),
        "tp": str(of.tensor),
        "replicas": str(of.replicas),
    }
    at_knee = next((point for point in row.points if point.rate == row.knee), row.points[0]).figures
    return (
        *(options[name] for name in args.sweep),
        str(row.num_devices),
        "-" if row.usd_per_hour is None else f"{row.usd_per_hour:.2f}",
        f"{row.knee:.3g}/s" if row.knee else f"below {row.points[0].rate:.3g}/s",
        f"{1e3 * at_knee.ttft_s.p90:.0f} ms",
        f"{1e3 * at_knee.tpot_s.p90:.1f} ms",
    )


def _print(args: argparse.Namespace, title: str, answer: Sweep, problems: list[str]) -> None:
    from quickstep.cli.screen import console_on, print_table

    console = console_on(sys.stdout)
    rows = [_cells(args, row) for row in answer.rows]
    print_table(console, title, _header(args), rows)
    for problem in problems:
        console.print(problem, markup=False)
    console.print(f"\n{answer.recommendation}", markup=False)


def _write_csv(file: Path, answer: Sweep) -> None:
    """A line per simulation."""
    options = ("policy", "max_num_batched_tokens", "tensor", "replicas")
    figures = ("requests_per_s", "output_tokens_per_s", "goodput_per_s", "attainment", "busy")
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        latencies = ("ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s")
        writer.writerow(
            (*options, "devices", "rate", "met", "complete", *figures, *latencies, "binding")
        )
        for row in answer.rows:
            for point in row.points:
                summary, of = point.figures, row.combination
                ttft, tpot = summary.ttft_s, summary.tpot_s
                writer.writerow(
                    (
                        *(of.policy.value, of.max_num_batched_tokens, of.tensor, of.replicas),
                        *(row.num_devices, point.rate, int(point.met), int(point.is_complete)),
                        *(getattr(summary, name) for name in figures),
                        *(ttft.p50, ttft.p90, tpot.p50, tpot.p90, point.binding),
                    )
                )


def _axes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in _AXES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(_AXES)}")
    return names
