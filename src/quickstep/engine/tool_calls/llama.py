"""Llama 3's JSON: `{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`.

Without the tag the message begins with the call. Several calls follow each other, with or
without `;`. An object with other members than a call's is an answer in JSON, hence content.
"""

from __future__ import annotations

from quickstep.engine.tool_calls.call_grammar import CallSpelling, Slot
from quickstep.engine.tool_calls.json_text import json_call
from quickstep.engine.tool_calls.reader import Found, Markers, Parsing, Reader

__all__ = ["LLAMA_MARKERS", "LLAMA_SPELLING", "llama3_json"]

_TAGS = ("<|python_tag|>", "<|python_start|>")
LLAMA_MARKERS = (*_TAGS, "<|python_end|>")
LLAMA_SPELLING = CallSpelling(
    call=('{"name": "', Slot.NAME, '", "parameters": ', Slot.ARGUMENTS, "}"),
    separator=("; ",),
    openings=_TAGS,
    # the first member tells: others than a call's make it an answer in JSON
    anchor=r'\{[ \t\n\r]*"((name|parameters|arguments|type|id)"|[^"\\]*\\)',
)
_OPENING, _STOPS = Markers(*_TAGS), Markers(*LLAMA_MARKERS)
_MEMBERS = frozenset({"name", "parameters", "arguments", "type", "id"})


def llama3_json(reader: Reader) -> Parsing[None]:
    """The grammar of a message."""
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        yield from _series(reader, is_tagged=False)
    else:
        reader.reject()
    while (yield from reader.content_until(_OPENING)):
        yield from _series(reader, is_tagged=True)


def _series(reader: Reader, is_tagged: bool) -> Parsing[None]:
    found = yield from reader.attempt(_call(reader), is_marked=is_tagged)
    while found is Found.CALLS:
        found = yield from reader.attempt(_next_call(reader), is_marked=True)


def _next_call(reader: Reader) -> Parsing[None]:
    yield from reader.space()
    yield from reader.literal(";")
    yield from reader.space()
    yield from reader.markup(_TAGS[0])
    yield from _call(reader)


def _call(reader: Reader) -> Parsing[None]:
    yield from reader.space()
    yield from json_call(reader, _STOPS, is_certain=False, only=_MEMBERS)
    yield from reader.markup("<|python_end|>")
