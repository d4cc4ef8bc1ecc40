"""Gemma 4's calls: `<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`.

Values are JSON with strings between `<|"|>`, of any characters and without escapes, and with keys
that have no quotes. Strings between `"` are read as well; what is no value is a string. Arguments
are returned as JSON, as they are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NoReturn

from quickstep.text.tool_calls.argument_rules import GEMMA_QUOTE
from quickstep.text.tool_calls.call_grammar import CallSlot, CallSpelling
from quickstep.text.tool_calls.json_text import any_string, known_name
from quickstep.text.tool_calls.python_literals import json_string, series
from quickstep.text.tool_calls.reader import (
    Malformed,
    Markers,
    Parsing,
    Reader,
    calls_in_text,
)

GEMMA_MARKERS = ("<|tool_call>", "<tool_call|>", GEMMA_QUOTE)
GEMMA_SPELLING = CallSpelling(
    call=("<|tool_call>", "call:", CallSlot.NAME, CallSlot.BRACED, "<tool_call|>"),
    openings=("<|tool_call>",),
)
_OPENING, _CLOSING = Markers("<|tool_call>"), Markers("<tool_call|>")
_MAX_DEPTH = 64
_NAME_CHARS = re.compile(r"[A-Za-z0-9_.:/-]++")
_KEY_CHARS = re.compile(r"[^:{}<>\"\n]++")
_OTHER_CHARS = re.compile(r"[^,{}\[\]<>\"]++")


def gemma4(reader: Reader) -> Parsing[None]:
    """Read a message in Gemma 4's format."""
    yield from calls_in_text(reader, _OPENING, _CLOSING, lambda: _call(reader))


def _call(reader: Reader) -> Parsing[None]:
    yield from reader.space()
    yield from reader.expect("call:")
    yield from reader.space()
    name = yield from reader.span(_NAME_CHARS)
    yield from reader.space()
    yield from reader.expect("{")
    reader.begin_call(known_name(name))
    yield from _object(reader, 1)
    reader.end_call()
    yield from reader.space()
    if not (yield from reader.markup("<tool_call|>")) and (yield from reader.peek()):
        raise Malformed


def _object(reader: Reader, depth: int) -> Parsing[None]:
    """The members of an object whose bracket has been read, and its end."""
    comma = "{"

    def member() -> Parsing[None]:
        nonlocal comma
        key = yield from _key(reader)
        yield from reader.space()
        yield from reader.expect(":")
        reader.add_arguments(f"{comma}{json_string(key)}: ")
        comma = ", "
        yield from _value(reader, depth)

    yield from series(reader, "}", member)
    reader.add_arguments("{}" if comma == "{" else "}")


def _key(reader: Reader) -> Parsing[str]:
    """The name of a member. Raises Malformed."""
    if (yield from reader.markup(GEMMA_QUOTE)):
        pieces: list[str] = []
        if (yield from reader.text_until(_Sink(pieces.append), Markers(GEMMA_QUOTE))) is None:
            raise Malformed
        return "".join(pieces)
    if (yield from reader.peek()) == '"':
        mark = reader.mark()
        yield from any_string(reader)
        try:
            return str(json.loads(reader.since(mark), strict=False))
        except ValueError:
            raise Malformed from None
    name = yield from reader.span(_KEY_CHARS)
    if not name.strip():
        raise Malformed
    return name.strip()


def _value(reader: Reader, depth: int) -> Parsing[None]:
    yield from reader.space()
    first = yield from reader.peek()
    if not first or depth > _MAX_DEPTH:
        raise Malformed
    if first == "{":
        reader.take()
        yield from _object(reader, depth + 1)
    elif first == "[":
        reader.take()
        yield from _list(reader, depth)
    elif first == '"':
        yield from reader.arguments(reader.json_string(any_string(reader)))
    elif first == "<":
        yield from reader.expect(GEMMA_QUOTE)
        yield from _string(reader)
    else:
        text = yield from reader.span(_OTHER_CHARS)
        if not (yield from reader.peek()):
            raise Malformed  # the end may have cut it
        reader.add_arguments(_json_of(text.strip()))


def _list(reader: Reader, depth: int) -> Parsing[None]:
    comma = "["

    def item() -> Parsing[None]:
        nonlocal comma
        reader.add_arguments(comma)
        comma = ", "
        yield from _value(reader, depth + 1)

    yield from series(reader, "]", item)
    reader.add_arguments("[]" if comma == "[" else "]")


def _string(reader: Reader) -> Parsing[None]:
    """A string whose opening quote has been read, and its end."""
    reader.add_arguments('"')
    sink = _Sink(lambda text: reader.add_arguments(json_string(text)[1:-1]))
    if (yield from reader.text_until(sink, Markers(GEMMA_QUOTE), may_be_cut=True)) is None:
        raise Malformed
    reader.add_arguments('"')


class _Sink:
    """Gives text to a function."""

    def __init__(self, add: Callable[[str], None]) -> None:
        self._add = add

    def add(self, text: str) -> None:
        """Append text."""
        if text:
            self._add(text)


def _json_of(text: str) -> str:
    """A number or a constant as it is, anything else as a string."""
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return json_string(text)
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
