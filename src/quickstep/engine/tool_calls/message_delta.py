"""What parsing an output gives: pieces of content, of reasoning, and tool calls.

`Section` collects one kind of text and decides about white space: what stands between a message
and its calls, or around reasoning, is layout and goes; everything else stays as it was written.
"""

from __future__ import annotations

from quickstep.dataclass import dataclass

__all__ = ["CallDelta", "FunctionCall", "MessageDelta", "Section"]


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call as the model wrote it; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """News of the tool call `index` of a message: a whole call, once it is known to be one."""

    index: int
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What became certain with a piece of text."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def followed_by(self, later: MessageDelta) -> MessageDelta:
        """Both in one."""
        return MessageDelta(
            self.content + later.content,
            self.reasoning + later.reasoning,
            self.calls + later.calls,
        )

    def with_first_call_only(self) -> MessageDelta:
        """Without the calls that follow a message's first."""
        calls = tuple(call for call in self.calls if call.index == 0)
        return MessageDelta(self.content, self.reasoning, calls)


class Section:
    """One kind of text, growing. White space is held until what follows it is known."""

    def __init__(self) -> None:
        self._ready: list[str] = []
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
            self._ready.extend(self._space)
        self._space.clear()

    def drain(self) -> str:
        """The text that became certain since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _add_body(self, body: str) -> None:
        if self._at_cut and not self._has_text:
            self._space.clear()
            body = body.lstrip()
        self._ready.extend(self._space)
        self._space.clear()
        self._ready.append(body)
        self._has_text = True
        self._at_cut = False
