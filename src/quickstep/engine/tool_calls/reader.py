"""Reads a text that arrives in pieces as if it were there: the ground all formats stand on.

A format is a generator over a `Reader`. Its primitives yield when they need more text, so that a
format reads like a parser of whole text and the split into deltas cannot show. Nothing looks
further ahead than one marker, and nothing is read twice: time is linear in the text.

What a format reads is *taken*: `accept` turns it into calls, `reject` gives it back as content.
So a call that turns out malformed is never lost.

    content_until(marker) -> attempt(format's call) -> content_until(marker) -> ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from quickstep.engine.tool_calls.message_delta import (
    CallDelta,
    FunctionCall,
    MessageDelta,
    Section,
)

__all__ = ["Grammar", "Malformed", "Markers", "Parsing", "Reader"]

_T = TypeVar("_T")
Parsing = Generator[None, None, _T]

_SPACE = re.compile(r"[ \t\n\r]++")


class Malformed(Exception):
    """What was taken is not a call after all."""


class Markers:
    """Texts to look for. None of them lies inside another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.pattern = re.compile("|".join(map(re.escape, texts)))
        self._first_chars = frozenset(text[0] for text in texts)
        self._longest = max(map(len, texts))

    def undecided_from(self, text: str, start: int) -> int:
        """Where the end of `text` begins that may yet become a marker; its length if none does."""
        for place in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[place] in self._first_chars:
                end = text[place:]
                if any(marker.startswith(end) for marker in self.texts):
                    return place
        return len(text)


class Reader:
    """One message's text. Its parser pushes text and drains deltas, its grammar reads."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.content = Section()
        self.reasoning = Section()
        self._new_call_id = new_call_id
        self._text = ""
        self._at = 0
        self._ended = False
        self._taken: list[str] = []
        self._num_calls = 0
        self._calls: list[CallDelta] = []

    def push(self, text: str) -> None:
        """Add text. What is left of the old one is shorter than a marker."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No text follows."""
        self._ended = True

    def drain(self) -> MessageDelta:
        """What became certain since the last call."""
        calls = tuple(self._calls)
        self._calls.clear()
        return MessageDelta(self.content.drain(), self.reasoning.drain(), calls)

    def peek(self) -> Parsing[str]:
        """The next character, not taken; "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self) -> None:
        """Take the character that `peek` showed."""
        self._take_to(self._at + 1)

    def literal(self, text: str) -> Parsing[bool]:
        """Take `text` if it stands here."""
        while True:
            seen = self._text[self._at : self._at + len(text)]
            if seen == text:
                self._take_to(self._at + len(text))
                return True
            if self._ended or not text.startswith(seen):
                return False
            yield

    def expect(self, text: str) -> Parsing[None]:
        """Take `text`. Raises Malformed if something else stands here."""
        if not (yield from self.literal(text)):
            raise Malformed

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

    def text_until(self, section: Section, markers: Markers) -> Parsing[str | None]:
        """Text up to a marker goes to `section`; the marker is taken. None: the text ended."""
        while True:
            match = markers.pattern.search(self._text, self._at)
            if match is not None:
                section.add(self._text[self._at : match.start()])
                self._at = match.start()
                self._take_to(match.end())
                return match.group()
            decided = len(self._text)
            if not self._ended:
                decided = markers.undecided_from(self._text, self._at)
            section.add(self._text[self._at : decided])
            self._at = decided
            if self._ended:
                return None
            yield

    def content_until(self, markers: Markers) -> Parsing[str | None]:
        """`text_until` for content."""
        return (yield from self.text_until(self.content, markers))

    def content_to_end(self) -> Parsing[None]:
        """All that follows is content."""
        while True:
            self.content.add(self._text[self._at :])
            self._at = len(self._text)
            if self._ended:
                return
            yield

    def mark(self) -> int:
        """This place among what is taken, for `since`."""
        return len(self._taken)

    def since(self, mark: int) -> str:
        """What was taken since `mark`."""
        return "".join(self._taken[mark:])

    def attempt(self, parsing: Parsing[Sequence[FunctionCall]]) -> Parsing[bool]:
        """Accept the calls that `parsing` finds, or give back what it took as content."""
        try:
            calls = yield from parsing
        except Malformed:
            self.reject()
            return False
        self.accept(calls)
        return True

    def accept(self, calls: Sequence[FunctionCall]) -> None:
        """What was taken is these calls."""
        self.drop()
        self.content.cut()
        for call in calls:
            delta = CallDelta(self._num_calls, self._new_call_id(), call.name, call.arguments)
            self._calls.append(delta)
            self._num_calls += 1

    def reject(self) -> None:
        """What was taken is content."""
        self.content.add("".join(self._taken))
        self._taken.clear()

    def drop(self) -> None:
        """What was taken is markup."""
        self._taken.clear()

    def _take_to(self, end: int) -> None:
        self._taken.append(self._text[self._at : end])
        self._at = end


Grammar = Callable[[Reader], Parsing[None]]
