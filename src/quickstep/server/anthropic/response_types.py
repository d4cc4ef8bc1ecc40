"""What the Messages routes answer with status 200, as types."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["CacheCreation", "MessageBlock", "MessageResponse", "MessageUsage", "TokenCount"]


class CacheCreation(msgspec.Struct, frozen=True):
    """Tokens that the prefix cache did not hold, by how long Anthropic would keep them."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int = 0


class MessageUsage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens of the request. Three numbers are the input: what was read from the prefix cache,
    what was added to it (where the request marks a prefix), and the rest.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation = CacheCreation(0)
    inference_geo: None = None
    server_tool_use: None = None
    output_tokens_details: dict[str, int] | None = None
    service_tier: Literal["standard"] = "standard"


class TextContent(msgspec.Struct, frozen=True, tag="text"):
    """Text."""

    text: str
    citations: None = None


class ThinkingContent(msgspec.Struct, frozen=True, tag="thinking"):
    """Reasoning. The signature is a digest of it: clients drop blocks that have none."""

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
    container: None = None


class TokenCount(msgspec.Struct, frozen=True):
    """What a request's input would count."""

    input_tokens: int
