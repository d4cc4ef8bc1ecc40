"""JSON in a growing text: calls whose arguments are returned as they are read.

The JSON around the arguments is checked as it is read, so that an error is found at its first
character, and text that is no call is held back no longer than needed: strict JSON (RFC 8259),
nested at most 64 deep. The arguments are the model's own text, whatever it is: they end where their
brackets do. Only raw control characters in their strings are escaped, and no arguments are `{}`.
`json_calls` reads the object or list of `{"name": ..., "arguments" | "parameters": ...}` that most
formats have in common.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from quickstep.text.tool_calls.reader import Malformed, Markers, Parsing, Reader

_MAX_DEPTH = 64
# matches complete escapes; one that a delta cuts is read piece by piece
_STRING_CHARS = re.compile(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})++', re.DOTALL)
_NUMBER_CHARS = re.compile(r"[-+.0-9eE]++")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CONSTANTS = ("true", "false", "null")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_ARGUMENTS = ("arguments", "parameters")
# of arguments: any string, and what is neither a bracket, a quote, a comma nor a marker's beginning
_ANY_STRING_CHARS = re.compile(r'(?:[^"\\]|\\.)++', re.DOTALL)
_OTHER_CHARS = re.compile(r'[^]["{}<,]++')


def json_calls(reader: Reader, stops: Markers, is_certain: bool) -> Parsing[None]:
    """Read one call, or a non-empty list of calls; the parameters are those of `json_call`."""
    if (yield from reader.peek()) != "[":
        yield from json_call(reader, stops, is_certain)
        return
    reader.take()
    while True:
        yield from reader.space()
        yield from json_call(reader, stops, is_certain)
        yield from reader.space()
        if (yield from reader.literal("]")):
            return
        yield from reader.expect(",")


def json_call(
    reader: Reader, stops: Markers, is_certain: bool, only: frozenset[str] | None = None
) -> Parsing[None]:
    """Read one call: an object with its name and its arguments. Raises Malformed.

    `stops` are markers that end arguments whose brackets are still open. `is_certain`: the object
    can only be a call, which begins with its name; otherwise the call begins when the bracket of
    its arguments is read. `only` are the members that a call may have, None for any; if set, the
    call must have arguments.
    """
    name, held = "", None
    has_begun = has_arguments = False
    yield from reader.expect("{")
    yield from reader.space()
    while True:
        key = yield from _string(reader)
        if only is not None and key not in only:
            raise Malformed
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if key == "name" and not name:
            name = known_name((yield from _string(reader)))
            if is_certain:
                reader.begin_call(name)
                has_begun = True
                if held is not None:
                    reader.add_arguments(_unquoted(held))
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            is_object = (yield from reader.peek()) == "{"
            if name and is_object and not has_begun:
                reader.begin_call(name)
                has_begun = True
            if has_begun and is_object:
                yield from reader.arguments(_any_value(reader, stops))
            else:
                mark = reader.mark()
                yield from _any_value(reader, stops) if has_begun else _value(reader, 1)
                held = reader.since(mark)
                if has_begun:
                    reader.add_arguments(_unquoted(held))
        else:
            yield from _value(reader, 1)
        yield from reader.space()
        if (yield from reader.literal("}")):
            break
        yield from reader.expect(",")
        yield from reader.space()
    if not has_begun:
        if not name or (only is not None and not has_arguments):
            raise Malformed
        arguments = _object_text(held or "{}")
        reader.begin_call(name)
        reader.add_arguments(arguments)
    elif not has_arguments:
        reader.add_arguments("{}")
    reader.end_call()


def known_name(name: str) -> str:
    """Return the name of a function. Raises Malformed for an impossible one."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Malformed from None
    if not name:
        raise Malformed
    return name


def arguments_text(reader: Reader, stops: Markers) -> Parsing[None]:
    """Read the arguments of the open call: an object, or any text up to one of `stops`."""
    is_object = (yield from reader.peek()) == "{"
    if not is_object and (yield from reader.at_marker(stops)):
        reader.add_arguments("{}")
        return
    text = _any_value(reader, stops) if is_object else reader.take_until(stops)
    yield from reader.arguments(text)


def _any_value(reader: Reader, stops: Markers) -> Parsing[None]:
    """Take a value, well formed or not: to the end of its brackets, to a stop or to the end."""
    depth = 0
    while True:
        yield from reader.span(_OTHER_CHARS)
        char = yield from reader.peek()
        if not char or (char in "[<" and (yield from reader.at_marker(stops))):
            return
        if char == '"':
            yield from reader.json_string(any_string(reader))
        elif depth or char in "[{<":
            reader.take()
            depth += (char in "[{") - (char in "]}")
        else:
            return
        if not depth and char in '"]}':
            return


def any_string(reader: Reader) -> Parsing[None]:
    reader.take()
    while True:
        yield from reader.span(_ANY_STRING_CHARS)
        char = yield from reader.peek()
        if not char:
            return
        reader.take()
        if char == '"':
            return
        if (yield from reader.peek()):
            reader.take()


def _unquoted(raw: str) -> str:
    """The text of arguments: some models put it into a string, also if there are none."""
    raw = raw.strip()
    if not raw:
        return raw  # the end of the text cut them
    if raw.startswith('"'):
        try:
            inner = json.loads(raw, strict=False)
            inner.encode()
        except ValueError:
            return raw
        raw = str(inner)
    return "{}" if raw.strip() in ("", "null") else _without_control_chars(raw)


def _without_control_chars(text: str) -> str:
    """The text, written anew if it is JSON but for raw control characters in its strings."""
    try:
        json.loads(text)
    except RecursionError:
        return text
    except ValueError:
        try:
            return json.dumps(json.loads(text, strict=False), ensure_ascii=False)
        except (ValueError, RecursionError):
            return text
    return text


def _object_text(raw: str) -> str:
    """`_unquoted`, of arguments that must be an object. Raises Malformed if they are not."""
    text = _unquoted(raw)
    try:
        text.encode()
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _string(reader: Reader) -> Parsing[str]:
    """Read a string and return its value."""
    mark = reader.mark()
    yield from _string_text(reader)
    return str(json.loads(reader.since(mark)))


def _value(reader: Reader, depth: int) -> Parsing[None]:
    first = yield from reader.peek()
    if not first or depth > _MAX_DEPTH:
        raise Malformed
    if first == "{":
        yield from _object(reader, depth)
    elif first == "[":
        yield from _array(reader, depth)
    elif first == '"':
        yield from _string_text(reader)
    elif first in "-0123456789":
        if not _NUMBER.fullmatch((yield from reader.span(_NUMBER_CHARS))):
            raise Malformed
    else:
        constant = next((text for text in _CONSTANTS if text[0] == first), None)
        if constant is None:
            raise Malformed
        yield from reader.expect(constant)


def _object(reader: Reader, depth: int) -> Parsing[None]:
    yield from reader.expect("{")
    yield from reader.space()
    if (yield from reader.literal("}")):
        return
    while True:
        yield from _string_text(reader)
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        yield from _value(reader, depth + 1)
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
