"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since tokenizer v11
`[TOOL_CALLS]name[ARGS]{...}`, once per call, with an optional `[CALL_ID]id` before `[ARGS]`.
"""

from __future__ import annotations

import re

from quickstep.engine.tool_calls.call_grammar import CallSpelling, Slot
from quickstep.engine.tool_calls.json_text import arguments_text, json_calls
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
        yield from reader.attempt(_calls(reader), is_marked=True)


def _calls(reader: Reader) -> Parsing[None]:
    yield from reader.space()
    first = yield from reader.peek()
    if first and first in "[{":
        yield from json_calls(reader, _OPENING, is_certain=True)
        return
    name = yield from reader.span(_WORD_CHARS)
    if (yield from reader.markup("[CALL_ID]")):
        yield from reader.span(_WORD_CHARS)
    has_marker = yield from reader.markup("[ARGS]")
    yield from reader.space()
    if not name or not (has_marker or (yield from reader.peek()) == "{"):
        raise Malformed
    reader.begin_call(name)
    yield from arguments_text(reader, _OPENING)
    reader.end_call()
