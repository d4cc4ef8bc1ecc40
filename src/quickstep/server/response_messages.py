"""What the Messages routes answer with status 200, as types."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["MessageBlock", "MessageResponse", "MessageUsage", "TokenCount"]


class MessageUsage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens. Those read from the prefix cache stand apart from the other input."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: dict[str, int] | None = None
    service_tier: Literal["standard"] = "standard"


class TextContent(msgspec.Struct, frozen=True, tag="text"):
    """Text."""

    text: str
    citations: None = None


class ThinkingContent(msgspec.Struct, frozen=True, tag="thinking"):
    """Reasoning. The signature is empty: there is nothing to verify."""

    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, frozen=True, tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: dict[str, Any]


MessageBlock = TextContent | ThinkingContent | ToolUseContent


class MessageResponse(msgspec.Struct, kw_only=True, frozen=True, tag="message"):
    """A message of the model's."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[MessageBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    """What a request's input would count."""

    input_tokens: int
