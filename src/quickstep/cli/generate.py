"""`quickstep generate [MODEL] PROMPT`: complete a text; `--json` adds tokens, seed and timings."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quickstep.cli.flags.engine import add_engine_flags, add_model, engine_config, model_of
from quickstep.cli.flags.parsing import Parser, command, positive_int
from quickstep.cli.flags.sampling import add_sampling_flags, print_defaults, sampling_params
from quickstep.cli.screen import write_out
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.cli.session import Answer
    from quickstep.engine.engine import Engine
    from quickstep.engine.stream import Stream


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(subparsers, "generate", "Complete a prompt and print the text.", run)
    add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to complete; - reads stdin")
    parser.add_argument(
        "--n",
        type=positive_int,
        default=1,
        metavar="N",
        help="number of completions (default: %(default)s)",
    )
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print text while it is generated (default: if stdout is a terminal)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON: text, tokens, seed, timings",
    )
    add_sampling_flags(parser, max_tokens=128)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Generate and print."""
    if args.stream and (args.json or args.n > 1):
        raise ConfigError("--stream prints one text; leave out --json and --n")
    from quickstep.cli.session import collect, with_engine

    sampling_params(args, {}, args.n)  # reports an invalid value before the model is loaded
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    live = sys.stdout.isatty() if args.stream is None else args.stream
    live = live and not args.json and args.n == 1

    async def work(engine: Engine) -> None:
        print_defaults(engine.default_sampling)
        sampling = sampling_params(args, engine.default_sampling, args.n)
        stream = engine.generate(prompt, sampling)
        answers = await collect(stream, args.n, write_out if live else None)
        if args.json:
            print(json.dumps(_as_json(engine, stream, answers), indent=2))
        elif live:
            write_out("\n")
        else:
            _print_texts(answers)

    with_engine(engine_config(args, model_of(args)), work)
    return 0


def _print_texts(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if len(answers) > 1:
            print(f"--- {answer.index}, seed {answer.seed}")
        print(answer.text)


def _as_json(engine: Engine, stream: Stream, answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "model": engine.model_name,
        "system_fingerprint": engine.fingerprint,
        "num_prompt_tokens": len(stream.prompt_token_ids),
        "num_output_tokens": sum(len(answer.token_ids) for answer in answers),
        "seed": stream.seed,
        "choices": [answer.to_json() for answer in answers],
    }
