"""Reading a YAML file of the operator into a type, with faults reported in one sentence.

PyYAML is imported when the first file is read: most servers have none.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quickstep.errors import ConfigError

if TYPE_CHECKING:
    import yaml

_Read = TypeVar("_Read")
_MESSAGE = re.compile(r"(.*) - at (`key` in )?`\$(.*)`", re.DOTALL)
_MAX_BYTES = 4 * 1024 * 1024


def read_yaml(path: Path, kind: type[_Read], flag: str) -> _Read:
    """The content of a file as a `kind`; an empty file is an empty mapping.

    `flag` is the flag that named the file. Keys may not occur twice in a mapping.

    Raises:
        ConfigError: The file cannot be read, is no YAML, or has other content.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{flag} {path} has more than {_MAX_BYTES} bytes")
    content = _parsed(data, f"{flag} {path}")
    try:
        return msgspec.convert({} if content is None else content, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{flag} {path} is not valid: {_with_place(error, content, kind)}"
        ) from None


def _parsed(data: bytes, name: str) -> Any:
    import yaml

    try:
        return yaml.load(data, _without_repeats(getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError):
        pass  # libyaml takes a seventh of the time, and PyYAML's own parser names the right line
    try:
        return yaml.load(data, _without_repeats(yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not YAML: {_one_line(error)}") from None


def _without_repeats(parser: type[Any]) -> type[Any]:
    """A loader that refuses a key that occurs twice."""
    import yaml

    class Loader(parser):  # type: ignore[misc]  # PyYAML has no types
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
            seen: set[Hashable] = set()
            for key_node, _ in node.value:
                key = key_node.value
                if isinstance(key, Hashable) and key in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key!r:.100} occurs twice",
                        problem_mark=key_node.start_mark,
                    )
                seen.add(key)
            return super().construct_mapping(node, deep)

    return Loader


def _one_line(error: Exception) -> str:
    """What is wrong, with its line if PyYAML reports one."""
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    mark = getattr(error, "problem_mark", None)
    return problem if mark is None else f"line {mark.line + 1}: {problem}"


def _with_place(error: msgspec.ValidationError, content: Any, kind: Any) -> str:
    """msgspec's message, with the place at its end in front."""
    message = _MESSAGE.fullmatch(str(error))
    if message is None:
        return str(error)
    what, of_key, place = message.groups()
    before, entry, after = place.partition("[...]")
    if entry:
        after = f".{_faulty_key(content, before.strip('.'), kind)}{after.replace('[...]', '')}"
    name = f"{before}{after}".lstrip(".")
    if of_key:
        name = f"a key in {name}" if name else "a key"
    return f"{name}: {what}" if name else what


def _faulty_key(content: Any, field: str, kind: Any) -> str:
    """The first key with which the mapping in `field` ("" for `content` itself) is not valid;
    msgspec does not name the keys of mappings.
    """
    mapping = content[field] if field else content
    for key, value in mapping.items():
        try:
            msgspec.convert({field: {key: value}} if field else {key: value}, kind)
        except msgspec.ValidationError:
            return str(key)
    return "..."
