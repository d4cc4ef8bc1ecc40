"""The flags of `generate` and `chat` that choose tokens. Names are vLLM's and llama.cpp's.

A flag goes before `--preset`, the preset before the checkpoint's own values; what none of them
sets is greedy, since a command should say the same twice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from quickstep.cli.flags.parsing import positive_int
from quickstep.sampling_params import PRESETS, SamplingField, preset_values, sampling_fields
from quickstep.types import SamplingParams

__all__ = ["add_sampling_flags", "sampling_params", "say_defaults"]

_TEXT_FLAGS = ("stop", "bad_words", "dry_sequence_breakers")
# Numbers with a flag of another form, or with none.
_OTHERS = ("n", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")


def _number_flags() -> dict[str, SamplingField]:
    """The fields with a flag of the same name that takes a number."""
    known = sampling_fields()
    return {name: known[name] for name in known if known[name].kind and name not in _OTHERS}


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Flags, with the command's own default of `--max-tokens`."""
    group = parser.add_argument_group(
        "sampling", "What is not given has the model's own value; temperature 0 if it has none."
    )
    group.add_argument(
        "--max-tokens",
        type=positive_int,
        default=max_tokens,
        metavar="N",
        help="output tokens at most (default: %(default)s)",
    )
    group.add_argument(
        "--preset", choices=list(PRESETS), help="temperature and top-p of a kind of task"
    )
    for name, field in _number_flags().items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=field.kind or str, metavar="X", help=field.description)
    for name in _TEXT_FLAGS:
        flag = "--" + name.replace("_", "-")
        text = f"{sampling_fields()[name].description} Repeatable."
        group.add_argument(flag, action="append", metavar="TEXT", help=text)
    group.add_argument(
        "--seed", type=int, metavar="N", help="noise seed (default: drawn, --json tells it)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the end token")


def sampling_params(
    args: argparse.Namespace, defaults: Mapping[str, float], n: int = 1
) -> SamplingParams:
    """The flags as parameters, over the checkpoint's own defaults. Raises RequestError."""
    given: dict[str, Any] = {
        name: value for name in _number_flags() if (value := getattr(args, name)) is not None
    }
    texts = {name: tuple(texts) for name in _TEXT_FLAGS if (texts := getattr(args, name))}
    return SamplingParams(
        **{
            "temperature": 0.0,
            **defaults,
            **preset_values(args.preset),
            **given,
            **texts,
            "max_tokens": args.max_tokens,
        },
        n=n,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )


def say_defaults(defaults: Mapping[str, float]) -> None:
    """Tell on stderr which of the checkpoint's own values hold where no flag is given."""
    values = {name: value for name, value in defaults.items() if name != "max_tokens"}
    if values:
        told = ", ".join(f"{name} {value:g}" for name, value in values.items())
        print(f"the model's own sampling defaults: {told}", file=sys.stderr)
