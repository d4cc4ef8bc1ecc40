"""The responses of the Responses routes with status 200, and the events of their streams, as types.

`writer` encodes them as they are; `/openapi.json` is generated from them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.server.fields.sampling_fields import JsonObjectFormat, TextFormat
from quickstep.server.generate.timings import RequestTimings
from quickstep.server.openai.response_types import TokenLogprob
from quickstep.server.responses.request_types import (
    InputPart,
    ReasoningPart,
    SchemaFormat,
    SummaryPart,
)

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseInputDetails(msgspec.Struct, frozen=True):
    """Details of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseOutputDetails(msgspec.Struct, frozen=True):
    """Details of the generated tokens."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True, frozen=True):
    """The token counts; output tokens include those of the reasoning."""

    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class OutputTextContent(msgspec.Struct, frozen=True, tag="output_text"):
    """Text, with the logprobs of its tokens if the request includes them."""

    text: str
    logprobs: list[TokenLogprob]
    annotations: tuple[()] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    """Reasoning as the model wrote it."""

    text: str


class ReasoningOutput(msgspec.Struct, kw_only=True, frozen=True, tag="reasoning"):
    """A reasoning item. `encrypted_content` is the same text, for clients that keep the state."""

    id: str
    summary: tuple[()] = ()
    content: list[ReasoningText]
    encrypted_content: str | None = None
    status: ItemStatus


class MessageOutput(msgspec.Struct, kw_only=True, frozen=True, tag="message"):
    """A message item."""

    id: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputTextContent]
    status: ItemStatus


class CallOutput(msgspec.Struct, kw_only=True, frozen=True, tag="function_call"):
    """An item with a function call."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = ReasoningOutput | MessageOutput | CallOutput


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete; OpenAI has this reason only, so a deadline has it, too."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ReasoningSettings(msgspec.Struct, frozen=True):
    """`reasoning` of the request."""

    effort: str | None
    summary: None = None


class TextSettings(msgspec.Struct, frozen=True):
    """`text` of the request, with the defaults."""

    format: TextFormat | JsonObjectFormat | SchemaFormat
    verbosity: str = "medium"


class ResponseObject(msgspec.Struct, kw_only=True, frozen=True):
    """A response in any state. It repeats the request's fields with the values that applied;
    `tools` and `tool_choice` are the client's own objects.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: ResponseError | None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None
    background: bool = False
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
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None
    seed: int | None
    system_fingerprint: str
    quickstep: RequestTimings | UnsetType = UNSET


class ListedMessage(msgspec.Struct, kw_only=True, frozen=True, tag="message"):
    """A message of a request."""

    id: str
    status: ItemStatus
    role: str
    content: list[InputPart]


class ListedCall(msgspec.Struct, kw_only=True, frozen=True, tag="function_call"):
    """A function call in a request."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ListedCallOutput(msgspec.Struct, kw_only=True, frozen=True, tag="function_call_output"):
    """The result of a function call in a request."""

    id: str
    status: ItemStatus
    call_id: str
    output: str | list[InputPart]


class ListedReasoning(msgspec.Struct, kw_only=True, frozen=True, tag="reasoning"):
    """Reasoning in a request."""

    id: str
    status: ItemStatus
    summary: list[SummaryPart]
    content: list[ReasoningPart]


ListedItem = ListedMessage | ListedCall | ListedCallOutput | ListedReasoning


class InputItems(msgspec.Struct, kw_only=True, frozen=True):
    """A page of a request's input items."""

    object: Literal["list"] = "list"
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The response to the deletion of a stored response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseEvent(msgspec.Struct, frozen=True):
    """The response begins, without output, or has ended, with all of it."""

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
    """An item begins, without text, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct, frozen=True):
    """The part of an item begins, empty, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputTextContent | ReasoningText


class TextEvent(msgspec.Struct, frozen=True):
    """New text (`delta`), or the complete one (`text`); only output text has logprobs."""

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
    """New text of a call's arguments (`delta`), or all of it with the function's name."""

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


StreamEvent = ResponseEvent | ItemEvent | PartEvent | TextEvent | ArgumentsEvent
EVENTS = (ResponseEvent, ItemEvent, PartEvent, TextEvent, ArgumentsEvent)
