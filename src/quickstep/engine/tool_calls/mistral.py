"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since tokenizer v11
`[TOOL_CALLS]name[ARGS]{...}`, once per call, with an optional `[CALL_ID]id` before `[ARGS]`.
"""

from __future__ import annotations

import re

from quickstep.engine.tool_calls.call_grammar import CallSpelling, Slot
from quickstep.engine.tool_calls.json_text import json_calls, json_object
from quickstep.engine.tool_calls.message_delta import FunctionCall
from quickstep.engine.tool_calls.reader import Malformed, Markers, Parsing, Reader

__all__ = ["MISTRAL_LISTED", "MISTRAL_MARKERS", "MISTRAL_NAMED", "mistral"]

MISTRAL_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MISTRAL_LISTED = CallSpelling(
    begin=("[TOOL_CALLS]", "["),
    call=('{"name": "', Slot.NAME, '", "arguments": ', Slot.ARGUMENTS, "}"),
    separator=(", ",),
    end=("]",),
    openings=("[TOOL_CALLS]",),
)
MISTRAL_NAMED = CallSpelling(
    call=("[TOOL_CALLS]", Slot.NAME, "[ARGS]", Slot.ARGUMENTS), openings=("[TOOL_CALLS]",)
)
_OPENING = Markers("[TOOL_CALLS]")
_WORD_CHARS = re.compile(r"[A-Za-z0-9_.-]++")


def mistral(reader: Reader) -> Parsing[None]:
    """The grammar of a message."""
    while (yield from reader.content_until(_OPENING)):
        yield from reader.attempt(_calls(reader))


def _calls(reader: Reader) -> Parsing[list[FunctionCall]]:
    yield from reader.space()
    first = yield from reader.peek()
    if first in ("[", "{"):
        return (yield from json_calls(reader))
    name = yield from reader.span(_WORD_CHARS)
    if not name:
        raise Malformed
    if (yield from reader.literal("[CALL_ID]")):
        yield from reader.span(_WORD_CHARS)
    yield from reader.literal("[ARGS]")
    yield from reader.space()
    return [FunctionCall(name, (yield from json_object(reader)))]
