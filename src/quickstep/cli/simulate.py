"""`quickstep simulate MODEL`: the engine's scheduler under simulated clients, on any hardware.

A run for each rate, policy and number of replicas given; a table, JSON, CSV of the requests, or an
HTML page.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from quickstep.cli.flags.engine import model_of
from quickstep.cli.flags.hardware import (
    add_drafts,
    add_engine_sizes,
    add_hardware,
    add_predicted_engine,
    drafts_of,
    element_bytes,
    hardware_of,
    measured_steps,
    predicted_on,
)
from quickstep.cli.flags.parsing import (
    Parser,
    command,
    non_negative_int,
    non_negative_number,
    positive_int,
    positive_number,
    readable_file,
    token_count,
)
from quickstep.cli.simulate_fallback import add_fallback, fallback_of, fallback_texts
from quickstep.cli.simulate_sweep import add_sweep, run_sweep
from quickstep.config import LoRAConfig, PolicyName
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.plan.candidates import Candidate
    from quickstep.plan.engines import Evidence
    from quickstep.plan.formulas import Split
    from quickstep.plan.hardware import Hardware
    from quickstep.plan.traffic import FallbackEngines, PhasePools, Replicas
    from quickstep.sim.report import Run
    from quickstep.sim.summary import Summary, Targets
    from quickstep.sim.window import CountedWindow
    from quickstep.sim.workload import Tenant, Workload

_PRESETS = ("chat", "rag", "code", "agent", "batch", "prefill-heavy", "decode-heavy")
_ARRIVALS = ("gamma", "ramp", "diurnal", "closed-loop")
_USUAL_MODEL_LEN = 16384
_LEAST_REQUESTS = 300  # of a run
_LEAST_ROUNDS = 2  # requests of each client of a closed loop
_TENANT_FIELDS = MappingProxyType(
    {
        "part": "part",
        "priority": "priority",
        "weight": "weight",
        "class": "request_class",
        "timeout": "timeout_s",
        "ttft-deadline": "ttft_deadline_s",
    }
)
_ROUTERS = ("round-robin", "fewest-requests", "prefix", "predicted")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(subparsers, "simulate", "Simulate clients of an engine on any hardware.", run)
    add_hardware(parser)
    add_predicted_engine(parser)
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
    engine.add_argument(
        "--max-loras",
        type=positive_int,
        default=LoRAConfig().max_loras,
        metavar="N",
        help="most adapters in memory at the same time (default: %(default)s)",
    )
    engine.add_argument(
        "--adapter-rank",
        type=positive_int,
        default=16,
        metavar="RANK",
        help="their rank, on every layer (default: %(default)s)",
    )
    engine.add_argument(
        "--adapter-load-ms",
        type=positive_number,
        default=20.0,
        metavar="MS",
        help="how long the load of one takes (default: %(default)s)",
    )
    add_drafts(engine)
    _add_replicas(parser.add_argument_group("replicas"))
    add_sweep(parser.add_argument_group("sweep"))
    add_fallback(parser.add_argument_group("fallback"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--csv", type=Path, metavar="FILE", help="write a line per request, or per run of --sweep"
    )
    output.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page")
    output.add_argument(
        "--no-range",
        action="store_true",
        help="leave out the range of a GPU's figures, for which each run is simulated again two or "
        "three times",
    )


def _add_replicas(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--replicas",
        type=_counts,
        default="1",
        metavar="COUNTS",
        help="engines, each on all of --hardware, that share the requests; several counts, "
        "separated by commas, are compared (default: %(default)s)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=positive_int,
        metavar="N",
        help="ranks of an engine (default: --hardware's devices divided by the stages; of this "
        "machine, 1)",
    )
    group.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        type=positive_int,
        default=1,
        metavar="N",
        help="stages of an engine; of this machine, its cores are divided, and step times are "
        "those that `quickstep calibrate` has measured so (default: %(default)s)",
    )
    group.add_argument(
        "--prefill-replicas",
        type=positive_int,
        metavar="N",
        help="engines that compute prompts for --decode-replicas, each on all of --hardware, as "
        "--prefill of the server does (default: every engine does both)",
    )
    group.add_argument(
        "--decode-replicas",
        type=positive_int,
        metavar="N",
        help="engines that decode, and compute prompts for which that is predicted to be faster",
    )
    group.add_argument(
        "--kv-link",
        metavar="NAME",
        help="link that hands the KV cache over (default: the link between the devices)",
    )
    group.add_argument(
        "--router",
        choices=_ROUTERS,
        default="fewest-requests",
        help="which replica gets a request (default: %(default)s)",
    )
    group.add_argument(
        "--faults",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="random crashes, slow-downs, late and lost messages, jumps of clocks and "
        "cancellations, by --seed (default: %(default)s)",
    )


def _add_clients(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset", choices=_PRESETS, default="chat", help="what they request (default: chat)"
    )
    group.add_argument(
        "--rate",
        type=_rates,
        default="1",
        metavar="RATES",
        help="sessions per second; several, separated by commas, are compared (default: "
        "%(default)s)",
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
        metavar="N",
        help="requests, all of which are counted (default: as many as it takes until the load is "
        "there, and for a while more, which is counted; of a file all)",
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
        type=readable_file,
        metavar="FILE",
        help="requests of a Mooncake, Azure or BurstGPT trace instead of --preset",
    )
    group.add_argument(
        "--from-recording",
        type=readable_file,
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
    group.add_argument(
        "--tenant",
        type=_tenant,
        action="append",
        metavar="NAME[,FIELD=VALUE...]",
        help="a tenant that sends a part of the requests, once for each: part=1 (relative to the "
        "others), priority=0, weight=1, class=interactive|batch, timeout=SECONDS until a request "
        "ends in any case, ttft-deadline=SECONDS until its first token is useless",
    )
    group.add_argument(
        "--adapters", type=positive_int, metavar="N", help="LoRA adapters, one for each session"
    )
    group.add_argument(
        "--adapter-skew",
        type=non_negative_number,
        default=1.0,
        metavar="S",
        help="exponent of Zipf's law of their use; 0 is uniform (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, and print the figures."""
    from quickstep.plan.traffic import Replicas
    from quickstep.sim.summary import Targets

    if args.trace is not None and args.from_recording is not None:
        raise ConfigError("--trace and --from-recording are given; choose one")
    if _file(args) is not None and (args.tenant or args.adapters):
        raise ConfigError("--tenant and --adapters are for --preset; a file has its own")
    model_of(args)  # reports a missing one before this machine is measured
    hardware, evidence = predicted_on(args, hardware_of(args))
    if args.sweep is not None:
        code = run_sweep(args, hardware, partial(_engine, args, hardware), _simulated)
        if evidence is not None and not args.json:
            print(f"likely figures, by {evidence.text}")
        return code
    candidate = _engine(args, hardware, hardware.count)
    fallback = fallback_of(args, lambda of: _engine(of, hardware, hardware.count))
    chains = [None] if fallback is None else [None, fallback]
    runs, ranges = [], []
    for policy, count in itertools.product(args.scheduling_policy, args.replicas):
        for rate in args.rate if _file(args) is None else args.rate[:1]:
            replicas = Replicas(count, args.router, args.faults, args.seed)
            for chain in chains:
                runs.append(_simulated(args, candidate, rate, policy, replicas, fallback=chain))
                known = None
                if evidence is not None and chain is None and not args.no_range:
                    simulated = partial(_simulated_on, args, rate, policy, replicas)
                    known = _range(args, hardware, evidence, runs[-1].summary, simulated)
                ranges.append(known)
    notes = [note for note in (_too_few(args, run) for run in runs) if note is not None]
    if args.json:
        rows = [
            {
                "run": run.name,
                "rate": run.rate,
                "counted_from_s": run.counted_from_s,
                "replicas": run.outcome.num_replicas,
                "figures": run.summary,
                "resent": run.outcome.num_resent,
                "lost_s": run.outcome.lost_s,
                "handovers": run.outcome.handovers,
                "fallbacks": _fallbacks(run),
                "tenants": _by_tenant(run, _targets(args)),
                "range": known,
                "evidence": evidence,
            }
            for run, known in zip(runs, ranges, strict=True)
        ]
        print(msgspec.json.encode(rows).decode())
    else:
        _print_runs(_title(args, candidate), runs, _targets(args), bool(args.adapters))
        has_targets = _targets(args) != Targets()
        for run, known in zip(runs, ranges, strict=True):
            if known is not None:
                print(_range_text(run, known, has_targets))
        if evidence is not None:
            print(f"evidence: {evidence.text}")
    for note in notes:
        print(note, file=sys.stderr)
    if args.csv is not None:
        _write_csv(args.csv, runs)
    if args.report is not None:
        from quickstep.server.page.single_file import page_with_report
        from quickstep.sim.report import report_of_runs

        title = _title(args, candidate)
        page = page_with_report(title, report_of_runs(title, runs))
        args.report.write_text(page, encoding="utf-8")
        print(f"{args.report}: written", file=sys.stderr)
    return 0


class RunRange(msgspec.Struct, frozen=True):
    """The figures of a run with steps as slow and as fast as those of the evidence.

    Attributes:
        met_part: The part of the range in which enough requests meet the targets.
    """

    low: Summary
    high: Summary
    met_part: float


def _range(
    args: argparse.Namespace,
    hardware: Hardware,
    evidence: Evidence,
    likely: Summary,
    simulated: Callable[[Hardware], Summary],
) -> RunRange:
    from quickstep.plan.engines import over_range, slowed

    def made(factor: float) -> Summary:
        return simulated(slowed(hardware, factor))

    found = over_range(evidence, likely, made, lambda end: end.attainment >= args.attainment)
    return RunRange(*found)


def _simulated_on(
    args: argparse.Namespace,
    rate: float,
    policy: PolicyName,
    replicas: Replicas,
    hardware: Hardware,
) -> Summary:
    """The figures of a run on other hardware."""
    candidate = _engine(args, hardware, hardware.count)
    return _simulated(args, candidate, rate, policy, replicas).summary


def _range_text(run: Run, known: RunRange, has_targets: bool) -> str:
    """Low to high of a run's figures."""
    low, high = known.low, known.high
    text = (
        f"{run.name}: {low.output_tokens_per_s:.0f} to {high.output_tokens_per_s:.0f} tokens/s, "
        f"TTFT p50 {1e3 * high.ttft_s.p50:.0f} to {1e3 * low.ttft_s.p50:.0f} ms, "
        f"TPOT p50 {1e3 * high.tpot_s.p50:.1f} to {1e3 * low.tpot_s.p50:.1f} ms"
    )
    return f"{text}; met in {known.met_part:.0%} of the range" if has_targets else text


def _engine(
    args: argparse.Namespace,
    hardware: Hardware,
    tensor: int,
    num_batched_tokens: int | None = None,
) -> Candidate:
    """The engine of the flags on so many devices, with so many tokens of a step (None: those of
    the flags). Raises ConfigError.
    """
    from quickstep.plan.candidates import EngineLimits, Load, LoRASizes, fit
    from quickstep.plan.formulas import Split
    from quickstep.plan.hardware import THIS, parse_hardware
    from quickstep.plan.models import find_model

    spec = find_model(model_of(args))
    elements = element_bytes(args, spec, hardware)
    loras = None
    if args.adapters:
        loras = LoRASizes(min(args.max_loras, args.adapters), args.adapter_rank)
    measured, split = None, Split(tensor)
    ranks, stages = args.tensor_parallel_size, args.pipeline_parallel_size
    if parse_hardware(args.hardware)[0] == THIS:
        # ranks and stages share the memory of this machine, and were measured together
        num_engines = (args.prefill_replicas or 0) + (args.decode_replicas or 0)
        num_engines = num_engines or max(args.replicas)
        measured = measured_steps(args, (ranks or 1, stages), num_engines)
    else:
        split = _split(tensor, ranks, stages)
    return fit(
        spec,
        hardware,
        split,
        elements,
        Load(1.0, _max_model_len(args, spec) - 1, 1),
        EngineLimits(
            args.max_num_seqs,
            num_batched_tokens or args.max_num_batched_tokens,
            args.num_speculative_tokens,
        ),
        loras,
        drafts_of(args, spec),
        measured=None if measured is None else measured.costs,
        stages=None if measured is None else measured.stages,
    )


def _split(num_devices: int, ranks: int | None, stages: int) -> Split:
    """Of an engine on so many devices. Raises ConfigError."""
    from quickstep.plan.formulas import Split

    ranks = ranks or max(1, num_devices // stages)
    if ranks * stages != num_devices:
        raise ConfigError(
            f"{ranks} ranks and {stages} stages are not {num_devices} devices; they have to divide "
            "all devices of --hardware"
        )
    return Split(ranks, stages)


def _max_model_len(args: argparse.Namespace, spec: ModelSpec) -> int:
    return min(args.max_model_len or _USUAL_MODEL_LEN, spec.max_model_len)


def _phases(args: argparse.Namespace, candidate: Candidate) -> PhasePools | None:
    """The engines of each phase; None if every engine does both. Raises ConfigError."""
    from quickstep.core.handover import TRANSFER_BYTES_PER_S
    from quickstep.plan.hardware import THIS, Link, find_link, parse_hardware, read_hardware
    from quickstep.plan.traffic import PhasePools

    counts = args.prefill_replicas, args.decode_replicas
    if counts == (None, None):
        return None
    if None in counts:
        raise ConfigError("--prefill-replicas and --decode-replicas go together; give both")
    if args.replicas != (1,) or args.faults or args.sweep:
        raise ConfigError(
            "--prefill-replicas and --decode-replicas are all engines, without --replicas, "
            "--faults and --sweep"
        )
    link = candidate.hardware.link
    if parse_hardware(args.hardware)[0] == THIS:  # between processes
        link = Link(TRANSFER_BYTES_PER_S / 1e9, 0.0, "docs/design/0060")
    if args.kv_link is not None:
        link = find_link("--kv-link", args.kv_link, read_hardware(args.hardware_file))
    return PhasePools(*counts, candidate, link)


def _simulated(
    args: argparse.Namespace,
    candidate: Candidate,
    rate: float,
    policy: PolicyName,
    replicas: Replicas,
    window: CountedWindow | None = None,
    fallback: FallbackEngines | None = None,
) -> Run:
    """One simulation, with a progress bar. With a `window` it is one of a sweep, which has its own
    bar.
    """
    from msgspec.structs import replace

    from quickstep.cli.screen import counting_bar
    from quickstep.plan.traffic import Traffic, simulate_arrivals, simulate_traffic
    from quickstep.sim.report import Run
    from quickstep.sim.summary import summarize
    from quickstep.sim.traces import read_trace, recorded_traffic

    max_model_len = _max_model_len(args, candidate.spec)
    bar = counting_bar() if window is None else nullcontext()
    workload, file, phases = _workload(args), _file(args), _phases(args, candidate)
    if window is None and file is None and args.num_prompts is None:
        window = _window(args, workload, rate)
    if window is not None:
        num_requests = window.max_sequences
    else:
        num_requests = args.num_prompts or _num_requests(args, workload, rate)
    traffic = Traffic(
        workload=workload,
        arrivals=args.arrivals,
        rate=rate,
        num_requests=num_requests,
        burstiness=args.burstiness,
        num_clients=args.max_concurrency,
        seed=args.seed,
    )
    with bar as show:
        progress = None if show is None else partial(_show, show, policy.value, num_requests)
        if file is None:
            outcome = simulate_traffic(
                candidate,
                traffic,
                max_model_len,
                policy,
                args.padded,
                progress,
                replicas,
                phases,
                window if phases is None else None,
                fallback,
                args.max_waiting,
            )
        else:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            read = read_trace if args.from_recording is None else recorded_traffic
            arrivals = read(lines, args.trace_speed)[: args.num_prompts]
            outcome = simulate_arrivals(
                candidate,
                arrivals,
                max_model_len,
                policy,
                pads=args.padded,
                progress=progress,
                replicas=replicas,
                phases=phases,
                fallback=fallback,
                max_waiting=args.max_waiting,
            )
    counted_from_s = 0.0
    if window is not None:
        counted_from_s, end_s = window.start_s, window.end_s
        begun = [ending for ending in outcome.endings if ending.timings.arrival_s <= end_s]
        outcome = replace(outcome, endings=begun)
    summary = summarize(outcome, candidate.num_blocks, _targets(args), counted_from_s)
    load = f"{args.max_concurrency} clients"
    if file is not None:
        load = f"{args.trace_speed:g} x {file.name}"
    elif args.arrivals != "closed-loop":
        load = f"{rate:g}/s"
    if phases is not None:
        load += f", {phases.num_prefill}P{phases.num_decode}D"
    if replicas.count > 1:
        load += f", {replicas.count} replicas"
    if fallback is not None:
        load += ", with the chain"
    return Run(
        f"{policy.value}, {load}",
        rate,
        candidate.num_blocks,
        summary,
        outcome,
        counted_from_s,
    )


def _window(args: argparse.Namespace, workload: Workload, rate: float) -> CountedWindow | None:
    """The requests that count, of a load that stays the same; None if all do."""
    from quickstep.sim.window import CountedWindow, window_of_load

    if args.arrivals != "gamma":
        return None
    num_requests = _num_requests(args, workload, rate)
    turns, session_s = workload.mean_turns, workload.session_s
    start_s, end_s = window_of_load(rate, num_requests, turns, session_s)
    return CountedWindow(start_s, end_s, _targets(args), 0.0, num_requests, gives_up=False)


def _num_requests(args: argparse.Namespace, workload: Workload, rate: float) -> int:
    """How many requests a run sends without `--num-prompts`."""
    from quickstep.sim.window import requests_for_load

    if args.arrivals == "closed-loop":
        num_clients: int = args.max_concurrency
        return max(_LEAST_REQUESTS, 2 * _LEAST_ROUNDS * num_clients)
    return max(_LEAST_REQUESTS, requests_for_load(rate, workload.mean_turns, workload.session_s))


def _too_few(args: argparse.Namespace, run: Run) -> str | None:
    """What to print if `--num-prompts` ends a run before its load is there."""
    from quickstep.sim.window import requests_for_load

    if args.num_prompts is None or _file(args) is not None:
        return None
    if args.arrivals == "closed-loop":
        needed = _LEAST_ROUNDS * args.max_concurrency
        load = f"of {args.max_concurrency} clients"
    elif args.arrivals == "gamma":
        workload = _workload(args)
        needed = requests_for_load(run.rate, workload.mean_turns, workload.session_s)
        load = f"of {run.rate * workload.mean_turns:g} requests/s"
    else:
        return None
    if args.num_prompts >= needed:
        return None
    return (
        f"{run.name}: the load {load} is not reached with --num-prompts {args.num_prompts}, it "
        f"takes {needed}; leave the option out"
    )


def _show(show: Callable[[str, int, int], None], what: str, total: int, done: int) -> None:
    """Update the bar with the number of requests that have ended."""
    show(what, done, total)


def _workload(args: argparse.Namespace) -> Workload:
    """The preset with the tenants and adapters of the flags."""
    from msgspec.structs import replace

    from quickstep.sim.workload import WORKLOADS, AdapterMix, with_lengths

    workload = with_lengths(WORKLOADS[args.preset], args.input, args.output)
    if args.tenant:
        workload = replace(workload, tenants=tuple(args.tenant))
    if args.adapters:
        load_s = args.adapter_load_ms / 1e3
        adapters = AdapterMix(args.adapters, args.adapter_skew, args.max_loras, load_s)
        workload = replace(workload, adapters=adapters)
    return workload


def _targets(args: argparse.Namespace) -> Targets:
    from quickstep.sim.summary import Targets

    return Targets(*(None if ms is None else ms / 1e3 for ms in (args.ttft_ms, args.tpot_ms)))


def _file(args: argparse.Namespace) -> Path | None:
    """The file that has the requests; None for a preset."""
    file: Path | None = args.trace or args.from_recording
    return file


def _title(args: argparse.Namespace, candidate: Candidate) -> str:
    hardware, file = candidate.hardware, _file(args)
    name = args.preset if file is None else file.name
    padded = ", padded rows" if args.padded else ""
    return f"{name} with {model_of(args)} on {hardware.count} x {hardware.device.label}{padded}"


def _print_runs(title: str, runs: list[Run], targets: Targets, has_adapters: bool) -> None:
    """Print a row for each run, and one for each of its tenants."""
    from quickstep.cli.screen import console_on, print_table

    waited = ("adapter p50/p90",) if has_adapters else ()
    times = ("TTFT p50/p90", "TPOT p50/p90")
    header = ("run", "requests/s", "tokens/s", *times, *waited, "in time", "busy")
    rows = []
    for run in runs:
        rows.append((run.name, *_cells(run.summary, has_adapters), f"{run.summary.busy:.0%}"))
        for tenant, figures in _by_tenant(run, targets).items():
            rows.append((f"  {tenant}", *_cells(figures, has_adapters), ""))
    print_table(console_on(sys.stdout), title, header, rows, is_dense=has_adapters)
    has_chain = any(run.outcome.fallbacks is not None for run in runs)
    for run in runs:
        handovers = run.outcome.handovers
        if handovers is not None:
            print(
                f"{run.name}: {handovers.count} of {run.summary.num_requests} requests continued "
                f"at another engine, {handovers.num_bytes / 1e9:.3g} GB of KV, the last blocks "
                f"within {1e3 * handovers.mean_s:.2f} ms; {handovers.num_refused} transfers had no "
                f"room; prefill engines {handovers.prefill_busy:.0%} busy, decode engines "
                f"{handovers.decode_busy:.0%}"
            )
        if run.summary.bubble:
            print(f"{run.name}: stages with steps waited {run.summary.bubble:.1%} of the time")
        if has_chain:
            texts = [f"{run.summary.goodput_per_s:.3g} requests/s in time"]
            texts += fallback_texts(run.outcome.fallbacks or {})
            print(f"{run.name}: {'; '.join(texts)}")
        if run.outcome.num_resent:
            print(
                f"{run.name}: {run.outcome.num_resent} requests were sent again after a crash, "
                f"which had received {run.outcome.lost_s:.2f} s on the device"
            )


def _fallbacks(run: Run) -> list[dict[str, str | int]] | None:
    """How often each step of the chain was entered; None without a chain."""
    if run.outcome.fallbacks is None:
        return None
    return [
        {"step": step, "cause": cause, "count": count}
        for (step, cause), count in sorted(run.outcome.fallbacks.items())
    ]


def _by_tenant(run: Run, targets: Targets) -> dict[str, Summary]:
    """The figures of each tenant, if there are several."""
    from quickstep.sim.summary import by_tenant, summarize

    outcomes = by_tenant(run.outcome).items()
    since_s = run.counted_from_s
    return {name: summarize(one, run.num_blocks, targets, since_s) for name, one in outcomes}


def _cells(figures: Summary, has_adapters: bool) -> tuple[str, ...]:
    ttft, tpot, adapter = figures.ttft_s, figures.tpot_s, figures.adapter_s
    waited = (f"{1e3 * adapter.p50:.0f}/{1e3 * adapter.p90:.0f} ms",) if has_adapters else ()
    return (
        f"{figures.requests_per_s:.3g}",
        f"{figures.output_tokens_per_s:.0f}",
        f"{1e3 * ttft.p50:.0f}/{1e3 * ttft.p90:.0f} ms",
        f"{1e3 * tpot.p50:.1f}/{1e3 * tpot.p90:.1f} ms",
        *waited,
        f"{figures.attainment:.0%}",
    )


def _write_csv(file: Path, runs: list[Run]) -> None:
    """A line per sequence, in the order of their ends, and whether it is in the figures."""
    names = ("arrival_s", "queue_s", "first_token_s", "finished_s", "num_preemptions")
    counts = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "device_s")
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(
            ("run", "request_id", "tenant", "finish_reason", *names, *counts, "counted")
        )
        for run in runs:
            for ending in run.outcome.endings:
                values = [getattr(ending.timings, name) for name in (*names, *counts)]
                names_of = (run.name, ending.request_id, ending.tenant)
                is_counted = int(ending.timings.arrival_s >= run.counted_from_s)
                writer.writerow((*names_of, ending.reason.value, *values, is_counted))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(positive_int(part) for part in text.split(","))


def _rates(text: str) -> tuple[float, ...]:
    return tuple(positive_number(part) for part in text.split(","))


def _tenant(text: str) -> Tenant:
    """Parse `paid,part=3,priority=-1`."""
    from quickstep.sim.workload import Tenant

    name, *fields = text.split(",")
    values: dict[str, object] = {"name": name}
    for field in fields:
        key, is_given, value = field.partition("=")
        if not is_given or key not in _TENANT_FIELDS:
            raise argparse.ArgumentTypeError(
                f"{field!r} is none of part=N, priority=N, weight=N, class=interactive|batch, "
                "timeout=SECONDS, ttft-deadline=SECONDS"
            )
        values[_TENANT_FIELDS[key]] = value
    try:
        tenant = msgspec.convert(values, Tenant, strict=False)
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    limits = [limit for limit in (tenant.timeout_s, tenant.ttft_deadline_s) if limit is not None]
    if not name or not all(number > 0 for number in (tenant.part, tenant.weight, *limits)):
        raise argparse.ArgumentTypeError(
            f"{text!r} needs a name, and part, weight and seconds must be above 0"
        )
    return tenant


def _policies(text: str) -> tuple[PolicyName, ...]:
    known = [policy.value for policy in PolicyName]
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return tuple(map(PolicyName, text.split(",")))
