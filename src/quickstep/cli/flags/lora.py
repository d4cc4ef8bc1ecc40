"""The flags of LoRA adapters. Names are vLLM's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from quickstep.cli.flags.parsing import positive_int
from quickstep.config import LoRAConfig
from quickstep.errors import ConfigError

__all__ = ["add_lora_flags", "lora_config"]


def add_lora_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `LoRAConfig`."""
    defaults, group = LoRAConfig(), parser.add_argument_group("LoRA adapters")
    group.add_argument(
        "--enable-lora",
        action="store_true",
        help="let requests use LoRA adapters; --lora-modules implies it",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="adapters of PEFT to load at the start; a request selects one by `model: NAME`",
    )
    group.add_argument(
        "--max-loras",
        type=positive_int,
        default=defaults.max_loras,
        metavar="N",
        help="most adapters that are loaded at the same time (default: %(default)s)",
    )
    group.add_argument(
        "--max-lora-rank",
        type=positive_int,
        default=defaults.max_lora_rank,
        metavar="RANK",
        help="largest rank of an adapter (default: %(default)s)",
    )


def lora_config(args: argparse.Namespace) -> LoRAConfig | None:
    """The flags as configuration; None if adapters are off. Raises ConfigError."""
    modules = _modules(args.lora_modules)
    if not modules and not args.enable_lora:
        return None
    return LoRAConfig(modules, args.max_loras, args.max_lora_rank)


def _modules(values: Sequence[str]) -> tuple[tuple[str, str], ...]:
    pairs = []
    for value in values:
        name, separator, path = value.partition("=")
        if not name or not separator or not path:
            raise ConfigError(f"--lora-modules has {value!r}, it must be NAME=DIR")
        pairs.append((name, path))
    return tuple(pairs)
