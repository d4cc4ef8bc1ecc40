"""A JSON body, a query or a form as a typed value, or a `RequestError` that names the field."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from quickstep.errors import RequestError

_Schema = TypeVar("_Schema", bound=msgspec.Struct)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>.*)`$", re.DOTALL)
_NAMED_FIELD = re.compile(r"field `(?P<field>.*)`$", re.DOTALL)


def decode(body: bytes, schema: type[_Schema]) -> _Schema:
    """A body that may have known fields only, typed. Raises RequestError that names the field."""
    try:
        return msgspec.json.decode(body.decode(), type=schema)
    except msgspec.ValidationError as error:
        raise validation_error(error, schema) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_json(error, body) from None


def decode_values(values: Mapping[str, object], schema: type[_Schema]) -> _Schema:
    """The typed fields of a query or a form, in which numbers are strings. Raises RequestError."""
    try:
        return msgspec.convert(dict(values), schema, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(error, schema) from None


def invalid_json(error: Exception, body: bytes) -> RequestError:
    """What is wrong with a body that is no JSON text, or one that is nested too deeply."""
    if isinstance(error, RecursionError):
        return RequestError("the body's JSON is nested too deeply")
    path = _path_of_half_pair(body)
    if path is not None:
        return RequestError(
            f"{path or 'the body'} holds half a surrogate pair, which is not Unicode text; send "
            "both halves, or U+FFFD instead",
            param=path or None,
        )
    return RequestError(f"the body is not valid JSON: {error}")


def _path_of_half_pair(body: bytes) -> str | None:
    """The path of the first string with half a surrogate pair; None if there is none.

    JSON can spell such a string, and Python's decoder reads it where ours reports an odd error.
    """
    if _SURROGATE.search(body) is None:
        return None
    try:
        found: list[tuple[str, object]] = [("", json.loads(body))]
    except (ValueError, RecursionError):
        return None
    while found:
        path, value = found.pop()
        if isinstance(value, dict):
            if any(map(_has_surrogate, value)):
                return path
            inner = [(f"{path}.{name}".removeprefix("."), each) for name, each in value.items()]
            found += reversed(inner)
        elif isinstance(value, list):
            found += reversed([(f"{path}[{index}]", each) for index, each in enumerate(value)])
        elif isinstance(value, str) and _has_surrogate(value):
            return path
    return None


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def unknown_field(path: str, schema: type[msgspec.Struct], within: str = "") -> RequestError:
    """A field that `schema`, which is at `within` in the body, does not have."""
    name = path.removeprefix(f"{within}.")
    near = difflib.get_close_matches(name, schema.__struct_fields__, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return RequestError(f"{path} is unknown{hint}", param=path)


def validation_error(
    error: msgspec.ValidationError, schema: type[msgspec.Struct], within: str = ""
) -> RequestError:
    """Msgspec's sentence as ours: unknown, missing or of a wrong type, and where."""
    text = str(error)
    at = _PATH.search(text)
    path = ".".join(part for part in (within, at.group("path") if at else "") if part)
    reason = text[: at.start()] if at else text
    field = _NAMED_FIELD.search(reason)
    if field:
        path = f"{path}.{field.group('field')}" if path else field.group("field")
        if "unknown" in reason:
            return unknown_field(path, schema, within)
        return RequestError(f"{path} is missing", param=path)
    where = f"{path}: " if path else "the body: "
    return RequestError(f"{where}{reason[:1].lower()}{reason[1:]}", param=path or None)
