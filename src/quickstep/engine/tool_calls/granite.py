"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, or the list alone.

Granite 3.0 writes `<tool_call>`; Phi-4 closes with `<|/tool_call|>`. A list without a marker is one
of calls once an object in it has a name and arguments.
"""

from __future__ import annotations

from quickstep.engine.tool_calls.call_grammar import CallSpelling, Slot
from quickstep.engine.tool_calls.json_text import json_calls
from quickstep.engine.tool_calls.reader import Markers, Parsing, Reader, calls_in_text

__all__ = ["GRANITE_MARKERS", "GRANITE_SPELLING", "granite"]

_CLOSING = ("<|/tool_call|>", "</tool_call>")
GRANITE_MARKERS = ("<|tool_call|>", "<tool_call>", *_CLOSING)
GRANITE_SPELLING = CallSpelling(
    begin=("<|tool_call|>", "["),
    call=('{"name": "', Slot.NAME, '", "arguments": ', Slot.ARGUMENTS, "}"),
    separator=(", ",),
    end=("]",),
    openings=("<|tool_call|>", "<tool_call>"),
    anchor=r"\[[ \t\n\r]*\{",
)
_OPENING, _STOPS = Markers("<|tool_call|>", "<tool_call>"), Markers(*_CLOSING)


def granite(reader: Reader) -> Parsing[None]:
    """The grammar of a message."""
    yield from reader.space()
    if (yield from reader.peek()) == "[":
        yield from reader.attempt(_calls(reader, is_marked=False), is_marked=False)
    else:
        reader.reject()
    yield from calls_in_text(reader, _OPENING, _STOPS, lambda: _calls(reader, is_marked=True))


def _calls(reader: Reader, is_marked: bool) -> Parsing[None]:
    yield from reader.space()
    yield from json_calls(reader, _STOPS, is_certain=is_marked)
    yield from reader.space()
    for closing in _CLOSING:
        if (yield from reader.markup(closing)):
            return
