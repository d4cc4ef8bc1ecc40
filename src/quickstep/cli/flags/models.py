"""The models of `quickstep serve A B` and of `models:` in the file of `--config`.

A model in the file is a mapping: `model`, and as far as needed `name`, `aliases`, `pin`, and any
flag of an engine by its name, which goes before that of the command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from quickstep.cli.flags.config_file import setting
from quickstep.cli.flags.engine import add_engine_flags, add_template_flags
from quickstep.cli.flags.lora import adapter_names, add_lora_flags
from quickstep.cli.flags.options import add_options
from quickstep.cli.flags.parsing import Parser
from quickstep.config import EngineConfig, InputConfig, ReplicaConfig
from quickstep.errors import ConfigError, ModelTooLarge
from quickstep.server.options import ModelsOptions, ServerOptions

_SECTION = "models"


class ModelFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a model in the file that are no flags.

    Attributes:
        model: A directory, a .gguf file, a Hugging Face id, `smollm2` or `demo`.
        name: The name that clients use; None for the model's own.
        aliases: More names.
        pin: Load it at the start and keep it.
    """

    model: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    pin: bool = False


class NamedModel(msgspec.Struct, frozen=True):
    """A model with its names and its flags."""

    model: str
    names: tuple[str, ...]
    is_pinned: bool
    args: argparse.Namespace

    def options(self, options: ServerOptions) -> ServerOptions:
        """The server's options with what is the model's own. Raises ConfigError."""
        return replace(
            options,
            served_model_names=self.names,
            adapter_names=adapter_names(self.args),
            lora_dir=self.args.lora_dir,
            tool_call_parser=self.args.tool_call_parser,
            reasoning_parser=self.args.reasoning_parser,
        )


def add_models_flags(parser: Parser) -> None:
    """Add the flags of `ModelsOptions`, and names of more models after `MODEL`."""
    parser.add_argument(
        "more_models", nargs="*", metavar="MODEL", help="more models, loaded when they are named"
    )
    add_options(parser.add_argument_group("several models"), ModelsOptions)


def named_models(args: argparse.Namespace, first: str) -> tuple[NamedModel, ...]:
    """The models of a server in the order of the command line and the file; of a server with one
    model, that is `first`. () if it is loaded for as long as the server runs.

    Raises:
        ConfigError: The section is wrong, a name is given twice, or a flag is for one model only.
    """
    section = args.file_sections.get(_SECTION)
    if section is None and not args.more_models and args.model_idle_s is None:
        return ()
    given = [first, *args.more_models]
    if section is not None and not (args.model or args.model_flag or args.more_models):
        given = []
    models = [_plain(model, args) for model in given]
    if len(models) == 1 and args.served_model_name:
        models = [replace(models[0], names=tuple(args.served_model_name))]
    if section is not None:
        where = f"--config {args.config}: {_SECTION}"
        if not isinstance(section, list) or not section:
            raise ConfigError(f"{where} is no list of models, such as `- model: demo`")
        models += [
            _in_file(fields, args, f"{where}: number {number}")
            for number, fields in enumerate(section, 1)
        ]
    _check(models, args)
    return tuple(models)


def _plain(model: str, args: argparse.Namespace) -> NamedModel:
    return NamedModel(model, (_own_name(model),), False, args)


def _own_name(model: str) -> str:
    """The name that the engine will have. Raises ConfigError."""
    from quickstep.model.checkpoint.source import local_checkpoint

    checkpoint = local_checkpoint(model)
    if checkpoint is None and "/" not in model:
        raise ConfigError(
            f"the model {model!r} is no directory, no .gguf file, no bundled model, and no id of "
            "the hub, which has a slash"
        )
    return model if checkpoint is None else checkpoint.name


def _in_file(fields: Any, args: argparse.Namespace, where: str) -> NamedModel:
    """A model of the file. Raises ConfigError."""
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{where} is no mapping, such as `model: demo`")
    own = {key: value for key, value in fields.items() if key in ModelFields.__struct_fields__}
    try:
        named = msgspec.convert(own, ModelFields)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    flags = {key: value for key, value in fields.items() if key not in own}
    name = named.name or _own_name(named.model)
    return NamedModel(
        named.model,
        (name, *named.aliases),
        named.pin,
        _with_flags(args, flags, f"{where} ({name})"),
    )


def _with_flags(
    args: argparse.Namespace, flags: Mapping[str, Any], where: str
) -> argparse.Namespace:
    """The flags of a server with those of a model. Raises ConfigError."""
    known, changed, keys = _model_parser(), argparse.Namespace(**vars(args)), dict[str, str]()
    for key, value in flags.items():
        flag = setting(known, key, value, f"{where}: {key}")
        if flag is None:
            continue
        action, parsed = flag
        if action.dest in keys:
            raise ConfigError(
                f"{where}: {key} sets the same as {keys[action.dest]}; keep one of them"
            )
        keys[action.dest] = key
        setattr(changed, action.dest, parsed)
    return changed


def _model_parser() -> Parser:
    """The flags that a model may have of its own: those of its engine, not of the server."""
    parser = Parser(prog="quickstep serve")
    add_options(parser, EngineConfig, "seed")
    add_options(parser, ServerOptions, "tool_call_parser", "reasoning_parser")
    add_template_flags(parser)
    add_options(parser, InputConfig, "schema_bytes", "schema_depth", "regex_bytes")
    add_options(parser, InputConfig, "grammar_s", "template_s")
    add_options(parser, ReplicaConfig)
    add_engine_flags(parser)
    add_lora_flags(parser)
    return parser


def _check(models: Sequence[NamedModel], args: argparse.Namespace) -> None:
    """Raise ConfigError for names that are given twice, and flags that are for one model."""
    owners: dict[str, str] = {}
    for model in models:
        for name in (*model.names, *adapter_names(model.args)):
            if name in owners:
                raise ConfigError(
                    f"{name!r} names the models {owners[name]} and {model.model}; give one of them "
                    f"another `name` under {_SECTION}: in a --config file"
                )
            owners[name] = model.model
    if len(models) == 1:
        return
    place = f"give it to a model under {_SECTION}: in a --config file"
    if args.served_model_name:
        raise ConfigError(f"--served-model-name is for one model; {place}, as name and aliases")
    if args.lora_modules or args.lora_dir:
        raise ConfigError(f"--lora-modules and --lora-dir are for one model; {place}")
    if args.engines is not None:
        raise ConfigError("--engines is for one model; start a server for each")
    if args.record is not None or args.record_full is not None:
        raise ConfigError("--record is for one model; start a server for each")


def planned_bytes(config: EngineConfig) -> int:
    """What a model will take in memory by the planner, as far as it is known before it is loaded: 0
    if its files are not on this machine, the least that it needs if it does not fit. Raises
    ConfigError for a broken checkpoint.
    """
    from quickstep.engine.memory_plan import expected_plan
    from quickstep.server.models.residents import planned_bytes as taken_bytes

    try:
        plan = expected_plan(config)
    except ModelTooLarge as error:
        return error.needed_bytes
    return 0 if plan is None else taken_bytes(plan)
