"""`--config FILE.yaml`: flags from a file, as in vLLM.

Keys are long flag names, with `-` or `_`. A flag of the command line goes before the file, and the
file before the default. A list gives a flag several values, `true` gives a flag without a value.
Names of other engines mean what they mean as flags. Sections, such as `models:`, are no flags: a
command that has them names them in `Parser.file_sections` and reads them itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quickstep.cli.flags.foreign import foreign_flag
from quickstep.cli.flags.parsing import Parser, nearest_name
from quickstep.errors import ConfigError
from quickstep.yaml_file import read_yaml

_FLAG = "--config"
_NO_SETTINGS = ("help", "config")


def add_config_file(parser: Parser) -> None:
    """Add `--config` to a command."""
    parser.add_argument(
        _FLAG,
        metavar="FILE",
        help="YAML file with flags, such as `max-num-seqs: 8`; flags of the command line go before "
        "those of the file",
    )
    parser.read_defaults = _read_defaults
    parser.set_defaults(file_sections={})


def _read_defaults(parser: Parser, arguments: Sequence[str]) -> None:
    """Make the flags of the file defaults, except those that are given. Raises ConfigError."""
    path, given = _given(parser, arguments)
    if path is None:
        return
    content = read_yaml(Path(path), dict[str, Any], _FLAG)
    sections = {name: content.pop(name) for name in parser.file_sections if name in content}
    parser.set_defaults(file_sections=sections)
    keys: dict[str, str] = {}  # by the name of the flag's value
    for key, value in content.items():
        where = f"{_FLAG} {path}: {key}"
        flag = setting(parser, key, value, where)
        if flag is None:
            continue
        action, default = flag
        if action.dest in keys:
            raise ConfigError(f"{where} sets the same as {keys[action.dest]}; keep one of them")
        keys[action.dest] = key
        if action.dest not in given:
            action.required = False
            name = "default_model" if action.dest == "model_flag" else action.dest
            parser.set_defaults(**{name: default})


def _given(parser: Parser, arguments: Sequence[str]) -> tuple[str | None, set[str]]:
    """The file of `--config`, and which flags are given, by the names of their values."""
    path: str | None = None
    given: set[str] = set()
    for place, argument in enumerate(arguments):
        if argument == "--":
            break
        name, has_value, value = argument.partition("=")
        if name == _FLAG:
            path = value if has_value else next(iter(arguments[place + 1 :]), None)
        known = parser._option_string_actions
        action = known.get(name) or known.get(argument[:2])
        if action is not None:
            given.add(action.dest)
    return path, given


def setting(parser: Parser, key: str, value: Any, where: str) -> tuple[argparse.Action, Any] | None:
    """The flag that a key sets, with its value; None if it asks for what holds anyway.

    Raises:
        ConfigError: There is no such flag, or the value is bad.
    """
    flag = "--" + key.replace("_", "-")
    if value is None:
        raise ConfigError(f"{where} has no value; leave it out for the default")
    known = parser._option_string_actions
    action = known.get(flag)
    if action is not None and action.dest not in _NO_SETTINGS:
        return action, _value(parser, action, flag, value, where)
    foreign = None if action else foreign_flag(flag, parser.foreign_flags)
    if foreign is not None:
        if value is False:
            return None
        text = None if value is True else _text(value)
        ours = foreign.replacement(text)
        if ours is None:
            raise ConfigError(f"{where}: {foreign.refusal(flag, text, known)}")
        if not ours:
            return None
        return setting(parser, ours[0].removeprefix("--"), (*ours, True)[1], where)
    near = nearest_name(flag, known.keys() - {f"--{name}" for name in _NO_SETTINGS})
    hint = f"did you mean {near.removeprefix('--')}?" if near else f"see {parser.prog} --help"
    raise ConfigError(f"{where} is no flag; {hint}")


def _value(parser: Parser, action: argparse.Action, flag: str, value: Any, where: str) -> Any:
    """What argparse would make of the flag with this value. Raises ConfigError."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is {value!r}, it must be true or false")
        if isinstance(action, argparse.BooleanOptionalAction):
            return value is not flag.startswith("--no-")
        return action.const if value else action.default
    if isinstance(value, bool):
        raise ConfigError(f"{where} is {_text(value)}, it needs a value")
    takes_many = action.nargs == "+" or isinstance(action, argparse._AppendAction)
    is_json = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    values = value if isinstance(value, list) and (takes_many or not is_json) else [value]
    if len(values) != 1 and not takes_many:
        raise ConfigError(f"{where} is a list, it takes one value")
    try:
        if isinstance(action, argparse._AppendAction) and action.nargs is None:
            return [parser._get_values(action, [_text(item)]) for item in values]
        return parser._get_values(action, [_text(item) for item in values])
    except argparse.ArgumentError as error:
        raise ConfigError(f"{where}: {error.message}") from None


def _text(value: Any) -> str:
    """A value of YAML as an argument."""
    return value if isinstance(value, str) else json.dumps(value)
