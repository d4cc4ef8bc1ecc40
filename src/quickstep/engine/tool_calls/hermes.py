"""Hermes, Qwen and Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The closing tag may be missing at the end of the text, where a stop or a limit took it.
"""

from __future__ import annotations

from quickstep.engine.tool_calls.call_grammar import CallSpelling, Slot
from quickstep.engine.tool_calls.json_text import call_of, json_members
from quickstep.engine.tool_calls.message_delta import FunctionCall
from quickstep.engine.tool_calls.reader import Malformed, Markers, Parsing, Reader

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
_OPENING = Markers("<tool_call>")


def hermes(reader: Reader) -> Parsing[None]:
    """The grammar of a message."""
    while (yield from reader.content_until(_OPENING)):
        yield from reader.attempt(_call(reader))


def _call(reader: Reader) -> Parsing[list[FunctionCall]]:
    yield from reader.space()
    call = call_of((yield from json_members(reader)))
    yield from reader.space()
    if not (yield from reader.literal("</tool_call>")) and (yield from reader.peek()):
        raise Malformed
    return [call]
