"""`quickstep demo` (and `make demo`): the bundled model completes code, answers a question, and
the run's phases stand in a table. The figures are the engine's own, from its step log.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quickstep.cli.engine_flags import add_engine_flags, engine_config
from quickstep.cli.parsing import Parser, command
from quickstep.types import SamplingParams

if TYPE_CHECKING:
    from quickstep.cli.answers import Answer
    from quickstep.engine.engine import Engine

__all__ = ["add_parser", "run"]

_CODE = "def fibonacci(n):\n"
_QUESTION = "What does itertools.chain do?"
_HEADER = (
    *("request", "prompt tokens", "cached", "queue ms", "prefill ms", "TTFT ms", "TPOT ms"),
    *("tokens", "tokens/s", "KV blocks", "finish"),
)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers, "demo", "Stream a completion and an answer from the bundled model.", run
    )
    parser.add_argument("--model", default="demo", help=argparse.SUPPRESS)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Stream, then print the table."""
    from quickstep.cli.screen import console_on, print_table
    from quickstep.cli.session import with_engine

    console = console_on(sys.stdout)
    answers = with_engine(engine_config(args, args.model), _stream_both, show_memory=True)
    rows = [_row(name, answer) for name, answer in answers.items()]
    print()
    print_table(console, "phases of the run", _HEADER, rows)
    return 0


async def _stream_both(engine: Engine) -> dict[str, Answer]:
    prompt = engine.tokenizer.encode(_CODE)
    print(f"\n>>> completion\n{_CODE}", end="")
    completion = await _streamed(engine, prompt, SamplingParams(temperature=0.0, max_tokens=64))
    print(f"\n>>> chat: {_QUESTION}")
    prompt = engine.chat_prompt([{"role": "user", "content": _QUESTION}])
    answer = await _streamed(engine, prompt, SamplingParams(temperature=0.0, max_tokens=96))
    repeated = await _streamed(engine, prompt, SamplingParams(temperature=0.0, max_tokens=1), False)
    return {"completion": completion, "chat": answer, "chat again (cached)": repeated}


async def _streamed(
    engine: Engine, prompt: Sequence[int], sampling: SamplingParams, shown: bool = True
) -> Answer:
    from quickstep.cli.answers import collect

    (answer,) = await collect(engine.submit(prompt, sampling), 1, _write if shown else None)
    if shown:
        _write("\n")
    return answer


def _row(name: str, answer: Answer) -> tuple[str, ...]:
    timings = answer.timings
    if timings is None or answer.finish_reason is None:
        return (name, *("-" for _ in _HEADER[1:]))
    per_token = answer.time_per_output_token_s
    return (
        name,
        str(timings.num_prompt_tokens),
        str(timings.num_cached_tokens),
        _ms(timings.queue_s),
        _ms(timings.prefill_s),
        _ms(answer.time_to_first_token_s),
        _ms(per_token),
        str(timings.num_output_tokens),
        f"{1 / per_token:.0f}" if per_token else "-",
        str(timings.num_blocks),
        answer.finish_reason.value,
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
