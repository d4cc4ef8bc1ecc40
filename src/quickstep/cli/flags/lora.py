"""The flags of LoRA adapters. Names are vLLM's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from quickstep.cli.flags.parsing import bytes_size, positive_int
from quickstep.config import LoRAConfig
from quickstep.errors import ConfigError

__all__ = ["add_lora_flags", "lora_config"]


def add_lora_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `LoRAConfig`."""
    defaults, group = LoRAConfig(), parser.add_argument_group("LoRA adapters")
    group.add_argument(
        "--enable-lora",
        action="store_true",
        help="let requests use LoRA adapters; --lora-modules and --lora-dir imply it",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="adapters of PEFT to load at the start; a request selects one by `model: NAME`",
    )
    group.add_argument(
        "--lora-dir",
        metavar="DIR",
        help="each of its folders is an adapter, which is loaded when a request first names it",
    )
    group.add_argument(
        "--max-loras",
        type=positive_int,
        default=defaults.max_loras,
        metavar="N",
        help="most adapters in compute memory at the same time; others are loaded when a request "
        "names them (default: %(default)s)",
    )
    group.add_argument(
        "--max-cpu-loras",
        type=positive_int,
        metavar="N",
        help="most adapters in memory at the same time, those in compute memory included "
        "(default: --max-loras)",
    )
    group.add_argument(
        "--max-lora-rank",
        type=positive_int,
        default=defaults.max_lora_rank,
        metavar="RANK",
        help="largest rank of an adapter (default: %(default)s)",
    )
    group.add_argument(
        "--lora-memory-bytes",
        type=bytes_size,
        metavar="SIZE",
        help="what adapters may take in compute memory together (default: the --max-loras largest "
        "of those that are known at the start)",
    )
    group.add_argument(
        "--lora-dtype",
        choices=("auto", "int8"),
        default=defaults.dtype,
        help="how adapters are held: auto is the model's dtype; int8 takes half of the memory and "
        "reads, and rounds the weights (default: %(default)s)",
    )
    group.add_argument(
        "--lora-pin",
        nargs="+",
        default=[],
        metavar="NAME",
        help="adapters that stay in compute memory once they are there",
    )
    group.add_argument(
        "--lora-allowed-dirs",
        nargs="+",
        default=[],
        metavar="DIR",
        help="where POST /v1/load_lora_adapter may load from, besides --lora-dir",
    )


def lora_config(args: argparse.Namespace) -> LoRAConfig | None:
    """The flags as configuration; None if adapters are off. Raises ConfigError."""
    modules = _modules(args.lora_modules)
    if not modules and not args.lora_dir and not args.enable_lora:
        return None
    named = {name for name, _ in modules}
    unknown = next((name for name in args.lora_pin if name not in named), None)
    if unknown is not None and not args.lora_dir and not args.lora_allowed_dirs:
        raise ConfigError(
            f"--lora-pin names {unknown!r}, which is none of --lora-modules, and requests can load "
            "no others; see --lora-dir"
        )
    return LoRAConfig(
        modules=modules,
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank,
        max_cpu_loras=args.max_cpu_loras,
        directory=args.lora_dir,
        pinned=tuple(args.lora_pin),
        memory_bytes=args.lora_memory_bytes,
        allowed_dirs=tuple(args.lora_allowed_dirs),
        dtype=args.lora_dtype,
    )


def _modules(values: Sequence[str]) -> tuple[tuple[str, str], ...]:
    pairs = []
    for value in values:
        name, separator, path = value.partition("=")
        if not name or not separator or not path:
            raise ConfigError(f"--lora-modules has {value!r}, it must be NAME=DIR")
        pairs.append((name, path))
    return tuple(pairs)
