"""`quickstep bench`: measured speed beside measured limits; `serve` and `accuracy` besides.

Each runs the live engine on a checkpoint or, with `--shape`, on random weights of a known model's
sizes in memory. Nothing here is asserted by a test: run it on a quiet machine, on purpose.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from quickstep.bench.shapes import SHAPES
from quickstep.cli.bench_accuracy import add_accuracy
from quickstep.cli.bench_serve import add_serve
from quickstep.cli.flags.engine import add_engine_flags, add_model, engine_config, model_of
from quickstep.cli.flags.parsing import Parser, bytes_size, command, positive_int, token_count
from quickstep.cli.flags.quantization import KV_FORMATS, WEIGHT_FORMATS
from quickstep.config import EngineConfig
from quickstep.errors import ConfigError
from quickstep.ops.torch_import import require_torch

if TYPE_CHECKING:
    from quickstep.bench.subject import Subject

__all__ = ["add_parser"]

_Result = TypeVar("_Result")

_KV = tuple(name for name in KV_FORMATS if name != "auto")

_STEP_TEXT = """\
Measure whole decode steps and a prefill through the live engine.

decode_ms               gap between two tokens of one stream while the batch decodes
decode_bandwidth_share  bytes of packed weights and KV that a step reads, over decode_ms, over the
                        read bandwidth measured just before
overhead_us             a decode step's time less the time in native kernels (for models without:
                        less model.forward and model.logits): Python, torch's small operations,
                        sampling, scheduling, detokenising and delivery
prefill_ms              from a prompt's submission to its first token
prefill_peak_share      the prompt's operations (2 per parameter and token, 4 per query dimension
                        and pair of positions), over prefill_ms, over the peak of the same
                        dot products in registers measured just before; operations that the
                        engine leaves out count too (most of the last layer's, for tokens that
                        emit nothing): a share of the model's floor, not of busy cores

Figures are medians over the repeats, with the least and the greatest."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the commands."""
    parser = command(subparsers, "bench", "Measure speed, beside the machine's limits.", _no_kind)
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    _add_step(kinds)
    _add_latency(kinds)
    _add_throughput(kinds)
    add_serve(kinds)
    add_accuracy(kinds)


def _no_kind(args: argparse.Namespace) -> int:
    raise AssertionError("argparse asks for the kind")


def _add_step(kinds: argparse._SubParsersAction[Parser]) -> None:
    text = "Decode steps and a prefill: times, shares of the limits, overhead."
    parser = command(kinds, "step", text, _run_step)
    parser.description = _STEP_TEXT
    _add_subject(parser, repeats=5)
    parser.add_argument(
        "--batch", type=positive_int, default=1, metavar="N", help="decoding rows (default: 1)"
    )
    parser.add_argument(
        "--context",
        type=token_count,
        default=512,
        metavar="TOKENS",
        help="of each decoding sequence, half-way (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill",
        type=token_count,
        default=512,
        metavar="TOKENS",
        help="of the prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=32,
        metavar="N",
        help="decode steps per repeat (default: %(default)s)",
    )
    parser.add_argument(
        "--probe-bytes",
        type=bytes_size,
        metavar="SIZE",
        help="buffer that the read bandwidth is measured with (default: 512MiB)",
    )


def _add_latency(kinds: argparse._SubParsersAction[Parser]) -> None:
    text = "One stream: time to first token, time per token."
    parser = command(kinds, "latency", text, _run_latency)
    _add_subject(parser, repeats=5)
    for name, default in (("input", 512), ("output", 128)):
        parser.add_argument(
            f"--{name}-len",
            type=token_count,
            default=default,
            metavar="TOKENS",
            help=f"{name} tokens (default: %(default)s)",
        )


def _add_throughput(kinds: argparse._SubParsersAction[Parser]) -> None:
    text = "Many requests at once, lognormal lengths: wall time, tokens per second."
    parser = command(kinds, "throughput", text, _run_throughput)
    _add_subject(parser, repeats=3)
    parser.add_argument(
        "--num-prompts",
        type=positive_int,
        default=64,
        metavar="N",
        help="requests, all submitted at once (default: %(default)s)",
    )
    parser.add_argument(
        "--max-len",
        type=token_count,
        default=1024,
        metavar="TOKENS",
        help="cap on a drawn prompt or output length (default: %(default)s)",
    )


def _add_subject(parser: Parser, repeats: int) -> None:
    add_model(parser)
    parser.add_argument(
        "--shape",
        choices=list(SHAPES),
        help="instead of a MODEL: random weights of these sizes, in memory",
    )
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=repeats,
        metavar="N",
        help="measured rounds, after a warm-up (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="draws prompts, lengths, random weights (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--weights",
        choices=list(WEIGHT_FORMATS),
        help="short for --dtype, or for --quantization over the model's dtype",
    )
    parser.add_argument("--kv", choices=_KV, help="short for --kv-cache-dtype")
    add_engine_flags(parser)


def _run_step(args: argparse.Namespace) -> int:
    require_torch("quickstep bench step")
    import os
    import time

    from quickstep.bench.limits import DEFAULT_PROBE_BYTES, open_limits
    from quickstep.bench.step import StepOptions, figures, measure_steps, sized_for_steps
    from quickstep.cli.bench_report import print_report

    options = StepOptions(
        args.batch, args.context, args.prefill, args.steps, args.repeats, args.seed
    )
    subject = _opened(args, sized_for_steps(_config(args), options))
    limits = open_limits(
        subject.model.device,
        subject.product_dtype,
        subject.num_threads,
        os.environ.get("QUICKSTEP_CPU_ISA"),
        args.probe_bytes or DEFAULT_PROBE_BYTES,
        time.perf_counter,
    )
    samples = _measured(subject, lambda: measure_steps(subject, limits, options))
    how = {
        "read": limits.read_how,
        "peak": limits.multiply_how,
        "overhead": f"decode time outside {subject.kernel_how}",
    }
    asked = {
        "batch": options.batch,
        "context": options.context,
        "prefill": options.prefill,
        "steps": options.steps,
    }
    print_report(args, subject, figures(subject, options, samples), asked, how)
    return 0


def _run_latency(args: argparse.Namespace) -> int:
    require_torch("quickstep bench latency")
    from quickstep.bench.traffic import LatencyOptions, measure_latency, sized_for
    from quickstep.cli.bench_report import print_report

    options = LatencyOptions(args.input_len, args.output_len, args.repeats, args.seed)
    longest = options.input_len + options.output_len
    try:
        subject = _opened(args, sized_for(_config(args), longest))
    except ConfigError as error:  # which may be about a length that the user did not write
        lengths = f"--input-len {options.input_len}, --output-len {options.output_len}"
        raise ConfigError(f"{lengths}: {error}") from None
    found = _measured(subject, lambda: measure_latency(subject, options))
    asked = {"input_len": options.input_len, "output_len": options.output_len}
    print_report(args, subject, found, asked)
    return 0


def _run_throughput(args: argparse.Namespace) -> int:
    require_torch("quickstep bench throughput")
    from quickstep.bench.traffic import (
        ThroughputOptions,
        measure_throughput,
        random_lengths,
        sized_for,
    )
    from quickstep.cli.bench_report import print_report

    options = ThroughputOptions(args.num_prompts, args.repeats, args.seed, args.max_len)
    lengths = random_lengths(options)
    longest = max(one.num_inputs + one.num_outputs for one in lengths)
    subject = _opened(args, sized_for(_config(args), longest))
    found = _measured(subject, lambda: measure_throughput(subject, options))
    asked = {
        "num_requests": len(lengths),
        "input_tokens": sum(one.num_inputs for one in lengths),
        "output_tokens": sum(one.num_outputs for one in lengths),
    }
    print_report(args, subject, found, asked)
    return 0


def _config(args: argparse.Namespace) -> EngineConfig:
    if args.shape and (args.model or args.model_flag):
        raise ConfigError("both a MODEL and --shape are given; give one")
    config = engine_config(args, model_of(args), args.seed)
    if args.kv is not None:
        if config.cache.kv_dtype != "auto":
            raise ConfigError("--kv is short for --kv-cache-dtype; give one")
        config = replace(config, cache=replace(config.cache, kv_dtype=KV_FORMATS[args.kv]))
    if args.weights is None:
        return config
    if args.quantization is not None or config.load.dtype != "auto":
        raise ConfigError("--weights is short for --dtype and --quantization; give it alone")
    dtype, quantization = WEIGHT_FORMATS[args.weights]
    return replace(config, load=replace(config.load, dtype=dtype, quantization=quantization))


def _opened(args: argparse.Namespace, config: EngineConfig) -> Subject:
    from quickstep.bench.subject import open_checkpoint, open_shape
    from quickstep.cli.screen import loading_bar

    with loading_bar(f"loading {args.shape or config.load.model}") as progress:
        if args.shape:
            return open_shape(config, args.shape, SHAPES[args.shape], args.seed, progress)
        return open_checkpoint(config, progress)


def _measured(subject: Subject, work: Callable[[], Awaitable[_Result]]) -> _Result:
    """Start the engine, measure, stop it whatever happens; in the event loop that serving uses."""
    import uvloop

    async def run() -> _Result:
        await subject.engine.start()
        try:
            return await work()
        finally:
            await subject.engine.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())
