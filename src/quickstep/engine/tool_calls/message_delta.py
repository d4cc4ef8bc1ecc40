"""What parsing an output gives: pieces of content, of reasoning and of tool calls, in their order.

`Section` collects one kind of text and decides about white space: what stands between a message
and its calls, or around reasoning, is layout and goes; everything else stays as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

import msgspec

__all__ = [
    "CallDelta",
    "ContentDelta",
    "FunctionCall",
    "MessageDelta",
    "MessagePart",
    "ReasoningDelta",
    "Section",
    "joined",
]


class FunctionCall(msgspec.Struct, frozen=True):
    """A call with all of its arguments: the text that the model wrote, mostly a JSON object."""

    call_id: str
    name: str
    arguments: str


class ContentDelta(msgspec.Struct, frozen=True):
    """More of the content."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of the reasoning."""

    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of the tool call `index` of a message.

    The first piece of a call has its id and its name, and no arguments yet; the arguments of the
    later ones add up. Pieces of one call follow each other, with nothing between them.

    Attributes:
        is_last: The call has ended. A call that the end of the text cut has such a piece as well.
    """

    index: int
    arguments: str = ""
    call_id: str = ""
    name: str = ""
    is_last: bool = False


MessagePart = ContentDelta | ReasoningDelta | CallDelta


class MessageDelta(msgspec.Struct, frozen=True):
    """What became certain with a piece of text."""

    parts: tuple[MessagePart, ...] = ()

    @property
    def content(self) -> str:
        """The content in it."""
        return "".join(part.text for part in self.parts if isinstance(part, ContentDelta))

    @property
    def reasoning(self) -> str:
        """The reasoning in it."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningDelta))

    @property
    def calls(self) -> tuple[FunctionCall, ...]:
        """The calls that begin in it, with the arguments that are in it."""
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
        """Both in one."""
        return MessageDelta(joined([*self.parts, *later.parts]))

    def with_first_call_only(self) -> MessageDelta:
        """Without the calls that follow a message's first."""
        return MessageDelta(
            joined(part for part in self.parts if not isinstance(part, CallDelta) or not part.index)
        )


def joined(parts: Iterable[MessagePart]) -> tuple[MessagePart, ...]:
    """The same parts, with neighbours of one kind in one; a call's first piece stays by itself."""
    return tuple(_in_one(list(group)) for _, group in groupby(parts, _kind))


def _kind(part: MessagePart) -> tuple[type, int, str]:
    """Neighbours of the same kind are joined; a name is the first piece's alone."""
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
    """One kind of text, growing. White space is held until what follows it is known.

    `emit` gets the text as it becomes certain.
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
        """Something else stands here: white space next to it goes at the section's ends."""
        self._at_cut = True

    def break_line(self) -> None:
        """What follows is a paragraph of its own."""
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
