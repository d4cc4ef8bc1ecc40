"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, or the list alone.

Granite 3.0 writes `<tool_call>`; Phi-4 closes with `<|/tool_call|>`. A list counts as a whole.
"""

from __future__ import annotations

from quickstep.engine.tool_calls.call_grammar import CallSpelling, Slot
from quickstep.engine.tool_calls.json_text import json_calls
from quickstep.engine.tool_calls.message_delta import FunctionCall
from quickstep.engine.tool_calls.reader import Markers, Parsing, Reader

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
_OPENING = Markers("<|tool_call|>", "<tool_call>")


def granite(reader: Reader) -> Parsing[None]:
    """The grammar of a message."""
    yield from reader.space()
    if (yield from reader.peek()) == "[":
        yield from reader.attempt(_calls(reader))
    else:
        reader.reject()
    while (yield from reader.content_until(_OPENING)):
        yield from reader.attempt(_calls(reader))


def _calls(reader: Reader) -> Parsing[list[FunctionCall]]:
    yield from reader.space()
    calls = yield from json_calls(reader)
    yield from reader.space()
    for closing in _CLOSING:
        if (yield from reader.literal(closing)):
            break
    return calls
