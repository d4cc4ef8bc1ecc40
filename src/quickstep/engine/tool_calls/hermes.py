"""Hermes, Qwen and Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The closing tag may be missing at the end of the text, where a stop or a limit took it.
"""

from __future__ import annotations

from quickstep.engine.tool_calls.call_grammar import CallSpelling, Slot
from quickstep.engine.tool_calls.json_text import json_call
from quickstep.engine.tool_calls.reader import (
    Malformed,
    Markers,
    Parsing,
    Reader,
    calls_in_text,
)

__all__ = ["HERMES_MARKERS", "HERMES_SPELLING", "hermes"]

HERMES_MARKERS = ("<tool_call>", "</tool_call>")
HERMES_SPELLING = CallSpelling(
    call=(
        "<tool_call>",
        '\n{"name": "',
        Slot.NAME,
        '", "arguments": ',
        Slot.ARGUMENTS,
        "}\n",
        "</tool_call>",
    ),
    separator=("\n",),
    openings=("<tool_call>",),
)
_OPENING, _CLOSING = Markers("<tool_call>"), Markers("</tool_call>")


def hermes(reader: Reader) -> Parsing[None]:
    """The grammar of a message."""
    yield from calls_in_text(reader, _OPENING, _CLOSING, lambda: _call(reader))


def _call(reader: Reader) -> Parsing[None]:
    yield from reader.space()
    yield from json_call(reader, _CLOSING, is_certain=True)
    yield from reader.space()
    if not (yield from reader.markup("</tool_call>")) and (yield from reader.peek()):
        raise Malformed
