"""Flags from the declarations of options (`quickstep.option`), and config structs from flags."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from quickstep.cli.flags.parsing import (
    bytes_size,
    json_objects,
    positive_int,
    positive_or_all,
    token_count,
)
from quickstep.option import Declared, Kind, options_of

_Section = TypeVar("_Section", bound=msgspec.Struct)
_PARSERS: Mapping[Kind, Callable[[str], Any]] = MappingProxyType(
    {
        Kind.COUNT: positive_int,
        Kind.COUNT_OR_ALL: positive_or_all,
        Kind.INTEGER: int,
        Kind.TOKENS: token_count,
        Kind.BYTES: bytes_size,
        Kind.SECONDS: float,
        Kind.PATH: Path,
        Kind.JSON: json_objects,
    }
)
_METAVARS = {Kind.COUNT_OR_ALL: "N", Kind.INTEGER: "N"}
_BINARY_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def add_options(
    group: argparse._ActionsContainer,
    section: type[msgspec.Struct],
    *fields: str,
    is_optional: bool = False,
) -> None:
    """Add the flags of the options of a section: those in `fields`, or all of them.

    With `is_optional` a flag that is not given is None instead of the default.
    """
    declared = options_of(section)
    for field in fields or declared:
        _add_flag(group, declared[field], is_optional)


def _add_flag(group: argparse._ActionsContainer, declared: Declared, is_optional: bool) -> None:
    option = declared.option
    settings: dict[str, Any] = {"help": help_text(declared)}
    if not is_optional:
        settings["default"] = plain_value(declared.default)
    kind = _plain_type(declared.type)
    if kind is bool and option.turns_off:
        settings |= {"action": "store_true", "default": False}
    elif kind is bool:
        is_on = declared.default is True
        settings["action"] = argparse.BooleanOptionalAction if is_on else "store_true"
    else:
        if option.kind in _PARSERS:
            settings["type"] = _PARSERS[option.kind]
        if choices := choices_of(declared):
            settings["choices"] = choices
        elif metavar := option.metavar or _METAVARS.get(option.kind, option.kind.value):
            settings["metavar"] = metavar
        if _takes_several(declared):
            settings |= {"nargs": "+", "default": list(declared.default)}
        if option.repeats != "once":
            settings["action"] = option.repeats
    group.add_argument(declared.flag, *option.aliases, **settings)


def choices_of(declared: Declared) -> list[str]:
    """The known values of an option; [] if there is no list of them."""
    kind = _plain_type(declared.type)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [member.value for member in kind]
    return list(declared.option.choices)


def help_text(declared: Declared) -> str:
    """The text of `--help`, with the default."""
    text, default = declared.option.help, default_text(declared)
    if "{default}" in text:
        return text.replace("{default}", default)
    return f"{text} (default: {default})" if default else text


def default_text(declared: Declared) -> str:
    """The default in words; "" if there is nothing to say."""
    value = plain_value(declared.default)
    if declared.option.default_text:
        return declared.option.default_text.replace("{value}", str(value))
    if value is None or isinstance(value, bool | msgspec.Struct) or value in ("", ()):
        return ""
    if declared.option.kind is Kind.BYTES:
        return size_text(value)
    return str(value)


def size_text(num_bytes: int) -> str:
    """A number of bytes as a flag takes it, such as 4MiB."""
    for factor, unit in _BINARY_UNITS:
        if num_bytes % factor == 0 and num_bytes >= factor:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def plain_value(value: Any) -> Any:
    """The value of an enum's member; other values as they are."""
    return value.value if isinstance(value, enum.Enum) else value


def from_flags(
    section: type[_Section],
    args: argparse.Namespace,
    fields: Iterable[str] = (),
    **others: Any,
) -> _Section:
    """A section with the values of its flags (those in `fields`, or all), and `others`.

    Raises:
        ConfigError: A value is bad.
    """
    declared = options_of(section)
    values = {
        field: _field_value(declared[field], getattr(args, declared[field].name))
        for field in fields or declared
        if field not in others
    }
    return section(**values, **others)


def _field_value(declared: Declared, value: Any) -> Any:
    kind = _plain_type(declared.type)
    if declared.option.turns_off:
        return not value
    if value is None:
        return None
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    return tuple(value) if _takes_several(declared) else value


def _takes_several(declared: Declared) -> bool:
    """Whether the flag has several values; those of a file are in one file."""
    is_text = declared.option.kind is Kind.TEXT
    return is_text and get_origin(_plain_type(declared.type)) is tuple


def _plain_type(kind: Any) -> Any:
    """The type of a value that is given: without `None`."""
    if isinstance(kind, UnionType):
        return next(member for member in get_args(kind) if member is not type(None))
    return kind
