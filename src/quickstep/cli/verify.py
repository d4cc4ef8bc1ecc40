"""`quickstep verify [MODEL]`: same request, same bits, measured.

Runs random requests alone and inside random batches (`verify.checker`) and prints how many
comparisons and mismatches there were. Exit codes: 0 all equal, 1 something differed, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quickstep.cli.flags.engine import add_kv_cache_dtype
from quickstep.cli.flags.parsing import Parser, command, positive_int
from quickstep.cli.flags.quantization import KV_FORMATS, WEIGHT_FORMATS, FormatPair, format_pairs
from quickstep.cli.screen import console_on
from quickstep.config import QUANTIZATIONS
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quickstep.config import LoadConfig
    from quickstep.engine.grammar.grammars import GrammarCompiler
    from quickstep.model.interface import Model
    from quickstep.runtime.sampling.grammar import ClosingStart
    from quickstep.types import Grammar
    from quickstep.verify.checker import Progress, VerifyOptions
    from quickstep.verify.report import VerifyReport

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "verify",
        "Check that requests give the same bits alone and in any batch.",
        run,
    )
    parser.add_argument(
        "model", nargs="?", default="demo", help="directory, hub id or demo (default: demo)"
    )
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
        "--seed", type=int, default=0, help="draws the requests and batches (default: 0)"
    )
    parser.add_argument(
        "--threads",
        type=_thread_counts,
        default=(1, 2),
        metavar="N[,N...]",
        help="CPU thread counts to compare (default: 1,2)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "bfloat16", "float16", "float32"],
        default="auto",
        help="weights and activations (default: the checkpoint's)",
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="round the matrices as they are loaded (default: do not)",
    )
    add_kv_cache_dtype(parser)
    parser.add_argument(
        "--formats",
        type=format_pairs,
        metavar="all|WEIGHTS[/KV][,...]",
        help="verify once for each pair of formats; WEIGHTS alone takes every KV format; weights: "
        f"{', '.join(WEIGHT_FORMATS)}; KV: {', '.join(KV_FORMATS)}",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--block-size", type=positive_int, default=16, metavar="TOKENS")
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument("--offline", action="store_true", help="never touch the network")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")


def _thread_counts(text: str) -> tuple[int, ...]:
    """`1,2`: the counts, each once, in order."""
    return tuple(dict.fromkeys(positive_int(part) for part in text.split(",")))


def run(args: argparse.Namespace) -> int:
    """Load, verify, print. Returns the exit code; raises ConfigError for bad input."""
    from quickstep.config import CacheConfig, LoadConfig
    from quickstep.verify.checker import VerifyOptions

    options = VerifyOptions(
        num_requests=args.requests,
        seed=args.seed,
        threads=args.threads,
        rounds=args.rounds,
        block_size=CacheConfig(block_size=args.block_size).block_size,
        kv_dtype=args.kv_cache_dtype,
    )
    load = LoadConfig(
        model=args.model,
        revision=args.revision,
        dtype=args.dtype,
        quantization=args.quantization,
        device=args.device,
        offline=args.offline,
    )
    if args.formats is not None:
        return _run_formats(args, load, options)
    from quickstep.cli.verify_report import print_verify_report

    subject = _Subject(load, options.kv_dtype)
    report = _verified(subject, options, None)
    if args.json:
        facts = {"model": subject.checkpoint.name, "fingerprint": subject.fingerprint}
        json.dump({**facts, **report.to_json()}, sys.stdout)
        print()
    else:
        print_verify_report(report, subject.checkpoint.name)
    return 1 if report.mismatches else 0


def _run_formats(args: argparse.Namespace, load: LoadConfig, options: VerifyOptions) -> int:
    """Verify each pair of --formats."""
    from quickstep.cli.verify_formats import FormatResult, verify_formats
    from quickstep.model.checkpoint.source import find_checkpoint

    if (args.dtype, args.quantization, args.kv_cache_dtype) != ("auto", None, "auto"):
        raise ConfigError(
            "--formats says what --dtype, --quantization and --kv-cache-dtype say; give it alone"
        )

    def verify_pair(pair: FormatPair) -> FormatResult:
        weights = WEIGHT_FORMATS[pair.weights]
        kv_dtype = KV_FORMATS[pair.kv]
        subject = _Subject(
            replace(load, dtype=weights.dtype, quantization=weights.quantization), kv_dtype
        )
        report = _verified(subject, replace(options, kv_dtype=kv_dtype), pair)
        return FormatResult(pair, subject.fingerprint, report)

    return verify_formats(find_checkpoint(load).name, args.formats, verify_pair, args.json)


def _verified(subject: _Subject, options: VerifyOptions, pair: FormatPair | None) -> VerifyReport:
    from quickstep.verify.checker import verify

    with _progress_bar("" if pair is None else f"{pair.weights}/{pair.kv} ") as progress:
        new_matcher = subject.new_matcher if subject.eos_token_ids else None
        return verify(
            subject.load, options, subject.eos_token_ids, progress, new_matcher, subject.tokenizer
        )


class _Subject:
    """The checkpoint to verify, which loads on any number of threads."""

    def __init__(self, config: LoadConfig, kv_dtype: str) -> None:
        from quickstep.engine.text.tokenizer import Tokenizer
        from quickstep.model.checkpoint.source import find_checkpoint

        self._config = config
        self._kv_dtype = kv_dtype
        self._isa = os.environ.get("QUICKSTEP_CPU_ISA")
        self.checkpoint = find_checkpoint(self._config)
        self.tokenizer = Tokenizer.open(self.checkpoint.path)
        self._grammars: GrammarCompiler | None = None
        self.eos_token_ids = self.tokenizer.eos_token_ids
        self.fingerprint = ""

    def load(self, threads: int) -> Model:
        from quickstep.engine.grammar.grammars import GrammarCompiler
        from quickstep.model.checkpoint.fingerprint import fingerprint_with_kv
        from quickstep.model.checkpoint.placement import choose_device
        from quickstep.model.checkpoint.weights import open_weights
        from quickstep.model.loader import load_model, reason_for_torch
        from quickstep.model.spec import read_spec
        from quickstep.ops.resolve import resolve_ops

        ops = resolve_ops(choose_device(self._config.device), "auto", threads, self._isa)
        spec = read_spec(self.checkpoint.path)
        on_host = spec.native and not reason_for_torch(
            open_weights(self.checkpoint.path, spec), ops, self._config
        )  # as it is served
        model = load_model(self.checkpoint, spec, ops, self._config, on_host=on_host)
        kv_shape = model.kv_shape.stored_as(self._kv_dtype)
        self.fingerprint = fingerprint_with_kv(model, kv_shape)
        self._grammars = GrammarCompiler(self.tokenizer, model.vocab_size)
        return model

    def new_matcher(self, grammar: Grammar) -> tuple[LLMatcher, ClosingStart]:
        """Of the model that was loaded last; here nobody waits for a step."""
        assert self._grammars is not None, "requests follow the loading"
        self._grammars.compile(grammar)
        return self._grammars.new_matcher(grammar)


@contextmanager
def _progress_bar(prefix: str) -> Iterator[Progress | None]:
    """A bar on a terminal, its texts behind `prefix`; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    text = TextColumn("{task.description:<32}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console_on(), transient=True) as bar:
        task = bar.add_task("alone", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=prefix + what, completed=done, total=total)

        yield show
