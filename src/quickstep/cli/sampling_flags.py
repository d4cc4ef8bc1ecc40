"""The flags of `generate` and `chat` that choose tokens. Names are vLLM's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from quickstep.cli.parsing import positive_int
from quickstep.types import SamplingParams

__all__ = ["add_sampling_flags", "sampling_params"]

_FLAGS: Mapping[str, tuple[type, str]] = {
    "temperature": (float, "0 takes the most likely token (default: %(default)s)"),
    "top_p": (float, "keep the likeliest tokens up to this mass"),
    "top_k": (int, "keep this many of the likeliest tokens"),
    "min_p": (float, "drop tokens below this share of the likeliest one's probability"),
    "presence_penalty": (float, "for tokens that came already"),
    "frequency_penalty": (float, "per time that a token came already"),
    "repetition_penalty": (float, "divides scores of tokens that came already, prompt included"),
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
    for name, (kind, text) in _FLAGS.items():
        default = 0.0 if name == "temperature" else None
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar="X", default=default, help=text)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable"
    )
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
    return SamplingParams(
        **{**defaults, **given, "max_tokens": args.max_tokens},
        n=n,
        stop=tuple(args.stop),
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
