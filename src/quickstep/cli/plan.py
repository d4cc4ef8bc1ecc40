"""`quickstep plan MODEL`: what a model needs on which hardware, and whether a target is met.

Exit code: 0 if the target is met, 1 if not, 2 for a question that has no answer (an unknown model
or device, a model that does not fit).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quickstep.cli.flags.engine import model_of
from quickstep.cli.flags.hardware import (
    adapters_of,
    add_adapters,
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
    fraction,
    positive_number,
    readable_file,
    token_count,
)
from quickstep.errors import ConfigError, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from quickstep.plan.engines import Evidence
    from quickstep.plan.explain import ParallelRow
    from quickstep.plan.planner import OptionRange, Plan, PlanQuery, SimulatedOption
    from quickstep.sim.summary import Percentiles

_GB = 1e9
_FORMAT_NAMES = {"none": "unquantized", "stored": "as stored"}
_OPTION_COLUMNS = (
    *("split", "devices", "TTFT p50/p90", "TPOT p50/p90"),
    *("in time", "up to", "$/h", "$/M"),
)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers, "plan", "Compute memory, latency, devices and cost for a load.", run
    )
    add_hardware(parser)
    add_predicted_engine(parser)
    load = parser.add_argument_group("load and targets")
    load.add_argument(
        "--rate",
        type=positive_number,
        default=1.0,
        metavar="N",
        help="requests per second (default: %(default)s)",
    )
    load.add_argument(
        "--input",
        type=token_count,
        default=1000,
        metavar="TOKENS",
        help="tokens of a prompt (default: %(default)s)",
    )
    load.add_argument(
        "--output",
        type=token_count,
        default=300,
        metavar="TOKENS",
        help="tokens of an output (default: %(default)s)",
    )
    load.add_argument(
        "--from-recording",
        type=readable_file,
        metavar="FILE",
        help="take rate, input and output from a recording of `quickstep serve --record`: their "
        "means",
    )
    load.add_argument(
        "--ttft-ms",
        type=positive_number,
        metavar="MS",
        help="target of the first token",
    )
    load.add_argument(
        "--tpot-ms", type=positive_number, metavar="MS", help="target of the time per output token"
    )
    load.add_argument(
        "--attainment",
        type=fraction,
        default=0.9,
        metavar="PART",
        help="part of the requests that must be within the targets (default: %(default)s)",
    )
    engine = parser.add_argument_group("engine")
    add_engine_sizes(engine)
    engine.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="only splits that divide complete experts over devices",
    )
    add_adapters(engine)
    add_drafts(engine)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--explain", action="store_true", help="print the formulas with their numbers too"
    )
    output.add_argument(
        "--compare-parallelism",
        action="store_true",
        help="compare tensor, pipeline and data parallelism per phase instead",
    )
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write an HTML page with the options, the memory and the roofline of a device",
    )
    output.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the arrivals (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    import msgspec

    from quickstep.cli.screen import console_on
    from quickstep.plan.explain import compare_parallelism, explain
    from quickstep.plan.planner import make_plan

    query = _query(args)
    console = console_on(sys.stdout)
    if args.compare_parallelism:
        compared = compare_parallelism(query)
        if args.json:
            print(msgspec.json.encode(compared).decode())
        else:
            _print_comparison(console, query, compared)
        return 0
    plan = make_plan(query)
    lines = list(explain(query, query.fit(plan.options[0].split))) if args.explain else []
    if args.json:
        answer = msgspec.to_builtins(plan)
        if lines:
            answer["explanation"] = msgspec.to_builtins(lines)
        print(msgspec.json.encode(answer).decode())
    else:
        _print_plan(console, query, plan)
        for line in lines:
            console.print(f"{line.what}: {line.formula} = {line.result}", markup=False)
    if args.report is not None:
        _write_report(args.report, query, plan)
    return 0 if plan.met else 1


def _write_report(path: Path, query: PlanQuery, plan: Plan) -> None:
    from quickstep.plan.picture import report_of_plan
    from quickstep.server.page.single_file import page_with_report

    report = report_of_plan(
        query, plan, _OPTION_COLUMNS, [_cells(option) for option in plan.options]
    )
    path.write_text(page_with_report(report.title, report), encoding="utf-8")
    print(f"{path}: written", file=sys.stderr)


def _query(args: argparse.Namespace) -> PlanQuery:
    from quickstep.plan.candidates import EngineLimits, Load
    from quickstep.plan.models import find_model
    from quickstep.plan.planner import PlanQuery
    from quickstep.sim.summary import Targets

    spec = find_model(model_of(args))
    if args.enable_expert_parallel and spec.moe is None:
        raise ConfigError(
            f"expert parallelism divides experts, and {model_of(args)} has none; leave "
            "--enable-expert-parallel out"
        )
    load, measured = Load(args.rate, args.input, args.output), measured_steps(args)
    if args.from_recording is not None:
        from quickstep.plan.traffic import mean_load
        from quickstep.sim.traces import recorded_traffic

        with args.from_recording.open("rb") as file:
            load = mean_load(recorded_traffic(file))
        if not args.json:
            print(
                f"{args.from_recording}: {load.rate:.3g} requests/s, {load.num_inputs} tokens in, "
                f"{load.num_outputs} out"
            )
    hardware, evidence = predicted_on(args, hardware_of(args))
    return PlanQuery(
        model=model_of(args),
        spec=spec,
        hardware=hardware,
        load=load,
        targets=Targets(_seconds(args.ttft_ms), _seconds(args.tpot_ms)),
        elements=element_bytes(args, spec, hardware),
        attainment=args.attainment,
        limits=EngineLimits(
            args.max_num_seqs, args.max_num_batched_tokens, args.num_speculative_tokens
        ),
        seed=args.seed,
        loras=adapters_of(args, spec),
        drafts=drafts_of(args, spec),
        divides_experts=args.enable_expert_parallel,
        measured=None if measured is None else measured.costs,
        evidence=evidence,
    )


def _print_plan(console: Console, query: PlanQuery, plan: Plan) -> None:
    from quickstep.cli.screen import print_table
    from quickstep.plan.hardware import MEASURED

    best = plan.options[0]
    print_table(
        console,
        f"{plan.model} on {plan.hardware}: memory of a device, {best.name}",
        ("part", "size", "of"),
        [(row.label, size_text(row.num_bytes), row.detail) for row in plan.memory],
    )
    fits = ", ".join(
        f"{_FORMAT_NAMES.get(name, name)} "
        + (f"from {fewest}" if fewest else f"not on {query.hardware.count}")
        for name, fewest in plan.fits.items()
    )
    console.print(
        f"\nKV: {plan.kv_bytes_per_token:,} bytes a token, "
        f"{plan.kv_bytes_per_sequence / _GB:.3f} GB a request of {plan.load.num_tokens} tokens; "
        f"{best.concurrency} requests at once\nweights fit, by format and devices: {fits}\n",
        markup=False,
    )
    options = [_cells(option) for option in plan.options]
    print_table(console, _load_text(plan), _OPTION_COLUMNS, options)
    console.print(_advice(plan), markup=False)
    price = query.hardware.device.price
    if price is not None and price.date:
        console.print(f"price: ${price.usd_per_hour}/h, {price.date}, {price.source}", markup=False)
    times = "are predicted from data sheets"
    several = (
        "; Quickstep has not run on several GPUs yet, so splits over them show what they would"
    )
    several += " give"
    if query.hardware.device.achieved == MEASURED:
        times = (
            "are predicted from the memory and the peak of this machine; `quickstep calibrate "
            f"{query.model}` measures them"
        )
        several = ""
    if query.measured is not None:
        times = "of one device are those that `quickstep calibrate` has stored"
    if plan.evidence is not None and plan.range is not None:
        times = "are predicted"
        console.print(_range_text(plan.evidence, plan.range), markup=False)
    console.print(f"Step times {times}{several}.", markup=False)
    verdict = plan.verdict
    if plan.range is not None:
        verdict += f"; met in {plan.range.met_part:.0%} of the range"
    console.print(f"\n{'MET' if plan.met else 'NOT MET'}: {verdict}", markup=False)


def _range_text(evidence: Evidence, known: OptionRange) -> str:
    """Low to high of the figures of a split, and what they rest on."""
    low, high = known.low, known.high
    tokens = (known.num_engines * end.output_tokens_per_s for end in (low, high))
    return (
        f"range of {known.name}: {' to '.join(f'{value:.0f}' for value in tokens)} tokens/s, "
        f"TTFT {_interval(high.ttft_s.p50, low.ttft_s.p50)}, "
        f"TPOT {_interval(high.tpot_s.p50, low.tpot_s.p50)}, "
        f"up to {known.low_capacity_per_s:.3g} to {known.high_capacity_per_s:.3g} requests/s\n"
        f"evidence: {evidence.text}"
    )


def _interval(least_s: float, most_s: float) -> str:
    return f"{1e3 * least_s:.4g} to {1e3 * most_s:.4g} ms"


def _load_text(plan: Plan) -> str:
    limits = [
        f"{name} {1e3 * limit:g} ms"
        for name, limit in (("TTFT", plan.targets.ttft_s), ("TPOT", plan.targets.tpot_s))
        if limit is not None
    ]
    load = plan.load
    text = f"{load.rate:g} requests/s, {load.num_inputs} in, {load.num_outputs} out"
    return f"{text}; target: {', '.join(limits) or 'keep up'}"


def _cells(option: SimulatedOption) -> tuple[str, ...]:
    def dollars(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return (
        option.name,
        str(option.num_devices),
        _times(option.predicted.ttft_s),
        _times(option.predicted.tpot_s),
        f"{option.predicted.attainment:.0%}",
        f"{option.capacity_per_s:.3g}/s",
        dollars(option.usd_per_hour),
        dollars(option.usd_per_million_output_tokens),
    )


def _times(values: Percentiles) -> str:
    p50, p90 = (
        f"{ms:.4g}" if ms < 1e4 else f"{ms:.0f}" for ms in (1e3 * values.p50, 1e3 * values.p90)
    )
    return f"{p50}/{p90} ms"


def _advice(plan: Plan) -> str:
    best = plan.options[0]
    predicted = best.predicted
    text = (
        f"\n{best.name}: {best.output_tokens_per_s:.0f} output tokens/s, "
        f"{predicted.mean_decode_rows:.1f} rows decode in a step; "
        f"most of its time: {best.binding}"
    )
    for option in plan.options:
        if option.prefill is not None:
            text += (
                f"\n{option.name}: KV goes from engines that prefill (P) to engines that decode "
                f"(D) within {1e3 * option.handover_s:.3g} ms"
            )
    if plan.change is not None:
        text += (
            f"\nthe change that helps most: {plan.change.what}, "
            f"{best.capacity_per_s:.3g} -> {plan.change.capacity_per_s:.3g} requests/s"
        )
    return text


def _print_comparison(console: Console, query: PlanQuery, compared: list[ParallelRow]) -> None:
    from quickstep.cli.screen import print_table

    rows = [
        (option.strategy, str(option.split), "-", "-", "-")
        if option.reason
        else (
            option.strategy,
            str(option.split),
            f"{1e3 * option.prefill_s:.1f} ms",
            f"{1e3 * option.decode_s:.2f} ms",
            f"{option.decode_tokens_per_s:.0f}/s",
        )
        for option in compared
    ]
    load = query.load
    print_table(
        console,
        f"{query.model} on {query.hardware.count} x {query.hardware.device.label}: "
        f"prompts of {load.num_inputs}, 32 sequences decode",
        ("parallelism", "split", "prefill", "time per token", "decode"),
        rows,
        num_text_columns=2,
    )
    for option in compared:
        if option.reason:
            console.print(f"{option.strategy}: {option.reason}", markup=False)
    console.print(
        "\ntensor: each device reads a part of weights and KV, so the time to the first token and "
        "per token fall.\npipeline: room for larger models, and throughput with many requests; the "
        "time per token does not fall,\nas a token passes all stages. Tables that call pipelines "
        "great and tensor parallelism neutral for decode\nhave this reversed.\n"
        "data: throughput only; every replica holds all weights.",
        markup=False,
    )
    console.print(
        "\nQuickstep itself runs replicas everywhere, and on CPUs tensor and pipeline parallelism, "
        "and prompts\non other engines (--prefill, --decode). It has not run on several GPUs yet: "
        "of these, this is a plan.",
        markup=False,
    )
    if query.spec.moe is not None:
        console.print(
            "experts apart: each device holds complete experts. Replicas that share them hold a "
            "part of the\nweights and send tokens to each other (all-to-all); a step waits for the "
            "fullest device.",
            markup=False,
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
