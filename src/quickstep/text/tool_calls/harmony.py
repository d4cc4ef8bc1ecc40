"""gpt-oss's harmony: a message is a series of parts, each with a header and a body.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}
    <|start|>assistant<|channel|>final<|message|>CONTENT

The prompt ends in `<|start|>assistant`, so the output starts inside a header; `<|call|>` and
`<|return|>` are end tokens, hence usually absent. The recipient may precede the channel.
"""

from __future__ import annotations

import re

import msgspec

from quickstep.text.tool_calls.call_grammar import CallSlot, CallSpelling
from quickstep.text.tool_calls.json_text import arguments_text, known_name
from quickstep.text.tool_calls.reader import Found, Malformed, Markers, Parsing, Reader

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKERS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
# from the beginning of the reasoning to that of the answer
HARMONY_PASSAGE = (f"{_CHANNEL}analysis", f"{_CHANNEL}final", _MESSAGE)
# one call ends the message: `<|call|>` is an end token
HARMONY_SPELLING = CallSpelling(
    call=(
        _CHANNEL,
        "commentary to=functions.",
        CallSlot.NAME,
        " ",
        _CONSTRAIN,
        "json",
        _MESSAGE,
        CallSlot.ARGUMENTS,
    ),
    thoughts=((_CHANNEL, "analysis", _MESSAGE), ("<|end|>", _START, "assistant")),
    repeats=False,
    other_openings=(_START, _CHANNEL, *_ENDS),
)
_OPENING = Markers(_START, _CHANNEL)
_CLOSING = Markers(_START, _CHANNEL, *_ENDS)
_HEADER_CHARS = re.compile(r"[^<\n]++")
_RECIPIENT = "to="
_FUNCTIONS = "functions."


class _Header(msgspec.Struct, frozen=True):
    channel: str
    recipient: str


def harmony(reader: Reader, with_tools: bool) -> Parsing[None]:
    """Read a message in harmony. Without tools a call is content."""
    reader.reasoning.cut()
    reader.content.cut()
    yield from reader.space()
    marker: str | None = None
    if (yield from reader.literal(_RECIPIENT)):
        marker = _RECIPIENT
    else:
        reader.reject()
        marker = yield from reader.content_until(_OPENING)
    while marker is not None:
        marker = yield from _part(reader, marker, with_tools)


def _part(reader: Reader, marker: str, with_tools: bool) -> Parsing[str | None]:
    """Read the part that follows `marker`. Returns the marker of the next part, or None."""
    header = _Header("", "")

    def headed() -> Parsing[None]:
        nonlocal header
        header = yield from _header(reader, marker)
        if header.recipient:
            yield from _call(reader, header.recipient, with_tools)

    section = reader.content
    found = yield from reader.attempt(headed(), is_marked=True)
    if found is Found.CALLS and not header.recipient:
        section = reader.reasoning if header.channel == "analysis" else reader.content
        section.break_line()
    reader.in_reasoning = section is reader.reasoning
    closing = yield from reader.text_until(section, _CLOSING)
    reader.in_reasoning = False
    if closing in _ENDS:
        reader.drop()
        reader.reasoning.cut()
        closing = yield from reader.content_until(_OPENING)
    return closing


def _header(reader: Reader, marker: str) -> Parsing[_Header]:
    """Read text and markers up to `<|message|>`. Raises Malformed."""
    channel, recipient = "", ""
    text = yield from reader.span(_HEADER_CHARS)
    if marker == _RECIPIENT:
        text = _RECIPIENT + text
    while True:
        for part in text.split():
            if part.startswith(_RECIPIENT):
                recipient = part.removeprefix(_RECIPIENT)
            elif marker == _CHANNEL and not channel:
                channel = part
        if (yield from reader.markup(_MESSAGE)):
            return _Header(channel, recipient)
        if (yield from reader.markup(_CHANNEL)):
            marker = _CHANNEL
        else:
            yield from reader.expect(_CONSTRAIN)
            marker = _CONSTRAIN
        text = yield from reader.span(_HEADER_CHARS)


def _call(reader: Reader, recipient: str, with_tools: bool) -> Parsing[None]:
    if not with_tools or not recipient.startswith(_FUNCTIONS):
        raise Malformed
    reader.begin_call(known_name(recipient.removeprefix(_FUNCTIONS)))
    yield from reader.space()
    yield from arguments_text(reader, _CLOSING)
    reader.end_call()
    yield from reader.space()
