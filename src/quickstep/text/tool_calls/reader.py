"""Parses a message that arrives in pieces: `MessageParser`, and the `Reader` that formats use.

    text deltas -> MessageParser -> content, reasoning, tool calls
                        |
                  a format's grammar over a Reader

A format's grammar is a generator over a `Reader`. The reader's methods yield when they need more
text, so a format is written like a parser of the complete text, and the split into deltas has no
effect. Nothing looks further ahead than one marker, and nothing is read twice: time is linear in
the text.

What a format reads is *taken* until it is known what it is. `begin_call` makes it markup: from
there on the arguments are returned as they are read. `reject` turns it into content, so that no
text is lost that looked like a call and is none; but markup that the end of the text cut is
dropped.

    content_until(marker) -> attempt(format's call) -> content_until(marker) -> ...
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol, TypeVar

from quickstep.text.tool_calls.message_delta import (
    CallDelta,
    ContentDelta,
    MessageDelta,
    MessagePart,
    ReasoningDelta,
    Section,
    joined,
)

_T = TypeVar("_T")
Parsing = Generator[None, None, _T]

_SPACE = re.compile(r"[ \t\n\r]++")
_CONTROL_CHAR = re.compile(r"[\x00-\x1f]")


class Malformed(Exception):
    """What was taken is not a call after all, or not the rest of one."""


class Found(enum.Enum):
    """The result of an attempt to read calls."""

    CALLS = "calls"
    BROKEN_CALLS = "broken calls"  # they had begun
    NO_CALL = "no call"


class Markers:
    """Texts to look for. None of them contains another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.pattern = re.compile("|".join(map(re.escape, texts)))
        self._first_chars = frozenset(text[0] for text in texts)
        self._longest = max(map(len, texts))

    def starts_at(self, text: str, start: int, is_end: bool, least_cut: int = 2) -> bool | None:
        """Whether one of them begins at `start`; None if it takes more text to know.

        At the end of the text it may be cut, but not below `least_cut` characters.
        """
        if self.pattern.match(text, start):
            return True
        rest = text[start : start + self._longest]
        may_be = any(marker.startswith(rest) for marker in self.texts)
        if is_end:
            return may_be and len(rest) >= least_cut
        return None if may_be else False

    def undecided_from(self, text: str, start: int) -> int:
        """Where the end of `text` begins that may yet become a marker; its length if none does."""
        for place in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[place] in self._first_chars:
                end = text[place:]
                if any(marker.startswith(end) for marker in self.texts):
                    return place
        return len(text)


class TextSink(Protocol):
    """Takes text as it is read: a section of the message, or a value of a call's arguments."""

    def add(self, text: str) -> None:
        """Append text."""


class Reader:
    """The text of one message. The parser pushes text and drains deltas, the grammar reads.

    `parameters` has the schemas of the functions that were offered, by name.
    """

    def __init__(
        self,
        new_call_id: Callable[[], str],
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.parameters = parameters or {}
        self._parts: list[MessagePart] = []
        self.content = Section(lambda text: self._parts.append(ContentDelta(text)))
        self.reasoning = Section(lambda text: self._parts.append(ReasoningDelta(text)))
        self.in_reasoning = False  # whether what is read next is reasoning
        self._new_call_id = new_call_id
        self._text = ""
        self._at = 0
        self._ended = False
        self._taken: list[str] = []
        self._num_calls = 0
        self._has_open_call = False
        self._in_arguments = False
        self._in_json_string = False

    def push(self, text: str) -> None:
        """Add text. The part of the earlier text that is not read yet is shorter than a marker."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No text follows."""
        self._ended = True

    def drain(self) -> MessageDelta:
        """What became certain since the last call."""
        parts = joined(self._parts)
        self._parts.clear()
        return MessageDelta(parts)

    @property
    def is_at_end(self) -> bool:
        """Whether all text that there is has been read."""
        return self._at == len(self._text)

    def peek(self) -> Parsing[str]:
        """The next character, "" at the end; takes nothing."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self) -> None:
        """Take the character that `peek` returned."""
        self._take_to(self._at + 1)

    def literal(self, text: str) -> Parsing[bool]:
        """Take `text` if it is next. Returns whether it was."""
        while True:
            seen = self._text[self._at : self._at + len(text)]
            if seen == text:
                self._take_to(self._at + len(text))
                return True
            if self._ended or not text.startswith(seen):
                return False
            yield

    def markup(self, text: str) -> Parsing[bool]:
        """`literal` of a part of a call, which the end of the text may cut short."""
        if (yield from self.literal(text)):
            return True
        rest = self._text[self._at : self._at + len(text)]
        if not self._ended or not rest or not text.startswith(rest):
            return False
        self._take_to(len(self._text))
        return True

    def expect(self, text: str) -> Parsing[None]:
        """Take `text`. Raises Malformed if something else is next."""
        if not (yield from self.markup(text)):
            raise Malformed

    def at_marker(self, markers: Markers, least_cut: int = 2) -> Parsing[bool]:
        """Whether one of `markers` is next, at the end of the text maybe cut, but not below
        `least_cut` characters; takes nothing.
        """
        while True:
            found = markers.starts_at(self._text, self._at, self._ended, least_cut)
            if found is not None:
                return found
            yield

    def span(self, chars: re.Pattern[str]) -> Parsing[str]:
        """Take the longest run that `chars` matches; it matches any part of a run as well."""
        parts = []
        while True:
            match = chars.match(self._text, self._at)
            if match is not None:
                parts.append(match.group())
                self._take_to(match.end())
            if self._at < len(self._text) or self._ended:
                return "".join(parts)
            yield

    def space(self) -> Parsing[None]:
        """Take white space."""
        yield from self.span(_SPACE)

    def text_until(
        self, section: TextSink, markers: Markers, may_be_cut: bool = False
    ) -> Parsing[str | None]:
        """Add the text up to a marker to `section`, and take the marker. None: the text ended.

        `may_be_cut`: what the end of the text left of a marker is no part of the section.
        """
        while True:
            match = markers.pattern.search(self._text, self._at)
            if match is not None:
                section.add(self._text[self._at : match.start()])
                self._at = match.start()
                self._take_to(match.end())
                return match.group()
            decided = len(self._text)
            if may_be_cut or not self._ended:
                decided = markers.undecided_from(self._text, self._at)
            section.add(self._text[self._at : decided])
            self._at = decided
            if self._ended:
                self._at = len(self._text)
                return None
            yield

    def take_until(self, markers: Markers) -> Parsing[None]:
        """Take the text up to a marker, which is not taken, or up to the end."""
        while True:
            match = markers.pattern.search(self._text, self._at)
            if match is not None:
                self._take_to(match.start())
                return
            decided = len(self._text)
            if not self._ended:
                decided = markers.undecided_from(self._text, self._at)
            self._take_to(decided)
            if self._ended:
                return
            yield

    def content_until(self, markers: Markers) -> Parsing[str | None]:
        """`text_until` with the content as its section."""
        return (yield from self.text_until(self.content, markers))

    def content_to_end(self) -> Parsing[None]:
        """Add everything that follows to the content."""
        while True:
            self.content.add(self._text[self._at :])
            self._at = len(self._text)
            if self._ended:
                return
            yield

    def mark(self) -> int:
        """The current position in the taken text, for `since`."""
        return len(self._taken)

    def since(self, mark: int) -> str:
        """The text taken since `mark`."""
        return "".join(self._taken[mark:])

    def begin_call(self, name: str) -> None:
        """Begin a call of the function `name`: the taken text is its markup."""
        self.drop()
        call_id = self._new_call_id()
        self._parts.append(CallDelta(self._num_calls, call_id=call_id, name=name))
        self._num_calls += 1
        self._has_open_call = True

    def arguments(self, parsing: Parsing[None]) -> Parsing[None]:
        """What `parsing` takes is the text of the open call's arguments; it is returned at once."""
        self._taken.clear()
        self._in_arguments = True
        try:
            yield from parsing
        finally:
            self._in_arguments = False

    def json_string(self, parsing: Parsing[None]) -> Parsing[None]:
        """What `parsing` takes is a JSON string: in arguments, raw control characters of it are
        escaped, since no client could read them.
        """
        self._in_json_string = True
        try:
            yield from parsing
        finally:
            self._in_json_string = False

    def add_arguments(self, text: str) -> None:
        """Append `text` to the arguments of the open call, in place of the taken text."""
        self._taken.clear()
        self._parts.append(CallDelta(self._num_calls - 1, text))

    def end_call(self) -> None:
        """End the open call; what was taken after its arguments is markup."""
        self.drop()
        self._close_call()

    def attempt(self, parsing: Parsing[None], is_marked: bool) -> Parsing[Found]:
        """Read calls. Where `parsing` raises Malformed, text that is part of no call is content.

        `is_marked`: a marker of calls precedes. Text that the end cuts there is dropped, because
        it can only be markup.
        """
        num_calls = self._num_calls
        try:
            yield from parsing
        except Malformed:
            if self._has_open_call:
                self._close_call()
            has_begun = self._num_calls > num_calls
            is_cut = self._ended and self._at == len(self._text)
            if is_cut and (is_marked or has_begun):
                self.drop()
            else:
                self.reject()
            return Found.BROKEN_CALLS if has_begun else Found.NO_CALL
        self.drop()
        return Found.CALLS

    def reject(self) -> None:
        """Make the taken text content."""
        self.content.add("".join(self._taken))
        self._taken.clear()

    def drop(self) -> None:
        """Drop the taken text: it is markup between pieces of content."""
        self._taken.clear()
        self.content.cut()

    def _close_call(self) -> None:
        self._parts.append(CallDelta(self._num_calls - 1, is_last=True))
        self._has_open_call = False

    def _take_to(self, end: int) -> None:
        text = self._text[self._at : end]
        self._at = end
        if not self._in_arguments:
            self._taken.append(text)
        elif text:
            if self._in_json_string:
                text = _CONTROL_CHAR.sub(_escaped, text)
            self._parts.append(CallDelta(self._num_calls - 1, text))


def _escaped(match: re.Match[str]) -> str:
    """A control character as an escape of JSON."""
    return json.dumps(match.group())[1:-1]


Grammar = Callable[[Reader], Parsing[None]]


class MessageParser:
    """Parses one message, of one choice: text deltas in, message deltas out.

    Any split of the text gives the same message, and no text makes it raise. It owns the reader;
    `new_call_id` makes the id of each call that is found; `parameters` are those of `Reader`.
    """

    def __init__(
        self,
        grammar: Grammar,
        new_call_id: Callable[[], str],
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._reader = Reader(new_call_id, parameters)
        self._parsing = grammar(self._reader)

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._reader.in_reasoning

    def feed(self, text: str) -> MessageDelta:
        """Add text. Returns what has become certain."""
        if text:
            self._reader.push(text)
            next(self._parsing, None)
        return self._reader.drain()

    def finish(self) -> MessageDelta:
        """No text follows. Returns what was held back."""
        self._reader.end()
        next(self._parsing, None)
        self._reader.content.end()
        self._reader.reasoning.end()
        return self._reader.drain()


def calls_in_text(
    reader: Reader, opening: Markers, closing: Markers, calls: Callable[[], Parsing[None]]
) -> Parsing[None]:
    """Content with calls between markers in it, to the end of the text.

    After calls that broke off, a marker that closes them is still markup.
    """
    either = Markers(*opening.texts, *closing.texts)
    found = Found.NO_CALL
    while True:
        markers = either if found is Found.BROKEN_CALLS else opening
        marker = yield from reader.content_until(markers)
        if marker is None:
            return
        if marker in opening.texts:
            found = yield from reader.attempt(calls(), is_marked=True)
        else:
            reader.drop()
            found = Found.NO_CALL
