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
from quickstep.sampling_params import PRESETS, preset_values
from quickstep.types import SamplingParams

__all__ = ["add_sampling_flags", "sampling_params", "say_defaults"]

_FLAGS: Mapping[str, tuple[type, str]] = {
    "temperature": (float, "0 takes the most likely token (default: the model's, or 0)"),
    "top_p": (float, "keep the likeliest tokens up to this mass"),
    "top_k": (int, "keep this many of the likeliest tokens"),
    "min_p": (float, "drop tokens below this share of the likeliest one's probability"),
    "typical_p": (float, "keep the tokens of the most expected surprise up to this mass"),
    "xtc_probability": (float, "how often the likeliest tokens but one are left out"),
    "xtc_threshold": (float, "probability from which XTC leaves a token out"),
    "dry_multiplier": (float, "penalty on what goes on with a repetition; 0 for none"),
    "dry_base": (float, "growth of that penalty per repeated token"),
    "dry_allowed_length": (int, "repeated tokens without penalty"),
    "dry_range": (int, "tokens that DRY looks back, 0 for all"),
    "thinking_budget": (int, "tokens of reasoning at most"),
    "presence_penalty": (float, "for tokens that came already"),
    "frequency_penalty": (float, "per time that a token came already"),
    "repetition_penalty": (float, "divides scores of tokens that came already, prompt included"),
}
_TEXT_FLAGS: Mapping[str, str] = {
    "stop": "end at this text",
    "bad_words": "never write this text",
    "dry_sequence_breakers": "DRY looks back no further than this text",
}


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Flags, with the command's own default of `--max-tokens`."""
    group = parser.add_argument_group("sampling")
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
    for name, (kind, text) in _FLAGS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar="X", help=text)
    for name, text in _TEXT_FLAGS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, action="append", metavar="TEXT", help=f"{text}; repeatable")
    group.add_argument(
        "--seed", type=int, metavar="N", help="noise seed (default: drawn, --json tells it)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the end token")


def sampling_params(
    args: argparse.Namespace, defaults: Mapping[str, float], n: int = 1
) -> SamplingParams:
    """The flags as parameters, over the checkpoint's own defaults. Raises RequestError."""
    given: dict[str, Any] = {
        name: value for name in _FLAGS if (value := getattr(args, name)) is not None
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
