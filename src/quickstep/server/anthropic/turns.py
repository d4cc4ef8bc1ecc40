"""Turns Anthropic's messages of blocks into the messages that chat templates read.

A block that the template cannot render is refused with its path; one that only another server can
read is left out and reported. One turn may become several messages: each tool result is a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quickstep.errors import RequestError
from quickstep.server.anthropic.request_types import (
    AssistantTurn,
    ContentSource,
    CountTokensRequest,
    DocumentBlock,
    ForeignBlock,
    OpaqueBlock,
    OpaqueSource,
    PlainBlock,
    SearchResultBlock,
    SystemTurn,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UserTurn,
)
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.conversation import check_continues, check_shows_calls, past_call
from quickstep.server.models.served_model import ServedModel
from quickstep.text.message_content import Content, Part, text_of, text_part

_Message = dict[str, Any]

# Claude Code's first line of the system prompt. Its hash differs in each request, so that no prefix
# would be cached; it says nothing to the model.
_BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")


def template_messages(
    fields: CountTokensRequest, model: ServedModel, reader: FieldReader
) -> tuple[_Message, ...]:
    """The system prompt and all turns. Raises RequestError with the path of a refused block."""
    if not fields.messages:
        raise RequestError("messages is an empty list", param="messages")
    messages: list[_Message] = []
    if fields.system is not None:
        messages += _system(_content(fields.system, "system"), reader)
    for index, turn in enumerate(fields.messages):
        messages += _turn(turn, f"messages[{index}].content", model, reader)
    if begins_answer(fields):
        check_continues(messages[-1], f"messages[{len(fields.messages) - 1}]")
    return tuple(messages)


def begins_answer(fields: CountTokensRequest) -> bool:
    """Whether the last turn is the beginning of the assistant's response."""
    return isinstance(fields.messages[-1], AssistantTurn)


def marks_cache(fields: CountTokensRequest) -> bool:
    """Whether the client marks a prefix to cache. All are cached; a mark requests the counts."""
    return (
        fields.cache_control is not None
        or any(tool.get("cache_control") is not None for tool in fields.tools or ())
        or _is_marked(fields.system)
        or any(_is_marked(turn.content) for turn in fields.messages)
    )


def _is_marked(content: object) -> bool:
    """Whether one of the blocks, or of the blocks inside one, has a mark."""
    return isinstance(content, list) and any(
        getattr(block, "cache_control", None) is not None
        or _is_marked(getattr(block, "content", None))
        or _is_marked(getattr(getattr(block, "source", None), "content", None))
        for block in content
    )


def _system(content: Content, reader: FieldReader) -> list[_Message]:
    """The system prompt without a client's billing line; no message if nothing else is there."""
    first = content if isinstance(content, str) else content[0]["text"] if content else ""
    line = _BILLING_LINE.match(first)
    if line is not None:
        reader.ignore("system[x-anthropic-billing-header]", "the server sends no bills")
        first = first[line.end() :]
        if isinstance(content, str):
            content = first
        else:
            content = [*([text_part(first)] if first else []), *content[1:]]
        if not content:
            return []
    return [{"role": "system", "content": content}]


def _turn(turn: Turn, path: str, model: ServedModel, reader: FieldReader) -> list[_Message]:
    match turn:
        case SystemTurn():
            return [{"role": "system", "content": _content(turn.content, path)}]
        case UserTurn():
            return _user(turn, path)
        case AssistantTurn():
            return [_assistant(turn, path, model, reader)]


def _user(turn: UserTurn, path: str) -> list[_Message]:
    """The messages of a turn; adjacent text blocks are one message."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    messages: list[_Message] = []
    parts: list[Part] = []
    for index, block in enumerate(turn.content):
        block_path = f"{path}[{index}]"
        if isinstance(block, ToolResultBlock):
            messages += _user_message(parts)
            parts = []
            messages.append(_tool_result(block, block_path))
        else:
            parts.append(_plain(block, block_path))
    return messages + _user_message(parts)


def _user_message(parts: list[Part]) -> list[_Message]:
    return [{"role": "user", "content": parts}] if parts else []


def _tool_result(block: ToolResultBlock, path: str) -> _Message:
    content = _content(block.content or "", f"{path}.content")
    if block.is_error:
        content = f"Error: {text_of(content)}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _assistant(turn: AssistantTurn, path: str, model: ServedModel, reader: FieldReader) -> _Message:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    parts: list[Part] = []
    thoughts: list[str] = []
    calls: list[_Message] = []
    for index, block in enumerate(turn.content):
        block_path = f"{path}[{index}]"
        if isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            check_shows_calls(model, block_path)
            calls.append(_tool_use(block, block_path))
        elif isinstance(block, ForeignBlock):
            kind = block.__struct_config__.tag
            reader.ignore(f"{path}[{kind}]", "only the server that wrote it can read it")
        else:
            parts.append(_plain(block, block_path))
    message: _Message = {"role": "assistant", "content": parts or ""}
    if calls:
        message["tool_calls"] = calls
        message["content"] = parts if text_of(parts) else None
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
        if not text_of(message["content"]):  # gpt-oss's name of it, with calls only
            message["thinking"] = message["reasoning_content"]
    return message


def _tool_use(block: ToolUseBlock, path: str) -> _Message:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return past_call(block.id, block.name, arguments)


def _content(content: str | Sequence[TextBlock], path: str) -> Content:
    if isinstance(content, str):
        return content
    return [_plain(block, f"{path}[{index}]") for index, block in enumerate(content)]


def _plain(block: TextBlock, path: str) -> Part:
    match block:
        case PlainBlock(text=text):
            return text_part(text)
        case DocumentBlock():
            header = {"Title": block.title, "Context": block.context}
            return _headed(header, _source_text(block, f"{path}.source"))
        case SearchResultBlock():
            header = {"Title": block.title, "Source": block.source}
            return _headed(header, text_of(_content(block.content, f"{path}.content")))
    raise _refused_form(block, path)


def _headed(header: Mapping[str, str | None], text: str) -> Part:
    """A text after lines that describe it."""
    lines = [f"{name}: {value}" for name, value in header.items() if value]
    return text_part("\n".join([*lines, "", text]) if lines else text)


def _source_text(block: DocumentBlock, path: str) -> str:
    match block.source:
        case TextSource(data=data):
            return data
        case ContentSource(content=content):
            return text_of(_content(content, f"{path}.content"))
    raise _refused_form(block.source, path)


def _refused_form(form: OpaqueBlock | OpaqueSource, path: str) -> RequestError:
    kind = form.__struct_config__.tag
    return RequestError(f"{path} is of type {kind}, {form.refused_form}", param=path)
