"""JSON in a growing text: checked as it is read, and kept as the model spelled it.

A fault is found at its first character, so that what is no call is held no longer than needed.
Strict JSON (RFC 8259), nested at most 64 deep. `json_calls` reads the object or list of
`{"name": ..., "arguments" | "parameters": ...}` that most formats share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NoReturn

from quickstep.engine.tool_calls.message_delta import FunctionCall
from quickstep.engine.tool_calls.reader import Malformed, Parsing, Reader

__all__ = ["call_of", "json_calls", "json_members", "json_object", "known_name"]

_MAX_DEPTH = 64
# whole escapes in one go; one that a delta cuts is read piece by piece
_STRING_CHARS = re.compile(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})++', re.DOTALL)
_NUMBER_CHARS = re.compile(r"[-+.0-9eE]++")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


def json_calls(reader: Reader) -> Parsing[list[FunctionCall]]:
    """One call, or a list of calls that is not empty. Raises Malformed."""
    if (yield from reader.peek()) != "[":
        return [call_of((yield from json_members(reader)))]
    reader.take()
    calls = []
    while True:
        yield from reader.space()
        calls.append(call_of((yield from json_members(reader))))
        yield from reader.space()
        if (yield from reader.literal("]")):
            return calls
        yield from reader.expect(",")


def call_of(members: Mapping[str, str]) -> FunctionCall:
    """The call that an object's members (name to raw text) spell. Raises Malformed."""
    raw = members.get("arguments", members.get("parameters", "{}"))
    return FunctionCall(known_name(_string(members.get("name", ""))), _arguments(raw))


def known_name(name: str) -> str:
    """The name of a function. Raises Malformed for one that cannot be."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Malformed from None
    if not name:
        raise Malformed
    return name


def json_object(reader: Reader) -> Parsing[str]:
    """The text of an object. Raises Malformed."""
    mark = reader.mark()
    yield from _object(reader, 0, None, None)
    return reader.since(mark)


def json_members(reader: Reader, only: frozenset[str] | None = None) -> Parsing[dict[str, str]]:
    """An object's members with their raw texts; Malformed at a name that is not in `only`."""
    members: dict[str, str] = {}
    yield from _object(reader, 0, members, only)
    return members


def _arguments(raw: str) -> str:
    """The JSON text of an object, which some models put into a string."""
    if raw.startswith("{"):
        return raw
    if raw == "null":
        return "{}"
    inner = _string(raw)
    try:
        inner.encode()
        value = json.loads(inner, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    return inner


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _string(raw: str) -> str:
    if not raw.startswith('"'):
        raise Malformed
    return str(json.loads(raw))


def _value(reader: Reader, depth: int) -> Parsing[None]:
    first = yield from reader.peek()
    if not first or depth > _MAX_DEPTH:
        raise Malformed
    if first == "{":
        yield from _object(reader, depth, None, None)
    elif first == "[":
        yield from _array(reader, depth)
    elif first == '"':
        yield from _string_text(reader)
    elif first in "-0123456789":
        if not _NUMBER.fullmatch((yield from reader.span(_NUMBER_CHARS))):
            raise Malformed
    else:
        yield from _word(reader, first)


def _word(reader: Reader, first: str) -> Parsing[None]:
    for word in _WORDS:
        if word[0] == first:
            yield from reader.expect(word)
            return
    raise Malformed


def _object(
    reader: Reader, depth: int, members: dict[str, str] | None, only: frozenset[str] | None
) -> Parsing[None]:
    yield from reader.expect("{")
    yield from reader.space()
    if (yield from reader.literal("}")):
        return
    while True:
        mark = reader.mark()
        yield from _string_text(reader)
        name = reader.since(mark) if members is not None else ""
        if only is not None and _string(name) not in only:
            raise Malformed
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        mark = reader.mark()
        yield from _value(reader, depth + 1)
        if members is not None:
            members[_string(name)] = reader.since(mark)
        yield from reader.space()
        if (yield from reader.literal("}")):
            return
        yield from reader.expect(",")
        yield from reader.space()


def _array(reader: Reader, depth: int) -> Parsing[None]:
    yield from reader.expect("[")
    yield from reader.space()
    if (yield from reader.literal("]")):
        return
    while True:
        yield from _value(reader, depth + 1)
        yield from reader.space()
        if (yield from reader.literal("]")):
            return
        yield from reader.expect(",")
        yield from reader.space()


def _string_text(reader: Reader) -> Parsing[None]:
    yield from reader.expect('"')
    while True:
        yield from reader.span(_STRING_CHARS)
        if (yield from reader.literal('"')):
            return
        yield from reader.expect("\\")
        yield from _escape(reader)


def _escape(reader: Reader) -> Parsing[None]:
    char = yield from reader.peek()
    if not char or char not in '"\\/bfnrtu':
        raise Malformed
    reader.take()
    if char != "u":
        return
    for _ in range(4):
        if (yield from reader.peek()) not in _HEX_DIGITS:
            raise Malformed
        reader.take()
