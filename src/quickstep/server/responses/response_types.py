"""The responses of the Responses routes with status 200, and the events of their streams, as types.

`writer` encodes them as they are; `/openapi.json` is generated from them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.server.openai.response_types import TokenLogprob

__all__ = [
    "EVENTS",
    "ArgumentsEvent",
    "CallOutput",
    "DeletedResponse",
    "InputItems",
    "ItemEvent",
    "MessageOutput",
    "OutputItem",
    "OutputText",
    "PartEvent",
    "ReasoningOutput",
    "ReasoningText",
    "ResponseEvent",
    "ResponseObject",
    "ResponseUsage",
    "TextEvent",
]


class ResponseUsage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens; the reasoning's are part of the output's."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    """Text, with the logprobs of its tokens if they were asked for."""

    text: str
    logprobs: list[TokenLogprob]
    annotations: tuple[()] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    """Reasoning as the model wrote it."""

    text: str


class ReasoningOutput(msgspec.Struct, kw_only=True, frozen=True, tag="reasoning"):
    """Reasoning. `encrypted_content` holds the same text, for clients that keep the state."""

    id: str
    summary: tuple[()] = ()
    content: list[ReasoningText]
    encrypted_content: str | None = None
    status: str


class MessageOutput(msgspec.Struct, kw_only=True, frozen=True, tag="message"):
    """A message."""

    id: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]
    status: str


class CallOutput(msgspec.Struct, kw_only=True, frozen=True, tag="function_call"):
    """A call."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


OutputItem = ReasoningOutput | MessageOutput | CallOutput


class ResponseObject(msgspec.Struct, kw_only=True, frozen=True):
    """A response, in any of its states; the fields of the request stand in it with what held."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    frequency_penalty: float
    incomplete_details: dict[str, str] | None
    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    conversation: None = None
    previous_response_id: str | None
    prompt: None = None
    prompt_cache_key: str | None
    prompt_cache_retention: None = None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None
    seed: int | None
    system_fingerprint: str


class InputItems(msgspec.Struct, kw_only=True, frozen=True):
    """A page of what a response answers."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct, kw_only=True, frozen=True):
    """A response is gone."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseEvent(msgspec.Struct, frozen=True):
    """The response begins, without output, or has ended, complete."""

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
    """An item begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct, frozen=True):
    """The part of an item begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class TextEvent(msgspec.Struct, frozen=True):
    """A piece of a text (`delta`), or all of it (`text`); an answer's text has logprobs."""

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
    """A piece of a call's arguments (`delta`), or all of them with the function's name."""

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


EVENTS = (ResponseEvent, ItemEvent, PartEvent, TextEvent, ArgumentsEvent)
