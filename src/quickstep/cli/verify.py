"""`quickstep verify [MODEL]`: check that a request gives the same bits in any batch.

Runs random requests at batch size 1 and in random batches (`verify.checker`) and prints the number
of comparisons and mismatches; `--formats` does so for several formats of weights and KV cache, one
table row each. Exit codes: 0 no mismatch, 1 a mismatch, 2 invalid input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from quickstep.cli import INTERRUPTED
from quickstep.cli.flags.engine import add_model, model_of
from quickstep.cli.flags.options import add_options
from quickstep.cli.flags.parsing import (
    Parser,
    command,
    non_negative_int,
    positive_int,
    positive_number,
)
from quickstep.cli.flags.quantization import KV_FORMATS, WEIGHT_FORMATS, FormatPair, format_pairs
from quickstep.cli.screen import console_on, counting_bar, print_table
from quickstep.config import KERNELS, QUANTIZATIONS, CacheConfig
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quickstep.config import LoadConfig, SpeculationConfig
    from quickstep.engine.ranks.processes import ModelProcesses
    from quickstep.model.interface import Model
    from quickstep.model.sizing import MemoryPlan
    from quickstep.runtime.sampling.grammar import ClosingStart
    from quickstep.runtime.speculation.proposer import Proposer
    from quickstep.runtime.steps.pipeline import StageLinks
    from quickstep.text.grammar.grammars import GrammarCompiler
    from quickstep.types import Grammar
    from quickstep.verify.checker import AfterGroup
    from quickstep.verify.report import Mismatch, Setup, VerifyOptions, VerifyReport

_SCENARIO_COLUMNS = (
    "scenario",
    "compared",
    "differ",
    "steps",
    "chunks",
    "hits",
    "preempt",
    "abort",
    "pause",
    "overlap",
    "drafts",
    "loads",
)
_FORMAT_COLUMNS = ("weights", "KV", "compared", "differ", "fingerprint")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "verify",
        "Check that a request gives the same bits at batch size 1 and in any batch.",
        run,
    )
    add_model(parser)
    parser.add_argument(
        "--requests",
        type=positive_int,
        default=200,
        metavar="N",
        help="random requests (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=1,
        metavar="N",
        help="batches that each request takes part in, per thread count (default: %(default)s)",
    )
    parser.add_argument(
        "--adapters",
        type=non_negative_int,
        default=40,
        metavar="N",
        help="random LoRA adapters that half of the requests use, on native models "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--speculative-model",
        nargs="+",
        metavar="MODEL",
        help="draft models, EAGLE layers or Medusa heads that draft in a part of the batches, each "
        "by itself and all together, with the prediction layer of the checkpoint if there is one "
        "(default: those of the bundled model, for the bundled model)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the random requests and batches (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=_thread_counts,
        default=(1, 2),
        metavar="N[,N...]",
        help="CPU thread counts to compare (default: 1,2)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=positive_int,
        default=1,
        metavar="N",
        help="also compare N processes that compute every step together with the most threads "
        "(default: do not)",
    )
    parser.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        type=positive_int,
        default=1,
        metavar="N",
        help="also compare a pipeline of N stages, which have some of the layers each, with the "
        "most threads (default: do not)",
    )
    parser.add_argument(
        "--against",
        type=positive_int,
        metavar="N",
        help="compare these processes with N that compute every step together, instead of with one "
        "process of each of --threads (default: the latter)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "bfloat16", "float16", "float32"],
        default="auto",
        help="dtype of weights and activations (default: the checkpoint's)",
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="quantize the weights while loading (default: do not)",
    )
    add_options(parser, CacheConfig, "kv_dtype")
    parser.add_argument(
        "--formats",
        type=format_pairs,
        metavar="all|WEIGHTS[/KV][,...]",
        help="verify each of these pairs of formats; without /KV, every KV format; weights: "
        f"{', '.join(WEIGHT_FORMATS)}; KV: {', '.join(KV_FORMATS)}",
    )
    parser.add_argument(
        "--device", metavar="DEVICE", default="auto", help="auto, cpu, cuda, or cuda:N"
    )
    parser.add_argument(
        "--kernels", choices=KERNELS, default="auto", help="as of `serve` (default: auto)"
    )
    parser.add_argument(
        "--block-size",
        type=positive_int,
        default=CacheConfig().block_size,
        metavar="TOKENS",
        help="tokens per KV block (default: %(default)s)",
    )
    parser.add_argument("--revision", help="hub revision (default: the default branch)")
    parser.add_argument("--offline", action="store_true", help="never use the network")
    parser.add_argument(
        "--fail-fast", action="store_true", help="stop after the batch with the first mismatch"
    )
    parser.add_argument(
        "--seconds",
        type=positive_number,
        metavar="N",
        help="end after the batch that is running then, with what has been compared (of --formats: "
        "for each pair)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--json-lines",
        action="store_true",
        help="as --json, with a line for each batch before it: all comparisons so far",
    )


def _thread_counts(text: str) -> tuple[int, ...]:
    """Parse `1,2`; repeated counts are dropped."""
    return tuple(dict.fromkeys(positive_int(part) for part in text.split(",")))


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises ConfigError for invalid input."""
    from quickstep.config import CacheConfig, LoadConfig
    from quickstep.verify.report import VerifyOptions

    options = VerifyOptions(
        num_requests=args.requests,
        seed=args.seed,
        threads=args.threads,
        rounds=args.rounds,
        block_size=CacheConfig(block_size=args.block_size).block_size,
        kv_dtype=args.kv_cache_dtype,
        num_adapters=args.adapters,
        fail_fast=args.fail_fast,
        num_ranks=args.tensor_parallel_size,
        num_stages=args.pipeline_parallel_size,
        against=args.against,
    )
    load = LoadConfig(
        model=model_of(args),
        revision=args.revision,
        dtype=args.dtype,
        quantization=args.quantization,
        device=args.device,
        kernels=args.kernels,
        offline=args.offline,
    )
    if args.formats is not None:
        return _run_formats(args, load, options)
    checkpoint = _Checkpoint(load, options, args.speculative_model)
    report, is_complete = _verified(checkpoint, options, None, _after_group(args))
    if args.json or args.json_lines:
        facts = {"model": checkpoint.name, "fingerprint": checkpoint.fingerprint}
        json.dump({**facts, **report.to_json()}, sys.stdout)
        print()
    else:
        _print_scenarios(checkpoint.name, report)
    return _exit_code([report], is_complete)


def _run_formats(args: argparse.Namespace, load: LoadConfig, options: VerifyOptions) -> int:
    """Verify each pair of `--formats` and print all results."""
    from quickstep.model.checkpoint.source import find_checkpoint

    if (args.dtype, args.quantization, args.kv_cache_dtype) != ("auto", None, "auto"):
        raise ConfigError(
            "--formats replaces --dtype, --quantization and --kv-cache-dtype; leave them out"
        )
    name = find_checkpoint(load).name
    results: list[_FormatResult] = []
    is_complete = True
    for pair in args.formats:
        try:
            result, is_complete = _verify_pair(pair, load, options, args)
        except KeyboardInterrupt:
            if not results:
                raise
            is_complete = False
        else:
            results.append(result)
        if not is_complete:
            break
    if args.json or args.json_lines:
        json.dump({"model": name, "formats": [result.to_json() for result in results]}, sys.stdout)
        print()
    else:
        _print_formats(name, results)
    return _exit_code([result.report for result in results], is_complete)


def _exit_code(reports: Sequence[VerifyReport], is_complete: bool) -> int:
    """1 for a mismatch, also in what Ctrl-C has left."""
    if not is_complete:
        print("interrupted: this is what was compared until then", file=sys.stderr)
    if any(report.mismatches for report in reports):
        return 1
    return 0 if is_complete else INTERRUPTED


class _FormatResult(NamedTuple):
    """The verification of one pair of formats."""

    pair: FormatPair
    fingerprint: str
    report: VerifyReport

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "weights": self.pair.weights,
            "kv": self.pair.kv,
            "fingerprint": self.fingerprint,
            **self.report.to_json(),
        }


def _after_group(args: argparse.Namespace) -> AfterGroup:
    """Print the counts if they are wanted, and end when the time is over."""
    end_s = None if args.seconds is None else time.monotonic() + args.seconds

    def after_group(scenario: str, report: VerifyReport) -> bool:
        if args.json_lines:
            counts = {"comparisons": report.comparisons, "mismatches": report.mismatches}
            print(json.dumps({"scenario": scenario, **counts}), flush=True)
        return end_s is None or time.monotonic() < end_s

    return after_group


def _verify_pair(
    pair: FormatPair, load: LoadConfig, options: VerifyOptions, args: argparse.Namespace
) -> tuple[_FormatResult, bool]:
    """The result, and whether it is complete."""
    weights = WEIGHT_FORMATS[pair.weights]
    load = replace(load, dtype=weights.dtype, quantization=weights.quantization)
    options = replace(options, kv_dtype=KV_FORMATS[pair.kv])
    checkpoint = _Checkpoint(load, options, args.speculative_model)
    report, is_complete = _verified(checkpoint, options, pair, _after_group(args))
    return _FormatResult(pair, checkpoint.fingerprint, report), is_complete


def _verified(
    checkpoint: _Checkpoint,
    options: VerifyOptions,
    pair: FormatPair | None,
    after_group: AfterGroup,
) -> tuple[VerifyReport, bool]:
    """The report, and whether it is complete: Ctrl-C leaves that of the groups before it."""
    from quickstep.verify.checker import verify

    latest: VerifyReport | None = None

    def noted(scenario: str, report: VerifyReport) -> bool:
        nonlocal latest
        latest = report
        return after_group(scenario, report)

    with counting_bar("" if pair is None else f"{pair.weights}/{pair.kv} ") as progress:
        eos_token_ids = checkpoint.tokenizer.eos_token_ids
        try:
            report = verify(
                checkpoint.load_model,
                options,
                eos_token_ids,
                progress,
                checkpoint.new_matcher if eos_token_ids else None,
                checkpoint.tokenizer,
                checkpoint.open_proposers,
                noted,
                load_divided=checkpoint.load_divided,
            )
        except KeyboardInterrupt:
            if latest is None:
                raise
            return latest, False
        finally:
            checkpoint.close()
    return report, True


class _Checkpoint:
    """The checkpoint to verify; its model can be loaded for any number of threads.

    `draft_models` draft for it; None for those that are bundled with it.

    Attributes:
        fingerprint: Of the model that was loaded last; empty before.
    """

    def __init__(
        self, config: LoadConfig, options: VerifyOptions, draft_models: list[str] | None
    ) -> None:
        from quickstep.model.checkpoint.source import bundled_drafts, find_checkpoint
        from quickstep.text.tokenizer import Tokenizer

        self._config = config
        self._options = options
        self._draft_models = bundled_drafts(config.model) if draft_models is None else draft_models
        self._isa = os.environ.get("QUICKSTEP_CPU_ISA")
        self._checkpoint = find_checkpoint(self._config)
        self._grammars: GrammarCompiler | None = None
        self._processes: ModelProcesses | None = None
        self.name = self._checkpoint.name
        self.tokenizer = Tokenizer.open(self._checkpoint.path)
        self.fingerprint = ""

    def load_model(self, threads: int) -> Model:
        """Load it in one process, in the way that `serve` does."""
        from quickstep.model.checkpoint.fingerprint import fingerprint_with_kv
        from quickstep.model.checkpoint.placement import choose_device
        from quickstep.model.loader import load_model, reason_for_torch
        from quickstep.model.spec import read_spec
        from quickstep.ops.resolve import resolve_ops
        from quickstep.text.grammar.grammars import GrammarCompiler

        self.close()
        device = choose_device(self._config.device)
        ops = resolve_ops(device, self._config.kernels, threads, self._isa)
        spec = read_spec(self._checkpoint.path)
        on_host = spec.native and not reason_for_torch(ops, self._config, self._options.kv_dtype)
        model = load_model(self._checkpoint, spec, ops, self._config, on_host=on_host)
        kv_layout = model.kv_layout.stored_as(self._options.kv_dtype)
        self.fingerprint = fingerprint_with_kv(model, kv_layout)
        self._grammars = GrammarCompiler(self.tokenizer, model.vocab_size)
        return model

    def load_divided(self, setup: Setup, plan: MemoryPlan) -> tuple[Model, StageLinks | None]:
        """Load it in several processes, and return our part. Raises ConfigError."""
        from quickstep.config import CacheConfig, EngineConfig, LoRAConfig
        from quickstep.engine.assembly import load_with_processes
        from quickstep.engine.ranks.processes import ModelProcesses

        self.close()
        options = self._options
        config = EngineConfig(
            load=replace(
                self._config,
                num_threads=setup.threads,
                tensor_parallel_size=setup.ranks,
                pipeline_parallel_size=setup.stages,
            ),
            cache=CacheConfig(block_size=options.block_size, kv_dtype=options.kv_dtype),
            lora=LoRAConfig() if options.num_adapters else None,
            speculation=self._speculation(),
        )
        self._processes = ModelProcesses(config.load)
        return load_with_processes(config, plan, self._processes), self._processes.links

    def close(self) -> None:
        """End the processes of `load_divided`. Idempotent."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def open_proposers(self, model: Model, plan: MemoryPlan) -> dict[str, Proposer]:
        """What drafts for the model that was loaded last. Raises ConfigError."""
        from quickstep.config import CacheConfig, EngineConfig
        from quickstep.engine.speculation import open_model_proposers

        config = EngineConfig(
            load=self._config,
            cache=CacheConfig(block_size=self._options.block_size),
            speculation=self._speculation(),
        )
        opened = open_model_proposers(config, model, plan, self._checkpoint.path)
        return {proposer.name: proposer for proposer in opened}

    def _speculation(self) -> SpeculationConfig:
        from quickstep.config import ProposerConfig, SpeculationConfig, SpeculationMethod
        from quickstep.model.mtp import has_prediction_layer
        from quickstep.model.spec import read_spec

        path = self._checkpoint.path
        methods = [SpeculationMethod.MTP] if has_prediction_layer(path, read_spec(path)) else []
        own = [ProposerConfig(method) for method in methods]
        return SpeculationConfig(
            (*own, *(ProposerConfig(model=name) for name in self._draft_models))
        )

    def new_matcher(self, grammar: Grammar) -> tuple[LLMatcher, ClosingStart]:
        """Compile a grammar for the model that was loaded last; compiling may block here."""
        assert self._grammars is not None, "requests are made after loading"
        self._grammars.compile(grammar)
        return self._grammars.new_matcher(grammar)


def _print_scenarios(model_name: str, report: VerifyReport) -> None:
    """Print one verification: a row per scenario; `hits` counts tokens from the prefix cache,
    `drafts` those that were accepted.
    """
    console = console_on(sys.stdout)
    rows = []
    for scenario, counts in report.scenarios.items():
        runs = counts.runs
        figures = (
            counts.comparisons,
            counts.mismatches,
            runs.steps,
            runs.chunked_rows,
            runs.prefix_hit_tokens,
            runs.preemptions,
            runs.aborts,
            runs.pauses,
            runs.overlapped_steps,
            runs.accepted_drafts,
            runs.adapter_loads,
        )
        rows.append((scenario, *(str(figure) for figure in figures)))
    options = report.options
    title = f"{model_name}: {options.num_requests} requests, at batch size 1 and in batches"
    print_table(console, title, _SCENARIO_COLUMNS, rows, is_dense=True)
    if report.first_mismatch is not None:
        console.print(_mismatch_text(report.first_mismatch), style="red")
    threads = ",".join(map(str, options.setups))
    console.print(
        f"{report.comparisons} comparisons, {report.mismatches} mismatches"
        f" (seed {options.seed}, threads {threads})",
        style="red" if report.mismatches else "green",
    )


def _print_formats(model_name: str, results: Sequence[_FormatResult]) -> None:
    """Print a row per pair, and the first mismatch."""
    console = console_on(sys.stdout)
    options = results[0].report.options
    rows = [
        (
            result.pair.weights,
            result.pair.kv,
            str(result.report.comparisons),
            str(result.report.mismatches),
            result.fingerprint,
        )
        for result in results
    ]
    title = (
        f"{model_name}: {options.num_requests} requests per format, at batch size 1 and in batches"
    )
    print_table(console, title, _FORMAT_COLUMNS, rows)
    for result in results:
        if result.report.first_mismatch is not None:
            name = f"{result.pair.weights} over {result.pair.kv} KV"
            console.print(f"{name}: {_mismatch_text(result.report.first_mismatch)}", style="red")
            break
    mismatches = sum(result.report.mismatches for result in results)
    comparisons = sum(result.report.comparisons for result in results)
    threads = ",".join(map(str, options.setups))
    console.print(
        f"{len(results)} formats, {comparisons} comparisons, {mismatches} mismatches"
        f" (seed {options.seed}, threads {threads})",
        style="red" if mismatches else "green",
    )


def _mismatch_text(mismatch: Mismatch) -> str:
    """Where the outputs of two runs differ, in several lines."""
    from quickstep.verify.report import Setup

    setup = Setup(mismatch.threads, mismatch.ranks, mismatch.stages)
    return (
        f"first mismatch: {mismatch.sequence_id}, output {mismatch.position}, "
        f"in {mismatch.scenario!r} at {setup} threads\n"
        f"  token     {mismatch.expected_token} at batch size 1, {mismatch.got_token} here\n"
        f"  logprobs  {mismatch.expected_logprobs} at batch size 1\n"
        f"            {mismatch.got_logprobs} here\n"
        f"  {mismatch.detail}"
    )
