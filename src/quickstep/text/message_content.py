"""The content of messages: text, or parts of text, as each role of a chat template reads it.

A conversation keeps a client's parts until the template gets them. Some templates read parts, most
read text, many read either; some differ by role. `auto` finds out by rendering: a role reads what
appears in the prompt (`ContentReading`). Called by `ChatTemplate` and by the APIs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from quickstep.config import ContentFormat
from quickstep.errors import RequestError

Part = Mapping[str, Any]
Content = str | Sequence[Part]

_FIRST, _SECOND = "Qx7aZ", "Wk3bY"  # no template has them, and none changes them
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "probe", "arguments": {}},
}


class ContentReading(msgspec.Struct, frozen=True):
    """What a template reads of a role: text, parts, or either."""

    text: bool
    parts: bool

    def of(self, content: Content) -> Content:
        """The content as the template reads it; otherwise as it was sent."""
        if isinstance(content, str):
            return [text_part(content)] if self.parts and not self.text else content
        return content if self.parts else text_of(content)


_TEXT = ContentReading(text=True, parts=False)
_PARTS = ContentReading(text=False, parts=True)


def text_part(text: str) -> dict[str, str]:
    """A part of text, as templates read it."""
    return {"type": "text", "text": text}


def text_of(content: object) -> str:
    """The content as one text, its parts joined by line ends; "" for none.

    Raises:
        RequestError: A part is no text.
    """
    if isinstance(content, (list, tuple)):
        return "\n".join(str(part["text"]) for part in map(_checked, content))
    return content if isinstance(content, str) else ""


def checked_parts(parts: Sequence[object]) -> list[dict[str, Any]]:
    """The parts in their long form, of text only. Raises RequestError."""
    return [_checked(part) for part in parts]


def joined_contents(first: Content, then: Content) -> Content:
    """Two contents as one, with an empty line between them."""
    if isinstance(first, str) and isinstance(then, str):
        return "\n\n".join(filter(None, (first, then)))
    contents = [first, text_part("\n\n"), then] if first and then else [first or then]
    parts: list[Part] = []
    for content in contents:
        if isinstance(content, str):
            parts.append(text_part(content))
        else:
            parts += [content] if isinstance(content, Mapping) else content
    return parts


def content_readings(
    requested: ContentFormat, render: Callable[[Sequence[Part]], str]
) -> Mapping[str, ContentReading]:
    """What a template reads, by role. `render` gives a conversation's prompt, or raises
    RequestError.

    A role that the template does not take, or whose content it does not show, reads text.
    """
    if requested is not ContentFormat.AUTO:
        reading = _TEXT if requested is ContentFormat.STRING else _PARTS
        return MappingProxyType(dict.fromkeys(_CONVERSATIONS, reading))
    return MappingProxyType(
        {role: _reading(role, roles, render) for role, roles in _CONVERSATIONS.items()}
    )


# the shortest conversation with a message of the role, which templates take
_CONVERSATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "system": ("system", "user"),
        "user": ("user",),
        "assistant": ("user", "assistant", "user"),
        "tool": ("user", "assistant", "tool"),
    }
)


def _reading(
    role: str, roles: Sequence[str], render: Callable[[Sequence[Part]], str]
) -> ContentReading:
    parts = [text_part(_FIRST), text_part(_SECOND)]
    reads_parts = _shows(role, roles, parts, render)
    if not reads_parts:
        return _TEXT
    return ContentReading(_shows(role, roles, _FIRST + _SECOND, render), reads_parts)


def _shows(
    role: str,
    roles: Sequence[str],
    content: Content,
    render: Callable[[Sequence[Part]], str],
) -> bool:
    """Whether the prompt has the content of the role, and not a list that was printed."""
    for other in ("-", [text_part("-")]):  # the content of the other roles
        messages = [_message(each, content if each == role else other, roles) for each in roles]
        try:
            prompt = render(messages)
        except RequestError:
            continue
        between, second, _ = prompt.partition(_FIRST)[2].partition(_SECOND)
        if second and "{" not in between:
            return True
    return False


def _message(role: str, content: Content, roles: Sequence[str]) -> Part:
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant" and "tool" in roles:
        message["tool_calls"] = [_CALL]
    if role == "tool":
        message |= {"tool_call_id": _CALL["id"], "name": "probe"}
    return message


def _checked(part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return text_part(part)
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "type": "text"}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"a message holds content of type {kind}, the model takes text only", param="messages"
    )
