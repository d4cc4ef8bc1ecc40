"""`--unknown-fields warn`: a body without the fields that its schema does not have.

The schema itself says what is unknown, at any depth: the body is converted again and again, each
time without the field that was refused. What else is wrong with it stays, for the route to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from quickstep.errors import RequestError

__all__ = ["Parts", "known_part"]

_UNKNOWN = re.compile(
    r"Object contains unknown field `(?P<field>.*?)`(?: - at `\$(?P<path>.*)`)?", re.DOTALL
)
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<place>\d+)\]")
_MAX_UNKNOWN = 64
_NO_PARTS: Mapping[str, Any] = MappingProxyType({})


Parts = Mapping[str, Callable[[dict[str, Any]], "type[msgspec.Struct] | None"]]


def known_part(
    body: bytes, schema: type[msgspec.Struct], parts: Parts = _NO_PARTS
) -> tuple[bytes, tuple[str, ...]]:
    """The body without unknown fields, and their paths; the body itself if it has none.

    `parts` are lists in the body whose items have schemas of their own, which their fields tell.

    Raises:
        RequestError: There are too many of them.
    """
    if not parts and _unknown(body, schema) is None:
        return body, ()
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body, ()  # the route refuses it
    ignored: list[str] = []
    _drop_unknown(content, schema, "", ignored)
    for name, schema_of in parts.items():
        items = content.get(name) if isinstance(content, dict) else None
        for place, item in enumerate(items if isinstance(items, list) else ()):
            known = schema_of(item) if isinstance(item, dict) else None
            if known is not None:
                _drop_unknown(item, known, f"{name}[{place}]", ignored)
    return (msgspec.json.encode(content), tuple(ignored)) if ignored else (body, ())


def _drop_unknown(
    content: Any, schema: type[msgspec.Struct], within: str, ignored: list[str]
) -> None:
    """Take the unknown fields out of `content`, which stands at `within`; add their paths."""
    while found := _unknown(content, schema):
        if len(ignored) == _MAX_UNKNOWN:
            raise RequestError(f"the body has more than {_MAX_UNKNOWN} unknown fields")
        name, path = found.group("field"), found.group("path") or ""
        place = _place(content, path)
        if place is None or name not in place:
            return  # the route refuses it by name
        del place[name]
        ignored.append(f"{within}{path}.{name}".removeprefix("."))


def _unknown(content: Any, schema: type[msgspec.Struct]) -> re.Match[str] | None:
    """The first unknown field, None if nothing or something else is wrong."""
    try:
        if isinstance(content, bytes):
            msgspec.json.decode(content, type=schema)
        else:
            msgspec.convert(content, schema)
    except msgspec.ValidationError as error:
        return _UNKNOWN.fullmatch(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None


def _place(content: Any, path: str) -> dict[str, Any] | None:
    """The object at a path such as `.messages[0].content[1]`."""
    end = 0
    for step in _STEP.finditer(path):
        if step.start() != end:
            return None
        end = step.end()
        name, place = step.group("name"), step.group("place")
        try:
            content = content[name] if name is not None else content[int(place)]
        except (KeyError, IndexError, TypeError):
            return None
    return content if end == len(path) and isinstance(content, dict) else None
