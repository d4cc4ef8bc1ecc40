"""Pythonic calls of Llama and LFM2: `[f(a=1), g(b="x", c=[True, None])]`, Python literals only.

The list follows a marker; Llama's may also begin the message without one. It is a list of calls
once a call in it has a keyword followed by a literal, or closes. Arguments become JSON, value by
value; after a value that is no literal they stay as the model wrote them.
"""

from __future__ import annotations

import re

import msgspec

from quickstep.text.tool_calls.call_grammar import CallSlot, CallSpelling
from quickstep.text.tool_calls.python_literals import (
    KEYWORD_CHARS,
    json_of,
    json_string,
    series,
)
from quickstep.text.tool_calls.reader import (
    Malformed,
    Markers,
    Parsing,
    Reader,
    calls_in_text,
)


class ListMarkers(msgspec.Struct, frozen=True):
    """The markers around a list of calls. `may_lack_opening`: it may begin the message."""

    opening: str
    closing: str
    may_lack_opening: bool = False


PYTHONIC = ListMarkers("<|python_start|>", "<|python_end|>", may_lack_opening=True)
LFM2 = ListMarkers("<|tool_call_start|>", "<|tool_call_end|>")
PYTHONIC_SPELLING = CallSpelling(
    begin=("[",),
    call=(CallSlot.NAME, "(", CallSlot.KEYWORDS, ")"),
    separator=(", ",),
    end=("]",),
    openings=(PYTHONIC.opening,),
    anchor=r"\[[ \t\n\r]*[A-Za-z_][A-Za-z0-9_.-]*\(",
)
LFM2_SPELLING = CallSpelling(
    begin=(LFM2.opening, "["),
    call=PYTHONIC_SPELLING.call,
    separator=(", ",),
    end=("]", LFM2.closing),
    openings=(LFM2.opening,),
)
_NAME_CHARS = re.compile(r"[A-Za-z0-9_.-]++")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_VALUE_START = re.compile(r"[-+.0-9'\"\[({TFNtfn]")


def pythonic(reader: Reader, markers: ListMarkers) -> Parsing[None]:
    """Read a message with lists of calls between such markers."""
    opening, closing = Markers(markers.opening), Markers(markers.closing)
    if markers.may_lack_opening:
        yield from reader.space()
        if (yield from reader.peek()) == "[":
            yield from reader.attempt(_calls(reader, closing), is_marked=False)
        else:
            reader.reject()
    yield from calls_in_text(reader, opening, closing, lambda: _calls(reader, closing))


def _calls(reader: Reader, closing: Markers) -> Parsing[None]:
    num_calls = 0

    def call() -> Parsing[None]:
        nonlocal num_calls
        num_calls += 1
        yield from _call(reader, closing)

    yield from reader.space()
    yield from reader.expect("[")
    yield from series(reader, "]", call)
    if not num_calls:
        raise Malformed
    yield from reader.markup(closing.texts[0])


def _call(reader: Reader, closing: Markers) -> Parsing[None]:
    name = yield from reader.span(_NAME_CHARS)
    if not _NAME.fullmatch(name):
        raise Malformed
    yield from reader.expect("(")
    arguments = "{"  # the JSON text that is next, before a value

    def argument() -> Parsing[None]:
        nonlocal arguments
        keyword = yield from reader.span(KEYWORD_CHARS)
        if not keyword.isidentifier():
            raise Malformed
        yield from reader.space()
        yield from reader.expect("=")
        yield from reader.space()
        if arguments == "{":
            if not _VALUE_START.match((yield from reader.peek())):
                raise Malformed
            reader.begin_call(name)
        key, arguments = f"{arguments}{json_string(keyword)}: ", ", "
        reader.add_arguments(key)
        mark = reader.mark()
        try:
            value = yield from json_of(reader, 0)
        except Malformed:
            reader.add_arguments(reader.since(mark))
            yield from reader.arguments(reader.take_until(closing))
            raise
        reader.add_arguments(value)

    yield from series(reader, ")", argument)
    if arguments == "{":
        reader.begin_call(name)
        reader.add_arguments("{")
    reader.add_arguments("}")
    reader.end_call()
