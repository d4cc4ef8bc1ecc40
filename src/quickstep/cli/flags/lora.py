"""The flags of LoRA adapters. Names are vLLM's."""

from __future__ import annotations

import argparse
import logging

import msgspec

from quickstep.cli.flags.parsing import bytes_size, positive_int
from quickstep.config import LoRAConfig
from quickstep.errors import ConfigError

_LOG = logging.getLogger("quickstep.cli")


class _Module(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One adapter of `--lora-modules` in vLLM's JSON."""

    name: str
    path: str
    base_model_name: str | None = None


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
        help="adapters of PEFT to load at the start, also as JSON like vLLM's: "
        """'{"name": "NAME", "path": "DIR"}'; a request selects one by `model: NAME`""",
    )
    group.add_argument(
        "--lora-dir",
        metavar="DIR",
        help="each of its folders is an adapter, which is loaded when a request first names it",
    )
    group.add_argument(
        "--max-loras",
        type=positive_int,
        metavar="N",
        help="most adapters in compute memory at the same time; others are loaded when a request "
        f"names them (default: {defaults.max_loras}, or --max-cpu-loras if that is less)",
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
    modules = tuple((module.name, module.path) for module in _modules(args))
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
        max_loras=args.max_loras or LoRAConfig.usual_max_loras(args.max_cpu_loras),
        max_lora_rank=args.max_lora_rank,
        max_cpu_loras=args.max_cpu_loras,
        directory=args.lora_dir,
        pinned=tuple(args.lora_pin),
        memory_bytes=args.lora_memory_bytes,
        allowed_dirs=tuple(args.lora_allowed_dirs),
        dtype=args.lora_dtype,
    )


def adapter_names(args: argparse.Namespace) -> tuple[str, ...]:
    """The names of `--lora-modules`; reports a base model that is not this one. Raises ConfigError.

    vLLM also takes a `base_model_name` as the parent in `/v1/models` only if it serves that name.
    """
    modules = _modules(args)
    own = (args.model, args.model_flag, *args.served_model_name)
    for module in modules:
        if module.base_model_name is not None and module.base_model_name not in own:
            _LOG.warning(
                "--lora-modules: the base_model_name %s of %s is no name of this server's model, "
                "and is ignored",
                module.base_model_name,
                module.name,
            )
    return tuple(module.name for module in modules)


def _modules(args: argparse.Namespace) -> list[_Module]:
    return [module for value in args.lora_modules for module in _modules_in(value)]


def _modules_in(value: str) -> list[_Module]:
    """The adapters of one value. Raises ConfigError."""
    if value.lstrip()[:1] not in ("{", "["):
        name, separator, path = value.partition("=")
        if not name or not separator or not path:
            raise ConfigError(f"--lora-modules has {value!r}, it must be NAME=DIR or JSON")
        return [_Module(name, path)]
    try:
        if value.lstrip().startswith("["):
            return msgspec.json.decode(value, type=list[_Module])
        return [msgspec.json.decode(value, type=_Module)]
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--lora-modules has {value!r}, which is no adapter in JSON, such as "
            f'{{"name": "NAME", "path": "DIR"}}: {error}'
        ) from None
