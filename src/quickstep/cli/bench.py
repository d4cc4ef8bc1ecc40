"""`quickstep bench`: `step`, `latency` and `throughput`; `serve` and `accuracy` have own modules.

These three run the live engine on a checkpoint or, with `--shape`, on random weights in the sizes
of a known model. No test asserts a speed: run them on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from quickstep.bench.shapes import SHAPES
from quickstep.cli.bench_accuracy import add_accuracy
from quickstep.cli.bench_serve import add_serve
from quickstep.cli.flags.engine import add_engine_flags, add_model, engine_config, model_of
from quickstep.cli.flags.parsing import Parser, bytes_size, command, positive_int, token_count
from quickstep.cli.flags.quantization import KV_FORMATS, WEIGHT_FORMATS
from quickstep.config import EngineConfig, SpeculationConfig
from quickstep.errors import ConfigError
from quickstep.ops.torch_import import require_torch

if TYPE_CHECKING:
    from quickstep.bench.measured_engine import MeasuredEngine
    from quickstep.bench.repeats import RoundDone
    from quickstep.bench.step import StepOptions

_Result = TypeVar("_Result")

_NUM_KERNELS = 30  # rows of a profile's table
_KV = tuple(name for name in KV_FORMATS if name != "auto")

_STEP_TEXT = """\
Measure decode steps and a prefill of the live engine, and compare them with the machine's limits.

decode_ms               time between two tokens of one stream while the batch decodes
decode_bandwidth_share  (bytes of packed weights and KV that a step reads / decode_ms) divided by
                        the read bandwidth, which is measured just before (a GPU's copy
                        bandwidth, before the engine opens)
overhead_us             decode_ms without the time in native kernels (in models without them:
                        without model.forward and model.logits): Python, sampling, scheduling,
                        detokenizing and streaming
depth_decode_ms         with --depth: decode_ms at that length, measured in turns with the other
depth_ratio             depth_decode_ms / decode_ms of the same repeat
prefill_ms              time from submitting a prompt to its first token
prefill_peak_share      (operations of the prompt / prefill_ms) divided by the peak of the same dot
                        products in registers, which is measured just before. Operations: 2 per
                        parameter and token, 4 per query dimension and pair of positions. Those
                        that the engine skips are counted (most of the last layer's), so this is
                        not the utilization of the cores

Prints the median, minimum and maximum over the repeats. With --profile, prints instead what the
device ran in decode steps (on a CPU: the ops of torch), its pauses, and what launching took."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the commands."""
    parser = command(subparsers, "bench", "Measure speed and accuracy.", _no_kind)
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    _add_step(kinds)
    _add_latency(kinds)
    _add_throughput(kinds)
    add_serve(kinds)
    add_accuracy(kinds)


def _no_kind(args: argparse.Namespace) -> int:
    raise AssertionError("argparse requires the kind")


def _add_step(kinds: argparse._SubParsersAction[Parser]) -> None:
    text = "Decode steps and a prefill: times, overhead, fraction of the machine's limits."
    parser = command(kinds, "step", text, _run_step)
    parser.description = _STEP_TEXT
    _add_shared_flags(parser, repeats=5)
    parser.add_argument(
        "--batch",
        type=positive_int,
        default=1,
        metavar="N",
        help="decoding rows (default: %(default)s)",
    )
    parser.add_argument(
        "--context",
        type=token_count,
        default=512,
        metavar="TOKENS",
        help="length of each decoding sequence, half-way (default: %(default)s)",
    )
    parser.add_argument(
        "--depth",
        type=token_count,
        metavar="TOKENS",
        help="decode at this length too, in turns, and print the ratio; with --context 16 and "
        "--speculative-method off it is what a long context adds to a step",
    )
    parser.add_argument(
        "--prefill",
        type=token_count,
        default=512,
        metavar="TOKENS",
        help="length of the prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=32,
        metavar="N",
        help="decode steps per repeat (default: %(default)s)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print the kernels of decode steps, pauses and launches instead (torch.profiler)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="with --profile: write the Chrome trace there",
    )
    parser.add_argument(
        "--probe-bytes",
        type=bytes_size,
        metavar="SIZE",
        help="size of the buffer for measuring read bandwidth (default: 512MiB, of a GPU 2GiB)",
    )


def _add_latency(kinds: argparse._SubParsersAction[Parser]) -> None:
    text = "One stream: time to first token, time per output token."
    parser = command(kinds, "latency", text, _run_latency)
    _add_shared_flags(parser, repeats=5)
    for name, default in (("input", 512), ("output", 128)):
        parser.add_argument(
            f"--{name}-len",
            type=token_count,
            default=default,
            metavar="TOKENS",
            help=f"{name} length (default: %(default)s)",
        )


def _add_throughput(kinds: argparse._SubParsersAction[Parser]) -> None:
    text = "Many requests at once, lognormal lengths: total time, tokens per second."
    parser = command(kinds, "throughput", text, _run_throughput)
    _add_shared_flags(parser, repeats=3)
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
        help="largest prompt or output length (default: %(default)s)",
    )


def _add_shared_flags(parser: Parser, repeats: int) -> None:
    add_model(parser)
    parser.add_argument(
        "--shape",
        choices=list(SHAPES),
        help="instead of MODEL: random weights in the sizes of this model",
    )
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=repeats,
        metavar="N",
        help="measured rounds, after a warm-up (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of prompts, lengths and random weights (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--weights",
        choices=list(WEIGHT_FORMATS),
        help="short for --dtype or --quantization",
    )
    parser.add_argument("--kv", choices=_KV, help="short for --kv-cache-dtype")
    add_engine_flags(parser)


def _run_step(args: argparse.Namespace) -> int:
    require_torch("quickstep bench step")
    import os
    import time

    from quickstep.bench.limits import DEFAULT_PROBE_BYTES, Limits, gpu_limits, open_limits
    from quickstep.bench.step import StepOptions, figures, measure_steps, sized_for_steps
    from quickstep.cli.bench_report import print_figures
    from quickstep.model.checkpoint.placement import choose_device
    from quickstep.ops.tensors import torch_device

    options = StepOptions(
        args.batch, args.context, args.prefill, args.steps, args.repeats, args.seed, args.depth
    )
    if args.trace is not None and not args.profile:
        raise ConfigError("--trace is the trace of --profile; give both")
    if args.depth is not None and args.profile:
        raise ConfigError("--profile profiles one length; give --context without --depth")
    config = sized_for_steps(_config(args), options)
    limits: Limits | None = None
    if not args.profile and (device := choose_device(config.load.device)).type == "cuda":
        limits = gpu_limits(torch_device(device), config.load.dtype, args.probe_bytes)
    measured = _open(args, config)
    if args.profile:
        return _print_profile(args, measured, options)
    if limits is None:
        limits = open_limits(
            measured.model.device,
            measured.product_dtype,
            measured.num_threads,
            os.environ.get("QUICKSTEP_CPU_ISA"),
            args.probe_bytes or DEFAULT_PROBE_BYTES,
            time.perf_counter,
        )
    samples = _run_started(measured, lambda done: measure_steps(measured, limits, options, done))
    methods = {
        "read": limits.read_how,
        "peak": limits.multiply_how,
        "overhead": f"decode time outside {measured.kernel_how}",
    }
    if not measured.counts_kernels:
        methods["overhead"] = measured.kernel_how
    settings = {
        **_settings(measured, args),
        "batch": options.batch,
        "context": options.context,
        "prefill": options.prefill,
        "steps": options.steps,
        **({} if options.depth is None else {"depth": options.depth}),
    }
    found = figures(measured, options, samples)
    return print_figures(found, settings, args.json, methods, args.repeats)


def _print_profile(args: argparse.Namespace, measured: MeasuredEngine, options: StepOptions) -> int:
    from quickstep.bench.step_profile import profile_steps
    from quickstep.cli.bench_report import print_figures
    from quickstep.cli.screen import console_on, print_table

    found = _run_started(measured, lambda _: profile_steps(measured, options, args.trace))
    figures = {name: [value] for name, value in found.figures(options.num_outputs).items()}
    settings = {**_settings(measured, args), "batch": options.batch, "context": options.context}
    if args.json:
        kernels = [msgspec.structs.asdict(kernel) for kernel in found.kernels]
        print_figures(figures, {**settings, "kernels_run": kernels}, True)
        return 0
    print_figures(figures, settings, False)
    total_us = sum(kernel.total_us for kernel in found.kernels)
    rows = [
        (
            kernel.name[:80],
            str(kernel.num_runs),
            f"{kernel.total_us:.0f}",
            f"{kernel.total_us / total_us:.1%}",
        )
        for kernel in found.kernels[:_NUM_KERNELS]
    ]
    print_table(console_on(sys.stdout), "", ("kernel", "runs", "us", "share"), rows)
    return 0


def _run_latency(args: argparse.Namespace) -> int:
    require_torch("quickstep bench latency")
    from quickstep.bench.traffic import LatencyOptions, measure_latency, sized_for
    from quickstep.cli.bench_report import print_figures

    options = LatencyOptions(args.input_len, args.output_len, args.repeats, args.seed)
    longest = options.input_len + options.output_len
    try:
        measured = _open(args, sized_for(_config(args), longest))
    except ConfigError as error:  # it may name a length that is derived from the flags
        flags = f"--input-len {options.input_len}, --output-len {options.output_len}"
        raise ConfigError(f"{flags}: {error}") from None
    figures = _run_started(measured, lambda done: measure_latency(measured, options, done))
    lengths = {"input_len": options.input_len, "output_len": options.output_len}
    settings = {**_settings(measured, args), **lengths}
    return print_figures(figures, settings, args.json, {}, args.repeats)


def _run_throughput(args: argparse.Namespace) -> int:
    require_torch("quickstep bench throughput")
    from quickstep.bench.traffic import (
        ThroughputOptions,
        measure_throughput,
        random_lengths,
        sized_for,
    )
    from quickstep.cli.bench_report import print_figures

    options = ThroughputOptions(args.num_prompts, args.repeats, args.seed, args.max_len)
    lengths = random_lengths(options)
    longest = max(length.num_inputs + length.num_outputs for length in lengths)
    measured = _open(args, sized_for(_config(args), longest))
    figures = _run_started(measured, lambda done: measure_throughput(measured, options, done))
    settings = {
        **_settings(measured, args),
        "num_requests": len(lengths),
        "input_tokens": sum(length.num_inputs for length in lengths),
        "output_tokens": sum(length.num_outputs for length in lengths),
    }
    return print_figures(figures, settings, args.json, {}, args.repeats)


def _settings(measured: MeasuredEngine, args: argparse.Namespace) -> dict[str, object]:
    return {
        "model": measured.engine.model_name,
        "device": measured.model.device.type,
        "dtype": str(measured.dtype).removeprefix("torch."),
        "quantization": measured.quantization,
        "kv_cache_dtype": measured.kv_dtype,
        "kernels": measured.kernels,
        "threads": measured.num_threads,
        "repeats": args.repeats,
        "seed": args.seed,
    }


def _config(args: argparse.Namespace) -> EngineConfig:
    if args.shape and (args.model or args.model_flag):
        raise ConfigError("both a MODEL and --shape are given; give one")
    config = engine_config(args, model_of(args), args.seed)
    if config.speculation == SpeculationConfig():  # a step has one token per sequence
        config = replace(config, speculation=SpeculationConfig(proposers=()))
    if args.kv is not None:
        if config.cache.kv_dtype != "auto":
            raise ConfigError("--kv is short for --kv-cache-dtype; give one")
        config = replace(config, cache=replace(config.cache, kv_dtype=KV_FORMATS[args.kv]))
    if args.weights is None:
        return config
    if args.quantization is not None or config.load.dtype != "auto":
        raise ConfigError("--weights replaces --dtype and --quantization; leave them out")
    dtype, quantization = WEIGHT_FORMATS[args.weights]
    return replace(config, load=replace(config.load, dtype=dtype, quantization=quantization))


def _open(args: argparse.Namespace, config: EngineConfig) -> MeasuredEngine:
    from quickstep.bench.measured_engine import open_checkpoint, open_shape
    from quickstep.cli.screen import loading_bar

    with loading_bar(f"loading {args.shape or config.load.model}") as progress:
        if args.shape:
            return open_shape(config, args.shape, SHAPES[args.shape], args.seed, progress)
        return open_checkpoint(config, progress)


def _run_started(
    measured: MeasuredEngine, work: Callable[[RoundDone], Awaitable[_Result]]
) -> _Result:
    """Start the engine, measure with a progress bar, stop it; on the event loop of `serve`."""
    import uvloop

    from quickstep.cli.screen import counting_bar

    async def run() -> _Result:
        await measured.engine.start()
        try:
            with counting_bar() as show:
                if show is None:
                    return await work(lambda done, total: None)
                show("warming up", 0, 1)
                return await work(partial(show, "repeats"))
        finally:
            await measured.engine.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())
