"""The result of parsing an output: parts of content, of reasoning and of tool calls, in order.

`Section` collects one kind of text and decides about white space: between a message and its calls,
or around reasoning, it is layout and dropped; everywhere else it stays as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

import msgspec


class FunctionCall(msgspec.Struct, frozen=True):
    """A complete call. Its arguments are the text that the model wrote, mostly a JSON object."""

    call_id: str
    name: str
    arguments: str


class ContentDelta(msgspec.Struct, frozen=True):
    """Text to append to the content."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """Text to append to the reasoning."""

    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """A part of the tool call `index` of a message.

    The first part of a call has its id and its name, and no arguments; the later ones have
    arguments to append. The parts of one call follow each other, with nothing between them.

    Attributes:
        is_last: The call has ended. A call that the end of the text cut has such a part as well.
    """

    index: int
    arguments: str = ""
    call_id: str = ""
    name: str = ""
    is_last: bool = False


MessagePart = ContentDelta | ReasoningDelta | CallDelta


class MessageDelta(msgspec.Struct, frozen=True):
    """What became certain when a piece of text was parsed."""

    parts: tuple[MessagePart, ...] = ()

    @property
    def content(self) -> str:
        """The content of all parts."""
        return "".join(part.text for part in self.parts if isinstance(part, ContentDelta))

    @property
    def reasoning(self) -> str:
        """The reasoning of all parts."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningDelta))

    @property
    def calls(self) -> tuple[FunctionCall, ...]:
        """The calls that begin in this delta, with the arguments in this delta."""
        begun: dict[int, CallDelta] = {}
        arguments: dict[int, list[str]] = {}
        for part in self.parts:
            if isinstance(part, CallDelta):
                if part.name:
                    begun[part.index] = part
                arguments.setdefault(part.index, []).append(part.arguments)
        return tuple(
            FunctionCall(first.call_id, first.name, "".join(arguments[index]))
            for index, first in begun.items()
        )

    def followed_by(self, later: MessageDelta) -> MessageDelta:
        """This delta and `later` as one."""
        return MessageDelta(joined([*self.parts, *later.parts]))

    def with_first_call_only(self) -> MessageDelta:
        """This delta without the calls after the message's first."""
        return MessageDelta(
            joined(part for part in self.parts if not isinstance(part, CallDelta) or not part.index)
        )


def joined(parts: Iterable[MessagePart]) -> tuple[MessagePart, ...]:
    """The same parts, neighbours of one kind merged; a call's first part is not merged."""
    return tuple(_in_one(list(group)) for _, group in groupby(parts, _kind))


def _kind(part: MessagePart) -> tuple[type, int, str]:
    """Neighbours of the same kind are merged; only the first part of a call has a name."""
    if isinstance(part, CallDelta):
        return CallDelta, part.index, part.name
    return type(part), 0, ""


def _in_one(parts: list[MessagePart]) -> MessagePart:
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    if isinstance(last, CallDelta):
        arguments = "".join(part.arguments for part in parts if isinstance(part, CallDelta))
        return CallDelta(last.index, arguments, is_last=last.is_last)
    return type(last)("".join(part.text for part in parts if not isinstance(part, CallDelta)))


class Section:
    """One kind of text of a message. White space is held back until what follows it is known.

    `emit` is called with text as it becomes certain.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._space: list[str] = []
        self._has_text = False
        self._at_cut = False

    def add(self, text: str) -> None:
        """Append text."""
        body = text.rstrip()
        if body:
            self._add_body(body)
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def cut(self) -> None:
        """Note that something else is here: white space next to it is dropped at the ends."""
        self._at_cut = True

    def break_line(self) -> None:
        """Begin a new paragraph."""
        if self._has_text:
            self.add("\n")

    def end(self) -> None:
        """No text follows."""
        if not self._at_cut:
            self._emit_space()
        self._space.clear()

    def _add_body(self, body: str) -> None:
        if self._at_cut and not self._has_text:
            self._space.clear()
            body = body.lstrip()
        self._emit_space()
        self._emit(body)
        self._has_text = True
        self._at_cut = False

    def _emit_space(self) -> None:
        if self._space:
            self._emit("".join(self._space))
            self._space.clear()
