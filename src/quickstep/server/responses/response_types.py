"""What the Responses routes answer with status 200, as types."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quickstep.server.openai.response_types import TokenLogprob

__all__ = [
    "CallOutput",
    "DeletedResponse",
    "InputItems",
    "MessageOutput",
    "OutputItem",
    "OutputText",
    "ReasoningOutput",
    "ReasoningText",
    "ResponseObject",
    "ResponseUsage",
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
