"""The flags of an engine, shared by the commands that open one. Names are vLLM's."""

from __future__ import annotations

import argparse
from typing import Any

from quickstep.cli.flags.config_file import add_config_file
from quickstep.cli.flags.foreign import FOREIGN_FLAGS
from quickstep.cli.flags.options import add_options, from_flags
from quickstep.cli.flags.parsing import Parser
from quickstep.config import (
    DTYPES,
    CacheConfig,
    ContentFormat,
    EngineConfig,
    InputConfig,
    LoadConfig,
    ProposerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from quickstep.errors import ConfigError


def add_model(
    parser: argparse.ArgumentParser,
    what: str = "a directory, a .gguf file, a Hugging Face id, smollm2, or demo (default)",
    default: str | None = LoadConfig().model,
) -> None:
    """Add `MODEL` and `--model` to any command that has a model; as in vLLM, either names it.

    `what` describes it. Without a `default` one of both is required.
    """
    parser.add_argument("model", nargs="?", metavar="MODEL", help=what)
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as MODEL")
    parser.set_defaults(default_model=default)


def model_of(args: argparse.Namespace) -> str:
    """The model of `MODEL` or `--model`. Raises ConfigError for two different names, or none."""
    if args.model and args.model_flag and args.model != args.model_flag:
        raise ConfigError(f"MODEL is {args.model} and --model is {args.model_flag}; give one")
    model: str | None = args.model or args.model_flag or args.default_model
    if model is None:
        raise ConfigError(f"no model is named; see {args.parser.prog} --help")
    return model


def add_engine_flags(parser: Parser) -> None:
    """Add the flags of `EngineConfig` except the model's name, which differs between commands.

    The command then answers the flags of other engines too.
    """
    parser.foreign_flags = FOREIGN_FLAGS
    add_config_file(parser)
    group = parser.add_argument_group("model")
    add_options(group, LoadConfig)
    add_options(group, EngineConfig, "enforce_eager", "max_model_len", "allow_long_context")
    group = parser.add_argument_group("KV cache")
    add_options(group, CacheConfig)
    add_options(group, EngineConfig, "memory_bytes")
    add_options(parser.add_argument_group("scheduler"), SchedulerConfig)
    group = parser.add_argument_group("speculative decoding")
    add_options(group, ProposerConfig, is_optional=True)
    add_options(group, SpeculationConfig, is_optional=True)
    add_options(group, EngineConfig, "speculation", is_optional=True)


def _speculation(args: argparse.Namespace) -> SpeculationConfig:
    given = {} if args.speculative_config is None else args.speculative_config
    objects = [dict(fields) for fields in given] if isinstance(given, list) else [dict(given)]
    for name, value in (
        ("method", args.speculative_method),
        ("model", args.speculative_model),
        ("num_speculative_tokens", args.num_speculative_tokens),
        ("tree_width", args.speculative_tree_width),
        ("sampling", args.speculative_sampling),
    ):
        if value is None:
            continue
        if any(name in fields for fields in objects):
            raise ConfigError(f"{name} is given twice: in --speculative-config and by its flag")
        if name in ("method", "model") and isinstance(given, list):
            raise ConfigError(
                f"--speculative-config is a list of proposers; give --speculative-{name} as the "
                f"{name} of one of them"
            )
        values = value if name == "model" else [value]
        objects = [{**fields, name: each} for each in values for fields in objects]
    fields = objects if isinstance(given, list) or len(objects) > 1 else objects[0]
    return SpeculationConfig.of_fields(fields, "--speculative-config")


def engine_config(args: argparse.Namespace, model: str, seed: int | None = None) -> EngineConfig:
    """The flags as configuration. Raises ConfigError."""
    return from_flags(
        EngineConfig,
        args,
        load=from_flags(LoadConfig, args, model=model, dtype=DTYPES[args.dtype]),
        cache=from_flags(CacheConfig, args),
        scheduler=from_flags(SchedulerConfig, args),
        speculation=_speculation(args),
        seed=seed,
    )


def add_template_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of chat templates; the names are vLLM's, and llama.cpp's second one."""
    add_options(group, InputConfig, "chat_template", "content_format")


def template_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of chat templates as fields of `InputConfig`. Raises ConfigError."""
    fields: dict[str, Any] = {"content_format": ContentFormat(args.chat_template_content_format)}
    if args.chat_template is not None:
        from quickstep.text.chat_template import read_template

        fields["chat_template"] = read_template(args.chat_template)
    return fields
