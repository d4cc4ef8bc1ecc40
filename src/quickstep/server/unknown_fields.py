"""`--unknown-fields warn`: a body without the fields that its schema does not have.

The schema itself says what is unknown, at any depth: the body is converted again and again, each
time without the field that was refused. What else is wrong with it stays, for the route to say.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from quickstep.errors import RequestError

__all__ = ["known_part"]

_UNKNOWN = re.compile(
    r"Object contains unknown field `(?P<field>.*?)`(?: - at `\$(?P<path>.*)`)?", re.DOTALL
)
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<place>\d+)\]")
_MAX_UNKNOWN = 64


def known_part(body: bytes, schema: type[msgspec.Struct]) -> tuple[bytes, tuple[str, ...]]:
    """The body without unknown fields, and their paths; the body itself if it has none.

    Raises:
        RequestError: There are too many of them.
    """
    if _unknown(body, schema) is None:
        return body, ()
    content = msgspec.json.decode(body)
    ignored: list[str] = []
    while found := _unknown(content, schema):
        if len(ignored) == _MAX_UNKNOWN:
            raise RequestError(f"the body has more than {_MAX_UNKNOWN} unknown fields")
        name, path = found.group("field"), found.group("path") or ""
        place = _place(content, path)
        if place is None or name not in place:
            break  # the route refuses it by name
        del place[name]
        ignored.append(f"{path}.{name}".removeprefix("."))
    return msgspec.json.encode(content), tuple(ignored)


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
