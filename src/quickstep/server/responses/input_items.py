"""OpenAI's input items: reading them, listing them, and turning them into messages for templates.

An assistant's turn consists of several items (reasoning, message, calls); adjacent ones become one
message. An item that the template cannot render is refused with its path.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.conversation import check_shows_calls, past_call
from quickstep.server.models.served_model import ServedModel
from quickstep.server.responses.request_types import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputPart,
    InputTextPart,
    MessageItem,
    OutputRefusalPart,
    OutputTextPart,
    ReasoningItem,
)
from quickstep.server.responses.response_types import (
    ItemStatus,
    ListedCall,
    ListedCallOutput,
    ListedItem,
    ListedMessage,
    ListedReasoning,
)
from quickstep.text.message_content import Content, Part, text_part

InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
_KINDS: Mapping[object, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}
_ID_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}


def read_items(
    items: str | Sequence[dict[str, Any]] | None,
    reader: FieldReader,
    stored: Callable[[str], dict[str, Any] | None],
) -> list[InputItem]:
    """The typed items of `input`. Raises RequestError with the path of an invalid one.

    `stored` finds an item that an `item_reference` names by its id.
    """
    if items is None:
        raise RequestError("input is missing", param="input")
    if isinstance(items, str):
        return [MessageItem("user", items)]
    if not items:
        raise RequestError("input is an empty list", param="input")
    return [
        _item(_referred(item, f"input[{index}]", stored), f"input[{index}]", reader)
        for index, item in enumerate(items)
    ]


def _referred(
    item: dict[str, Any], path: str, stored: Callable[[str], dict[str, Any] | None]
) -> dict[str, Any]:
    """The item itself, or the stored one that it refers to."""
    if item.get("type") != "item_reference":
        return item
    item_id = item.get("id")
    found = stored(item_id) if isinstance(item_id, str) else None
    if found is None:
        raise RequestError(
            f"{path}.id is {str(item_id)[:64]!r}, which is no stored item; send the item itself",
            param=f"{path}.id",
        )
    return found


def _item(item: dict[str, Any], path: str, reader: FieldReader) -> InputItem:
    kind = item.get("type", "message")
    schema = _KINDS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        kinds = ", ".join(map(str, _KINDS))
        raise RequestError(
            f"{path}.type {str(kind)[:64]} is not supported; it takes {kinds}", param=f"{path}.type"
        )
    # clients send output items back with a null for every field of their own types
    present = {name: value for name, value in item.items() if value is not None}
    return reader.convert(present, schema, path)


def listed_items(items: Sequence[InputItem]) -> tuple[ListedItem, ...]:
    """The items as `GET .../input_items` returns them: each with an id and a status."""
    return tuple(_listed(item) for item in items)


def _listed(item: InputItem) -> ListedItem:
    item_id = item.id or f"{_ID_PREFIXES[item.type]}{uuid.uuid4().hex}"
    status: ItemStatus = item.status or "completed"
    match item:
        case MessageItem(role=role, content=content):
            if isinstance(content, str):
                part = OutputTextPart if role == "assistant" else InputTextPart
                content = [part(content)]
            return ListedMessage(id=item_id, status=status, role=role, content=content)
        case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
            return ListedCall(
                id=item_id, status=status, call_id=call_id, name=name, arguments=arguments
            )
        case FunctionCallOutputItem(call_id=call_id, output=output):
            return ListedCallOutput(id=item_id, status=status, call_id=call_id, output=output)
        case ReasoningItem(summary=summary, content=reasoning):
            return ListedReasoning(
                id=item_id, status=status, summary=summary or [], content=reasoning or []
            )


def template_messages(items: Sequence[InputItem], model: ServedModel) -> list[dict[str, Any]]:
    """The items as messages. Raises RequestError with the path of an item that is refused."""
    turns = _InputTurns()
    for index, item in enumerate(items):
        path = f"input[{index}]"
        match item:
            case MessageItem(role="assistant"):
                turns.assistant("content", _content(item.content, f"{path}.content"))
            case MessageItem():
                role = "user" if item.role == "user" else "system"
                turns.add({"role": role, "content": _content(item.content, f"{path}.content")})
            case ReasoningItem():
                turns.assistant("reasoning_content", _reasoning(item, path))
            case FunctionCallItem():
                check_shows_calls(model, path)
                turns.call(past_call(item.call_id, item.name, item.arguments))
            case FunctionCallOutputItem():
                content = _content(item.output, f"{path}.output")
                turns.add({"role": "tool", "tool_call_id": item.call_id, "content": content})
    for message in turns.messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # a turn that was cut in its reasoning
    return turns.messages


def with_instructions(
    instructions: str | None, messages: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Put the instructions first. `ChatTemplate` joins system messages at the beginning."""
    if not instructions:
        return tuple(messages)
    return ({"role": "system", "content": instructions}, *messages)


def sealed(text: str) -> str:
    """Reasoning as `encrypted_content`: encoded so that clients can send it back, not encrypted."""
    return base64.b64encode(text.encode()).decode()


class _InputTurns:
    """Collects messages. The last one is the assistant's if `_assistant` is set."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._assistant: dict[str, Any] | None = None

    def add(self, message: dict[str, Any]) -> None:
        """Add a message of another role."""
        self.messages.append(message)
        self._assistant = None

    def assistant(self, name: str, content: Content) -> None:
        """Add content or reasoning; a turn has one of each, reasoning first, then calls."""
        turn = self._assistant
        ended_by = ("tool_calls", "reasoning_content")[: 1 + (name == "reasoning_content")]
        if turn is None or turn["content"] is not None or any(other in turn for other in ended_by):
            turn = self._begin()
        turn[name] = content

    def call(self, call: dict[str, Any]) -> None:
        """Add a call."""
        turn = self._assistant or self._begin()
        turn.setdefault("tool_calls", []).append(call)
        if turn["content"] is None and "reasoning_content" in turn:
            turn["thinking"] = turn["reasoning_content"]  # gpt-oss's name of it, with calls only

    def _begin(self) -> dict[str, Any]:
        self._assistant = {"role": "assistant", "content": None}
        self.messages.append(self._assistant)
        return self._assistant


def _reasoning(item: ReasoningItem, path: str) -> str:
    if item.content:
        return "\n".join(part.text for part in item.content)
    if item.encrypted_content is None:
        return "\n".join(part.text for part in item.summary or ())
    try:
        return base64.b64decode(item.encrypted_content, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        param = f"{path}.encrypted_content"
        raise RequestError(f"{param} was not written by this server", param=param) from None


def _content(content: str | Sequence[InputPart], path: str) -> Content:
    if isinstance(content, str):
        return content
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _part(part: InputPart, path: str) -> Part:
    match part:
        case InputTextPart(text=text) | OutputTextPart(text=text):
            return text_part(text)
        case OutputRefusalPart(refusal=refusal):
            return text_part(refusal)
    kind = part.__struct_config__.tag
    raise RequestError(f"{path} is of type {kind}, the model reads text only", param=path)
