"""`quickstep verify [MODEL]`: same request, same bits, measured.

Runs random requests alone and inside random batches (`engine.verification`) and prints how many
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

from quickstep.cli.engine_flags import add_kv_cache_dtype
from quickstep.cli.parsing import Parser, command, positive_int
from quickstep.cli.screen import console_on, print_table
from quickstep.config import QUANTIZATIONS

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quickstep.engine.grammars import GrammarCompiler
    from quickstep.engine.verification import Progress
    from quickstep.engine.verification_report import Mismatch, VerifyReport
    from quickstep.model.interface import Model
    from quickstep.runtime.closing import ClosingVocabulary
    from quickstep.types import Grammar

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
    from quickstep.config import CacheConfig
    from quickstep.engine.verification import VerifyOptions, verify

    options = VerifyOptions(
        num_requests=args.requests,
        seed=args.seed,
        threads=args.threads,
        rounds=args.rounds,
        block_size=CacheConfig(block_size=args.block_size).block_size,
        kv_dtype=args.kv_cache_dtype,
    )
    subject = _Subject(args)
    with _progress_bar() as progress:
        new_matcher = subject.new_matcher if subject.eos_token_ids else None
        report = verify(subject.load, options, subject.eos_token_ids, progress, new_matcher)
    if args.json:
        facts = {"model": subject.checkpoint.name, "fingerprint": subject.fingerprint}
        json.dump({**facts, **report.to_json()}, sys.stdout)
        print()
    else:
        _print_report(report, subject.checkpoint.name)
    return 1 if report.mismatches else 0


class _Subject:
    """The checkpoint to verify, which loads on any number of threads."""

    def __init__(self, args: argparse.Namespace) -> None:
        from quickstep.config import LoadConfig
        from quickstep.engine.tokenizer import Tokenizer
        from quickstep.model.source import find_checkpoint

        self._config = LoadConfig(
            model=args.model,
            revision=args.revision,
            dtype=args.dtype,
            quantization=args.quantization,
            device=args.device,
            offline=args.offline,
        )
        self._kv_dtype: str = args.kv_cache_dtype
        self._isa = os.environ.get("QUICKSTEP_CPU_ISA")
        self.checkpoint = find_checkpoint(self._config)
        self._tokenizer = Tokenizer.open(self.checkpoint.path)
        self._grammars: GrammarCompiler | None = None
        self.eos_token_ids = self._tokenizer.eos_token_ids
        self.fingerprint = ""

    def load(self, threads: int) -> Model:
        from quickstep.engine.grammars import GrammarCompiler
        from quickstep.model.fingerprint import fingerprint_with_kv
        from quickstep.model.loader import load_model, resolve_device
        from quickstep.model.spec import read_spec
        from quickstep.ops.resolve import resolve_ops

        ops = resolve_ops(resolve_device(self._config.device), "auto", threads, self._isa)
        spec = read_spec(self.checkpoint.path)
        model = load_model(self.checkpoint, spec, ops, self._config, None)
        kv_shape = model.kv_shape.stored_as(self._kv_dtype)
        self.fingerprint = fingerprint_with_kv(model, kv_shape)
        self._grammars = GrammarCompiler(self._tokenizer, model.vocab_size)
        return model

    def new_matcher(self, grammar: Grammar) -> tuple[LLMatcher, ClosingVocabulary]:
        """Of the model that was loaded last."""
        assert self._grammars is not None, "requests follow the loading"
        return self._grammars.new_matcher(grammar)


@contextmanager
def _progress_bar() -> Iterator[Progress | None]:
    """A bar on a terminal, nothing elsewhere."""
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
            bar.update(task, description=what, completed=done, total=total)

        yield show


_HEADER = (
    "scenario",
    "compared",
    "differ",
    "steps",
    "chunks",
    "hits",
    "preempted",
    "aborted",
    "paused",
    "overlap",
)


def _print_report(report: VerifyReport, name: str) -> None:
    """The table: what was compared, and what the runs went through; hits are cached tokens."""
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
        )
        rows.append((scenario, *(str(figure) for figure in figures)))
    options = report.options
    title = f"{name}: {options.num_requests} requests, alone and in batches"
    print_table(console, title, _HEADER, rows)
    if report.first_mismatch is not None:
        console.print(_first_mismatch(report.first_mismatch), style="red")
    threads = ",".join(str(count) for count in options.threads)
    console.print(
        f"{report.comparisons} comparisons, {report.mismatches} mismatches"
        f" (seed {options.seed}, threads {threads})",
        style="red" if report.mismatches else "green",
    )


def _first_mismatch(found: Mismatch) -> str:
    return (
        f"first mismatch: {found.sequence_id}, output {found.position}, "
        f"in {found.scenario!r} at {found.threads} threads\n"
        f"  token     {found.expected_token} alone, {found.got_token} here\n"
        f"  logprobs  {found.expected_logprobs} alone\n"
        f"            {found.got_logprobs} here\n"
        f"  {found.detail}"
    )
