"""The data of the events that Responses and Messages stream, as types: what the document tells.

The writers send plain dicts; the tests hold every streamed event against these types.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.server.anthropic.response_types import MessageBlock, MessageResponse, MessageUsage
from quickstep.server.openai.response_types import TokenLogprob
from quickstep.server.responses.response_types import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseObject,
)

__all__ = ["MESSAGES_EVENTS", "RESPONSES_EVENTS"]


class ResponseEvent(msgspec.Struct, frozen=True):
    """The response begins (without output), goes on, or is over (whole)."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject


class ItemEvent(msgspec.Struct, frozen=True):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct, frozen=True):
    """The part of an item begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class TextEvent(msgspec.Struct, frozen=True):
    """News of a text (`delta`), or all of it (`text`); logprobs stand beside an answer's text."""

    type: Literal[
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
    ]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ArgumentsEvent(msgspec.Struct, frozen=True):
    """News of a call's arguments (`delta`), or all of them with the function's name."""

    type: Literal[
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    """The empty message."""

    message: MessageResponse


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Nothing."""


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: MessageBlock


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    """News of a text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    """News of the reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    """The signature of a block of reasoning, before the block ends."""

    signature: str


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    """News of a call's arguments, a piece of JSON."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    """A block is whole."""

    index: int


class StopFacts(msgspec.Struct, frozen=True):
    """Why the message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    """Why the message ended, and its usage."""

    delta: StopFacts
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    """The message is whole."""


RESPONSES_EVENTS = (ResponseEvent, ItemEvent, PartEvent, TextEvent, ArgumentsEvent)
MESSAGES_EVENTS = (
    *(MessageStart, Ping, BlockStart, BlockDelta, BlockStop),
    *(MessageDelta, MessageStop),
)
