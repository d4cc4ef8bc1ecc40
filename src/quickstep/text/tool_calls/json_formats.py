"""Formats whose calls are a function's name and a JSON object: Hermes, Granite 3, Llama 3, Mistral,
DeepSeek and Kimi K2.

Each section has a format's markers, how it spells calls (for a grammar that forces them) and its
grammar, which reads a message. `formats` lists them by name.
"""

from __future__ import annotations

import re

import msgspec
from msgspec.structs import replace

from quickstep.text.tool_calls.call_grammar import CallSlot, CallSpelling
from quickstep.text.tool_calls.json_text import arguments_text, json_call, json_calls, known_name
from quickstep.text.tool_calls.reader import (
    Found,
    Malformed,
    Markers,
    Parsing,
    Reader,
    calls_in_text,
)

# --- Hermes, Qwen and Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
# The closing tag may be missing at the end of the text, where a stop or a limit removed it.

HERMES_MARKERS = ("<tool_call>", "</tool_call>")
HERMES_SPELLING = CallSpelling(
    call=(
        "<tool_call>",
        '\n{"name": "',
        CallSlot.NAME,
        '", "arguments": ',
        CallSlot.ARGUMENTS,
        "}\n",
        "</tool_call>",
    ),
    separator=("\n",),
    openings=("<tool_call>",),
)
_HERMES_OPENING, _HERMES_CLOSING = Markers("<tool_call>"), Markers("</tool_call>")


def hermes(reader: Reader) -> Parsing[None]:
    """Read a message in Hermes' format."""
    yield from calls_in_text(reader, _HERMES_OPENING, _HERMES_CLOSING, lambda: _hermes_call(reader))


def _hermes_call(reader: Reader) -> Parsing[None]:
    yield from reader.space()
    yield from json_call(reader, _HERMES_CLOSING, is_certain=True)
    yield from reader.space()
    if not (yield from reader.markup("</tool_call>")) and (yield from reader.peek()):
        raise Malformed


# --- Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, or the list without a
# marker, which is a list of calls once an object in it has a name and arguments. Granite 3.0 writes
# `<tool_call>`; Phi-4 closes with `<|/tool_call|>`.

_GRANITE_ENDS = ("<|/tool_call|>", "</tool_call>")
GRANITE_MARKERS = ("<|tool_call|>", "<tool_call>", *_GRANITE_ENDS)
GRANITE_SPELLING = CallSpelling(
    begin=("<|tool_call|>", "["),
    call=('{"name": "', CallSlot.NAME, '", "arguments": ', CallSlot.ARGUMENTS, "}"),
    separator=(", ",),
    end=("]",),
    openings=("<|tool_call|>", "<tool_call>"),
    anchor=r"\[[ \t\n\r]*\{",
)
_GRANITE_OPENING = Markers("<|tool_call|>", "<tool_call>")
_GRANITE_CLOSING = Markers(*_GRANITE_ENDS)


def granite(reader: Reader) -> Parsing[None]:
    """Read a message in Granite 3's format."""
    yield from reader.space()
    if (yield from reader.peek()) == "[":
        yield from reader.attempt(_granite_calls(reader, is_marked=False), is_marked=False)
    else:
        reader.reject()
    yield from calls_in_text(
        reader,
        _GRANITE_OPENING,
        _GRANITE_CLOSING,
        lambda: _granite_calls(reader, is_marked=True),
    )


def _granite_calls(reader: Reader, is_marked: bool) -> Parsing[None]:
    yield from reader.space()
    yield from json_calls(reader, _GRANITE_CLOSING, is_certain=is_marked)
    yield from reader.space()
    for end in _GRANITE_ENDS:
        if (yield from reader.markup(end)):
            return


# --- Llama 3: `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` before it.
# Without the tag the call begins the message. Several calls follow each other, with or without `;`.
# An object with other members than a call's is an answer in JSON, hence content.

_LLAMA_TAGS = ("<|python_tag|>", "<|python_start|>")
LLAMA_MARKERS = (*_LLAMA_TAGS, "<|python_end|>")
LLAMA_SPELLING = CallSpelling(
    call=('{"name": "', CallSlot.NAME, '", "parameters": ', CallSlot.ARGUMENTS, "}"),
    separator=("; ",),
    openings=_LLAMA_TAGS,
    # the first member decides: one that no call has makes the object an answer in JSON
    anchor=r'\{[ \t\n\r]*"((name|parameters|arguments|type|id)"|[^"\\]*\\)',
)
_LLAMA_OPENING, _LLAMA_STOPS = Markers(*_LLAMA_TAGS), Markers(*LLAMA_MARKERS)
_LLAMA_MEMBERS = frozenset({"name", "parameters", "arguments", "type", "id"})


def llama3_json(reader: Reader) -> Parsing[None]:
    """Read a message in Llama 3's JSON format."""
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        yield from _llama_calls(reader, is_tagged=False)
    else:
        reader.reject()
    while (yield from reader.content_until(_LLAMA_OPENING)):
        yield from _llama_calls(reader, is_tagged=True)


def _llama_calls(reader: Reader, is_tagged: bool) -> Parsing[None]:
    found = yield from reader.attempt(_llama_call(reader), is_marked=is_tagged)
    while found is Found.CALLS:
        found = yield from reader.attempt(_next_llama_call(reader), is_marked=True)


def _next_llama_call(reader: Reader) -> Parsing[None]:
    yield from reader.space()
    yield from reader.literal(";")
    yield from reader.space()
    yield from reader.markup(_LLAMA_TAGS[0])
    yield from _llama_call(reader)


def _llama_call(reader: Reader) -> Parsing[None]:
    yield from reader.space()
    yield from json_call(reader, _LLAMA_STOPS, is_certain=False, only=_LLAMA_MEMBERS)
    yield from reader.markup("<|python_end|>")


# --- Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since tokenizer v11
# `[TOOL_CALLS]name[ARGS]{...}`, once per call, with an optional `[CALL_ID]id` before `[ARGS]`.

MISTRAL_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MISTRAL_LISTED = CallSpelling(
    begin=("[TOOL_CALLS]", "["),
    call=('{"name": "', CallSlot.NAME, '", "arguments": ', CallSlot.ARGUMENTS, "}"),
    separator=(", ",),
    end=("]",),
    openings=("[TOOL_CALLS]",),
)
MISTRAL_NAMED = CallSpelling(
    call=("[TOOL_CALLS]", CallSlot.NAME, "[ARGS]", CallSlot.ARGUMENTS), openings=("[TOOL_CALLS]",)
)
_MISTRAL_OPENING = Markers("[TOOL_CALLS]")
_MISTRAL_NAME_CHARS = re.compile(r"[A-Za-z0-9_.-]++")


def mistral(reader: Reader) -> Parsing[None]:
    """Read a message in either of Mistral's formats."""
    while (yield from reader.content_until(_MISTRAL_OPENING)):
        yield from reader.attempt(_mistral_calls(reader), is_marked=True)


def _mistral_calls(reader: Reader) -> Parsing[None]:
    yield from reader.space()
    first = yield from reader.peek()
    if first and first in "[{":
        yield from json_calls(reader, _MISTRAL_OPENING, is_certain=True)
        return
    name = yield from reader.span(_MISTRAL_NAME_CHARS)
    if (yield from reader.markup("[CALL_ID]")):
        yield from reader.span(_MISTRAL_NAME_CHARS)
    has_marker = yield from reader.markup("[ARGS]")
    yield from reader.space()
    if not name or not (has_marker or (yield from reader.peek()) == "{"):
        raise Malformed
    reader.begin_call(name)
    yield from arguments_text(reader, _MISTRAL_OPENING)
    reader.end_call()


# --- DeepSeek and Kimi K2: calls between markers of their own, whose texts `MarkedCalls` has.
# DeepSeek's have a `｜` and a `▁` that are not ASCII. V3 and R1 fence the arguments; V3.1 does not,
# and omits the kind. Kimi K2 numbers the calls of a conversation:
#
#     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
#     ```json
#     {...}
#     ```<｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>
#
#     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜> ...
#
#     <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0
#     <|tool_call_argument_begin|>{...}<|tool_call_end|> ... <|tool_calls_section_end|>


class MarkedCalls(msgspec.Struct, frozen=True):
    """The markers of a format. `is_numbered`: a name has a prefix, and a number after it."""

    begin: str
    call: str
    separator: str
    call_end: str
    end: str
    is_numbered: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them."""
        return (self.begin, self.end, self.call, self.call_end, self.separator)


_BAR = "\uff5c"  # a vertical bar of full width
DEEPSEEK = MarkedCalls(
    begin=f"<{_BAR}tool▁calls▁begin{_BAR}>",
    call=f"<{_BAR}tool▁call▁begin{_BAR}>",
    separator=f"<{_BAR}tool▁sep{_BAR}>",
    call_end=f"<{_BAR}tool▁call▁end{_BAR}>",
    end=f"<{_BAR}tool▁calls▁end{_BAR}>",
)
KIMI = MarkedCalls(
    begin="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    is_numbered=True,
)
DEEPSEEK_PLAIN = CallSpelling(
    begin=(DEEPSEEK.begin,),
    call=(
        *(DEEPSEEK.call, CallSlot.NAME, DEEPSEEK.separator, CallSlot.ARGUMENTS),
        DEEPSEEK.call_end,
    ),
    end=(DEEPSEEK.end,),
    openings=(DEEPSEEK.begin,),
    other_openings=(DEEPSEEK.call,),
)
DEEPSEEK_FENCED = replace(
    DEEPSEEK_PLAIN,
    call=(
        *(DEEPSEEK.call, "function", DEEPSEEK.separator, CallSlot.NAME, "\n```json\n"),
        *(CallSlot.ARGUMENTS, "\n```", DEEPSEEK.call_end),
    ),
    separator=("\n",),
)
KIMI_SPELLING = CallSpelling(
    begin=(KIMI.begin,),
    call=(
        *(KIMI.call, "functions.", CallSlot.NAME, ":", CallSlot.NUMBER, KIMI.separator),
        *(CallSlot.ARGUMENTS, KIMI.call_end),
    ),
    end=(KIMI.end,),
    openings=(KIMI.begin,),
    other_openings=(KIMI.call,),
)
_MARKED_NAME_CHARS = re.compile(r"[^<\s`{}]++")
_NUMBERED_NAME = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")


def marked_calls(reader: Reader, words: MarkedCalls) -> Parsing[None]:
    """Read a message with calls between such markers."""
    openings = Markers(words.begin, words.call)
    while (marker := (yield from reader.content_until(openings))) is not None:
        has_begun = marker == words.call
        while True:
            call = _marked_call(reader, words, has_begun)
            if (yield from reader.attempt(call, is_marked=True)) is not Found.CALLS:
                break
            yield from reader.space()
            if (yield from reader.markup(words.end)):
                reader.drop()
                break
            if not (yield from reader.markup(words.call)):
                reader.reject()
                break
            has_begun = True


def _marked_call(reader: Reader, words: MarkedCalls, has_begun: bool) -> Parsing[None]:
    """`has_begun`: the call's first marker has been read."""
    stops = Markers(words.call, words.call_end, words.end)
    yield from reader.space()
    if not has_begun:
        yield from reader.expect(words.call)
    yield from reader.space()
    name = yield from reader.span(_MARKED_NAME_CHARS)
    yield from reader.space()
    yield from reader.expect(words.separator)
    yield from reader.space()
    if words.is_numbered:
        numbered = _NUMBERED_NAME.fullmatch(name)
        reader.begin_call(known_name("" if numbered is None else numbered[1]))
        yield from arguments_text(reader, stops)
        reader.end_call()
    else:
        yield from _maybe_fenced(reader, name, stops)
    yield from reader.space()
    if not (yield from reader.markup(words.call_end)) and (yield from reader.peek()):
        raise Malformed


def _maybe_fenced(reader: Reader, name: str, stops: Markers) -> Parsing[None]:
    """The rest of a DeepSeek call: its arguments, or its name and its arguments in a fence."""
    fenced = (yield from reader.peek()) != "{"
    if fenced:
        name = yield from reader.span(_MARKED_NAME_CHARS)
        yield from reader.space()
        fenced = yield from reader.markup("```")
        yield from reader.markup("json")
        yield from reader.space()
    if not fenced and (yield from reader.peek()) != "{":
        raise Malformed
    reader.begin_call(known_name(name))
    yield from arguments_text(reader, Markers("```", *stops.texts) if fenced else stops)
    reader.end_call()
    yield from reader.space()
    if fenced:
        yield from reader.markup("```")
