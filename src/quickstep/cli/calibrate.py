"""`quickstep calibrate [MODEL]`: measure how long steps take on this machine, and store it.

Engines that are started later for the same model, format and threads begin with the stored fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from msgspec import to_builtins
from msgspec.structs import astuple

from quickstep.cli.flags.engine import add_engine_flags, add_model, engine_config, model_of
from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.screen import console_on, counting_bar, loading_bar, print_table
from quickstep.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from quickstep.config import EngineConfig
    from quickstep.engine.assembly import LoadedWeights
    from quickstep.engine.loaded_model import LoadedModel
    from quickstep.engine.ranks.processes import ModelProcesses
    from quickstep.engine.step_times.calibration import Calibration
    from quickstep.types import Grammar

# Each coefficient in words, the field of the load that it belongs to, and above which number.
_UNITS = (
    ("a step", "", 0),
    ("a token", "num_tokens", 0),
    ("a row", "num_rows", 0),
    ("a KV token that attention reads", "num_kv_tokens", 0),
    ("a pair of a token and a position", "num_pairs", 0),
    ("a scored position of a prompt", "num_scored", 0),
    ("a logits row (a sampled position)", "num_logits_rows", 0),
    ("a logits row under a grammar, in addition", "num_grammar_rows", 0),
    ("a logits row with log-probabilities, in addition", "num_logprobs_rows", 0),
    ("a row with an adapter, in addition", "num_adapter_rows", 0),
    ("a step with logits, in addition", "num_logits_rows", 0),
    ("a token beyond 32 in a step, in addition", "num_tokens", 32),
    ("a token beyond 256 in a step, in addition", "num_tokens", 256),
)
_OVERHEAD_PART = 0.25  # of the time, for the engine's own time between steps
_ENDLESS = "[a-zA-Z0-9 .,]{1000}"
_COST_COLUMNS = ("unit", "microseconds", "least in a step", "most in a step")
_ERROR_COLUMNS = ("phase", "held-out steps", "extrapolated", "mean error", "median", "p95")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "calibrate",
        "Measure how long steps of a model take on this machine, and store it for the engine.",
        run,
    )
    add_model(parser)
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default="20",
        help="how long to measure, after the model is loaded (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_engine_flags(parser)


def _seconds(text: str) -> float:
    """Parse a positive number of seconds, at most an hour."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 3600.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 3600")
    return value


def run(args: argparse.Namespace) -> int:
    """Measure, store and print."""
    config = engine_config(args, model_of(args))
    name, calibration, path = _calibrated(config, args.seconds)
    if args.json:
        content = {"model": name, "file": str(path or ""), **to_builtins(calibration)}
        json.dump(content, sys.stdout)
        print()
    else:
        _print(name, calibration, path)
    return 0


def _calibrated(config: EngineConfig, seconds: float) -> tuple[str, Calibration, Path | None]:
    """Load the model, measure, store; returns its name, the result, and the file."""
    import asyncio
    import time

    from msgspec.structs import replace

    from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
    from quickstep.engine.assembly import (
        describe,
        fit_file,
        load_weights,
        model_processes,
        open_executor,
        wire_engine,
    )
    from quickstep.engine.step_times.calibration import StepLimits, calibrate, write_kv
    from quickstep.engine.step_times.cost_fits import FitSource
    from quickstep.engine.step_times.overhead import measure_overhead
    from quickstep.runtime.cache.kv_cache import allocate_kv

    def load() -> tuple[LoadedWeights, ModelProcesses | None]:
        processes = model_processes(config)
        try:
            with loading_bar(f"loading {config.load.model}") as progress:
                loaded = load_weights(config, progress, processes=processes)
            if processes is not None:
                processes.wait_opened(loaded.model.fingerprint)
        except BaseException:
            if processes is not None:
                processes.close()
            raise
        return loaded, processes

    loaded, processes = load()
    model, plan = loaded.model, loaded.plan
    block_size = config.cache.block_size
    kv = allocate_kv(loaded.kv_layout, plan.num_blocks, block_size, model.device, plan.states)
    description = describe(loaded, 0.0, config.inputs, with_template=False)
    grammar = _compiled_grammar(description)
    limits = StepLimits(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=block_size,
        num_blocks=write_kv(kv),
        vocab_size=model.vocab_size,
        grammar=grammar,
        eos_token_ids=description.tokenizer.eos_token_ids,
        has_states=plan.states.num_slots > 0,
    )
    executor = open_executor(config, model, kv, plan, description, processes=processes)
    part_s = (1.0 - _OVERHEAD_PART) * seconds
    with counting_bar() as show:

        def elapsed(done_s: float) -> None:
            if show is not None:
                show("seconds of steps", round(done_s), round(part_s))

        try:
            start = Coefficients.of_vocabulary(model.vocab_size)
            clock = time.perf_counter
            calibration = calibrate(executor, limits, start, part_s, clock, elapsed=elapsed)
        finally:
            executor.close()
    step_s = LinearCostModel.of_fit(calibration.fit).seconds(StepLoad.of_span(0, 1, 0, 1))
    if processes is not None:  # they have ended with the executor
        del executor, kv, model, loaded  # the plan for the others is of free memory
        loaded, processes = load()
        model, plan = loaded.model, loaded.plan
        kv = allocate_kv(loaded.kv_layout, plan.num_blocks, block_size, model.device, plan.states)
    engine = wire_engine(config, model, kv, plan, description, processes=processes)
    measuring = measure_overhead(
        engine,
        plan.max_num_seqs,
        model.vocab_size,
        step_s,
        _OVERHEAD_PART * seconds,
        time.perf_counter,
    )
    overhead, stages = asyncio.run(measuring), calibration.stages
    if stages is not None:
        hops_s = (stages.num_stages - 1) * stages.hop_s
        stages = replace(stages, overhead_s=max(0.0, overhead.step_s - hops_s))
    calibration = replace(calibration, overhead=overhead, stages=stages)
    file = fit_file(config, model, description)
    if file is not None:
        path = str(loaded.checkpoint.path.resolve())
        source = FitSource(path, config.load.quantization, config.cache.kv_dtype)
        try:
            file.write(calibration.fit, calibration.overhead, source, calibration.stages)
        except OSError as error:
            raise ConfigError(f"the fit cannot be stored: {error}") from None
    return description.name, calibration, None if file is None else file.path


def _compiled_grammar(description: LoadedModel) -> Grammar | None:
    """A grammar that no few tokens complete; None if the model takes none."""
    from quickstep.types import Grammar

    if description.grammars is None:
        return None
    grammar = Grammar("regex", _ENDLESS)
    try:
        description.grammars.compile(grammar)
    except RequestError:
        return None
    return grammar


def _print(name: str, calibration: Calibration, path: Path | None) -> None:
    console = console_on(sys.stdout)
    fit = calibration.fit
    costs = astuple(fit.coefficients)
    rows = []
    for (unit, field, above), cost in zip(_UNITS, costs, strict=True):
        bounds = [str(getattr(load, field)) if field else "" for load in (fit.lowest, fit.highest)]
        is_measured = not field or getattr(fit.highest, field) > above
        rows.append((unit, f"{1e6 * cost:,.3f}" if is_measured else "not measured", *bounds))
    print_table(console, f"{name}: the cost of a step, {fit.num_steps} steps", _COST_COLUMNS, rows)
    errors = [
        (
            error.kind.value,
            str(error.num_steps),
            str(error.num_extrapolated),
            f"{error.mean:.1%}",
            f"{error.median:.1%}",
            f"{error.p95:.1%}",
        )
        for error in calibration.errors
    ]
    print_table(console, "errors of predictions", _ERROR_COLUMNS, errors)
    if calibration.num_slow:
        num_steps = fit.num_steps + calibration.num_slow
        console.print(
            f"{calibration.num_slow} of {num_steps} steps took far longer than such steps do, "
            "perhaps because of other processes; the fit leaves them out, the errors do not.",
            soft_wrap=True,
        )
    if calibration.noise is not None:
        console.print(
            "Decode steps with the same rows, one after the other, differ so much that the least "
            f"mean error on this machine is {calibration.noise:.1%}.",
            soft_wrap=True,
        )
    stages = calibration.stages
    if stages is not None:
        parts = ", ".join(f"{part:.0%}" for part in stages.parts)
        console.print(
            f"The stages compute {parts} of a step; {1e6 * stages.hop_s:.0f} microseconds pass "
            f"between two of them. The units above are of the mean stage.",
            soft_wrap=True,
        )
    if calibration.overhead is not None:
        console.print(
            f"The engine itself takes {1e6 * calibration.overhead.step_s:.0f} microseconds between "
            f"two steps, and {1e6 * calibration.overhead.row_s:.1f} for each row.",
            soft_wrap=True,
        )
    console.print(
        "not stored: QUICKSTEP_CACHE_DIR is empty" if path is None else f"stored in {path}",
        soft_wrap=True,
    )
