"""The flags of LoRA adapters. Names are vLLM's."""

from __future__ import annotations

import argparse
import logging

import msgspec

from quickstep.cli.flags.options import add_options, from_flags
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
    group = parser.add_argument_group("LoRA adapters")
    group.add_argument(
        "--enable-lora",
        action="store_true",
        help="let requests use LoRA adapters; --lora-modules and --lora-dir imply it",
    )
    add_options(group, LoRAConfig, "modules", "directory")
    add_options(group, LoRAConfig, "max_loras", is_optional=True)
    add_options(group, LoRAConfig, "max_cpu_loras", "max_lora_rank", "memory_bytes")
    add_options(group, LoRAConfig, "dtype", "pinned", "allowed_dirs")


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
    return from_flags(
        LoRAConfig,
        args,
        modules=modules,
        max_loras=args.max_loras or LoRAConfig.usual_max_loras(args.max_cpu_loras),
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
