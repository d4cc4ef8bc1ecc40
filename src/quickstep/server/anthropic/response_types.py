"""The responses of the Messages routes with status 200, and the events of their streams, as types.

`endpoint` encodes them as they are; `/openapi.json` is generated from them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.server.generate.timings import RequestTimings


class CacheCreation(msgspec.Struct, frozen=True):
    """Tokens added to the prefix cache, by Anthropic's lifetimes."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int = 0


class MessageOutputDetails(msgspec.Struct, frozen=True):
    """Details of the generated tokens."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens of the request. The input is the sum of three counts: tokens read from the prefix
    cache, tokens added to it (if the request marks a prefix), and the others.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation = CacheCreation(0)
    inference_geo: None = None
    server_tool_use: None = None
    output_tokens_details: MessageOutputDetails | None = None
    service_tier: Literal["standard"] = "standard"


class TextContent(msgspec.Struct, frozen=True, tag="text"):
    """A block of text."""

    text: str
    citations: None = None


class ThinkingContent(msgspec.Struct, frozen=True, tag="thinking"):
    """A block of reasoning. The signature is its digest: clients drop blocks without one."""

    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, frozen=True, tag="tool_use"):
    """A block with a tool call."""

    id: str
    name: str
    input: dict[str, Any]


MessageBlock = TextContent | ThinkingContent | ToolUseContent


class MessageResponse(msgspec.Struct, kw_only=True, frozen=True, tag="message"):
    """A message of the model."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[MessageBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    container: None = None
    quickstep: RequestTimings | UnsetType = UNSET


class TokenCount(msgspec.Struct, frozen=True):
    """The number of tokens of a request's input."""

    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    """The empty message."""

    message: MessageResponse


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """An event without content, which keeps the connection open."""


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: MessageBlock


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    """New text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    """New text of the reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    """The signature of a block of reasoning, before the block ends."""

    signature: str


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    """New text of the JSON of a call's arguments."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    """A block gets new text."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    """A block is complete."""

    index: int


class StopDetails(msgspec.Struct, frozen=True):
    """Why the message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDeltaEvent(msgspec.Struct, frozen=True, tag="message_delta"):
    """Why the message ended, and its usage."""

    delta: StopDetails
    usage: MessageUsage
    quickstep: RequestTimings | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    """The message is complete."""


EVENTS = (MessageStart, Ping, BlockStart, BlockDelta, BlockStop, MessageDeltaEvent, MessageStop)
