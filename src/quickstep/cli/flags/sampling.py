"""The sampling flags of `generate` and `chat`. Names are vLLM's and llama.cpp's.

A flag overrides `--preset`, which overrides the checkpoint's defaults. Without any of them,
temperature is 0, so that a command prints the same every time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from quickstep.cli.flags.parsing import positive_int
from quickstep.sampling_params import PRESETS, SamplingField, preset_values, sampling_fields
from quickstep.types import SamplingParams

_TEXT_FLAGS = ("stop", "bad_words", "dry_sequence_breakers")
# Numbers whose flag is different, or that have none.
_OTHERS = ("n", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")


def _number_flags() -> dict[str, SamplingField]:
    """The sampling fields that have a flag of the same name with a number."""
    known = sampling_fields()
    return {name: known[name] for name in known if known[name].kind and name not in _OTHERS}


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the flags; each command has its own default of `--max-tokens`."""
    group = parser.add_argument_group(
        "sampling", "Defaults are the model's own, and temperature 0 if it has none."
    )
    group.add_argument(
        "--max-tokens",
        type=positive_int,
        default=max_tokens,
        metavar="N",
        help="largest number of output tokens (default: %(default)s)",
    )
    group.add_argument(
        "--preset", choices=list(PRESETS), help="temperature and top-p for a kind of task"
    )
    for name, field in _number_flags().items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=field.kind or str, metavar="X", help=field.description)
    for name in _TEXT_FLAGS:
        flag = "--" + name.replace("_", "-")
        text = f"{sampling_fields()[name].description} Repeatable."
        group.add_argument(flag, action="append", metavar="TEXT", help=text)
    group.add_argument(
        "--reasoning-budget-message",
        metavar="TEXT",
        help=f"{sampling_fields()['reasoning_budget_message'].description} "
        "It needs --thinking-budget.",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="sampling seed (default: random; --json prints it)"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="continue after the model's end token"
    )


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags and the preset set, by the names of the fields."""
    values: dict[str, Any] = {
        name: value for name in _number_flags() if (value := getattr(args, name)) is not None
    }
    texts = {name: tuple(texts) for name in _TEXT_FLAGS if (texts := getattr(args, name))}
    if args.reasoning_budget_message:
        values["reasoning_budget_message"] = args.reasoning_budget_message
    return {**preset_values(args.preset), **values, **texts, "max_tokens": args.max_tokens}


def sampling_fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request to a server, whose defaults hold for the others."""
    fields = _given(args)
    if args.seed is not None:
        fields["seed"] = args.seed
    if args.ignore_eos:
        fields["ignore_eos"] = True
    return fields


def sampling_params(
    args: argparse.Namespace, defaults: Mapping[str, float], n: int = 1
) -> SamplingParams:
    """Sampling parameters from the flags and the checkpoint's `defaults`. Raises RequestError."""
    return SamplingParams(
        **{"temperature": 0.0, **defaults, **_given(args)},
        n=n,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )


def print_defaults(defaults: Mapping[str, float]) -> None:
    """Print the checkpoint's own sampling defaults to stderr."""
    values = {name: value for name, value in defaults.items() if name != "max_tokens"}
    if values:
        text = ", ".join(f"{name} {value:g}" for name, value in values.items())
        print(f"the model's own sampling defaults: {text}", file=sys.stderr)
