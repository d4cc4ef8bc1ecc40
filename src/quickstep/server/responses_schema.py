"""The JSON body of OpenAI's Responses API, as msgspec types: the whole schema.

Read by `responses` and `responses_input`, and by nothing else. The sampling fields beyond OpenAI's
are those of chat. What the server does not do is declared as well, so that it is refused by name:
whole fields in the table at the end, parts of fields where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from quickstep.server.refused import STREAM_OPTIONS_REFUSED, Refusal
from quickstep.server.schemas import (
    JsonObjectFormat,
    SamplingFields,
    StreamOptions,
    TextFormat,
)

__all__ = [
    "ITEM_REFUSED",
    "RESPONSES_REFUSED",
    "STREAM_REFUSED",
    "FunctionCallItem",
    "FunctionCallOutputItem",
    "FunctionToolSpec",
    "InputItemsQuery",
    "InputPart",
    "MessageItem",
    "ReasoningItem",
    "ResponsesRequest",
    "ResponsesStreamOptions",
    "SchemaFormat",
    "TextConfig",
]

Status = Literal["in_progress", "completed", "incomplete"]


class InputTextPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="input_text"):
    """A piece of a message to the model."""

    text: str
    prompt_cache_breakpoint: Any = None


class OutputTextPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="output_text"):
    """A piece of a message of the model's; notes about it come back as they were given."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class OutputRefusalPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="refusal"):
    """A refusal of the model's; the template sees its text."""

    refusal: str


class InputImagePart(msgspec.Struct, frozen=True, tag="input_image"):
    """An image: known, so that it is refused in words."""


class InputFilePart(msgspec.Struct, frozen=True, tag="input_file"):
    """A file: known, so that it is refused in words."""


class InputAudioPart(msgspec.Struct, frozen=True, tag="input_audio"):
    """A sound: known, so that it is refused in words."""


InputPart = (
    InputTextPart
    | OutputTextPart
    | OutputRefusalPart
    | InputImagePart
    | InputFilePart
    | InputAudioPart
)


class MessageItem(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A message of anybody's; `type` may be left out. Id and status say nothing to the model."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    phase: Any = None


class FunctionCallItem(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An earlier call of the model's."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: Any = None
    namespace: Any = None


class FunctionCallOutputItem(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the function gave back."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: Status | None = None
    caller: Any = None
    name: str | None = None
    namespace: Any = None


class SummaryPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="summary_text"):
    """A piece of a summary of the reasoning."""

    text: str


class ReasoningPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="reasoning_text"):
    """A piece of the reasoning."""

    text: str


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Earlier reasoning: its content, else what `encrypted_content` holds, else its summary."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class FunctionToolSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    output_schema: Any = None


class SchemaFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="json_schema"):
    """Output that fits a JSON schema. It is enforced whatever `strict` says."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The form of the answer."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How to reason: what asks for nothing passes."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesStreamOptions(StreamOptions, forbid_unknown_fields=True, frozen=True):
    """`stream_options`, which may only ask for nothing here."""


class ResponsesRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/responses`."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: int | None = None
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    truncation: Any = None


class InputItemsQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `GET /v1/responses/{id}/input_items`; what `include` adds is there already."""

    after: str | None = None
    include: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20  # OpenAI's
    order: Literal["asc", "desc"] = "desc"


_LAST_EVENT = "the last event has the usage"
STREAM_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        **STREAM_OPTIONS_REFUSED,
        "include_usage": Refusal((False,), _LAST_EVENT),
        "continuous_usage_stats": Refusal((False,), _LAST_EVENT),
    }
)
RESPONSES_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "access_programs": Refusal((), "there are no access programs"),
        "background": Refusal((False,), "a response ends with its request"),
        "background_options": Refusal((), "a response ends with its request"),
        "context_management": Refusal(([],), "the input is taken as it is"),
        "conversation": Refusal((), "send previous_response_id"),
        "image": Refusal((), "the model reads text only"),
        "max_tokens": Refusal((), "send max_output_tokens"),
        "moderation": Refusal((), "there is no moderation model"),
        "n": Refusal((1,), "a response is one answer"),
        "prompt": Refusal((), "there are no stored prompts"),
        "prompt_cache_options": Refusal((), "prefixes are cached without a lifetime"),
        "prompt_cache_retention": Refusal(("in_memory",), "prefixes are cached in memory only"),
        "response_format": Refusal((), "send text.format"),
        "service_tier": Refusal(("auto", "default"), "there is one service tier"),
        "truncation": Refusal(("disabled",), "nothing of the input is left out"),
    }
)
_CALL_REFUSED = MappingProxyType(
    {
        "caller": Refusal(({"type": "direct"},), "only the model calls"),
        "namespace": Refusal((), "functions have no namespaces"),
    }
)
ITEM_REFUSED: Mapping[type[msgspec.Struct], Mapping[str, Refusal]] = MappingProxyType(
    {
        MessageItem: {"phase": Refusal((), "the model writes in no phases")},
        FunctionCallItem: _CALL_REFUSED,
        FunctionCallOutputItem: _CALL_REFUSED,
    }
)
