"""The JSON body of OpenAI's Responses API, as msgspec types: all fields.

`endpoint`, `input_items` and `writer` read them. The sampling fields beyond OpenAI's are those of
chat. Fields that have no effect here are declared as well, with their class
(`schema/field_classes.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quickstep.server.openai.request_types import (
    JsonObjectFormat,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    TextFormat,
)
from quickstep.server.schema.field_classes import hint, refused

__all__ = [
    "FunctionCallItem",
    "FunctionCallOutputItem",
    "FunctionToolSpec",
    "InputItemsQuery",
    "InputPart",
    "MessageItem",
    "ReasoningItem",
    "ReasoningPart",
    "ResponsesRequest",
    "ResponsesStreamOptions",
    "SchemaFormat",
    "SummaryPart",
    "TextConfig",
]

Status = Literal["in_progress", "completed", "incomplete"]


class InputTextPart(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="input_text", omit_defaults=True
):
    """A text part of a message to the model."""

    text: str
    prompt_cache_breakpoint: Annotated[
        dict[str, Any] | None, hint("prefixes are cached without marks")
    ] = None


class OutputTextPart(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="output_text", omit_defaults=True
):
    """A text part of a message of the model; annotations and logprobs have no effect."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class OutputRefusalPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="refusal"):
    """A refusal of the model; the template gets its text."""

    refusal: str


class InputImagePart(msgspec.Struct, frozen=True, tag="input_image"):
    """An image: declared so that the error names it."""


class InputFilePart(msgspec.Struct, frozen=True, tag="input_file"):
    """A file: declared so that the error names it."""


class InputAudioPart(msgspec.Struct, frozen=True, tag="input_audio"):
    """Audio: declared so that the error names it."""


InputPart = (
    InputTextPart
    | OutputTextPart
    | OutputRefusalPart
    | InputImagePart
    | InputFilePart
    | InputAudioPart
)


class MessageItem(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A message; `type` may be omitted. The model does not see the id and the status."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    phase: Annotated[str | None, hint("the model has no phases")] = None


class FunctionCallItem(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An earlier call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: Annotated[Any, refused("only the model calls", passes=({"type": "direct"},))] = None
    namespace: Annotated[Any, refused("functions have no namespaces")] = None


class FunctionCallOutputItem(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: Status | None = None
    caller: Annotated[Any, refused("only the model calls", passes=({"type": "direct"},))] = None
    name: str | None = None
    namespace: Annotated[Any, refused("functions have no namespaces")] = None


class SummaryPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="summary_text"):
    """A part of a summary of the reasoning."""

    text: str


class ReasoningPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="reasoning_text"):
    """A part of the reasoning."""

    text: str


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Earlier reasoning: its content, else its `encrypted_content`, else its summary."""

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
    allowed_callers: Annotated[
        list[str] | None, refused("only the model calls", passes=(["direct"],))
    ] = None
    defer_loading: Annotated[bool | None, hint("every tool is in the prompt", passes=(False,))] = (
        None
    )
    output_schema: Annotated[
        dict[str, Any] | None, hint("what a function gives back is not checked")
    ] = None


class SchemaFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="json_schema"):
    """Output that matches a JSON schema, which is enforced for any value of `strict`."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The format and the verbosity of the output."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None,
        hint("the model has no verbosity setting", passes=("medium",), conditional=True),
    ] = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The reasoning effort; the other fields have no effect."""

    effort: Annotated[str | None, hint("the model has no such level", conditional=True)] = None
    summary: Annotated[str | None, hint("the reasoning is returned unchanged")] = None
    generate_summary: Annotated[str | None, hint("the reasoning is returned unchanged")] = None
    context: Annotated[
        str | None, hint("the reasoning is returned unchanged", passes=("auto",))
    ] = None
    mode: Annotated[str | None, hint("the model has one mode", passes=("standard",))] = None


class ResponsesStreamOptions(StreamOptions, forbid_unknown_fields=True, frozen=True):
    """`stream_options`: the last event has the usage in any case."""

    include_usage: Annotated[bool | None, hint("the last event has the usage", passes=(False,))] = (
        None
    )
    continuous_usage_stats: Annotated[
        bool | None, hint("the last event has the usage", passes=(False,))
    ] = None


class ResponsesRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/responses`."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt_cache_key: Annotated[str | None, hint("one engine has every prefix in its reach")] = None
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
    access_programs: Annotated[Any, refused("there are no access programs")] = None
    max_tokens: Annotated[int | None, refused("send max_output_tokens")] = None
    n: Annotated[int | None, refused("a response has one output", passes=(1,))] = None
    response_format: Annotated[ResponseFormat | None, refused("send text.format")] = None
    background: Annotated[Any, refused("a response ends with its request", passes=(False,))] = None
    background_options: Annotated[Any, refused("a response ends with its request")] = None
    context_management: Annotated[Any, hint("the input is used unchanged", passes=([],))] = None
    conversation: Annotated[Any, refused("send previous_response_id")] = None
    image: Annotated[Any, refused("the model reads text only")] = None
    moderation: Annotated[Any, refused("there is no moderation model")] = None
    prompt: Annotated[Any, refused("there are no stored prompts")] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, hint("prefixes are cached without a lifetime")
    ] = None
    prompt_cache_retention: Annotated[
        str | None, hint("prefixes are cached in memory only", passes=("in_memory",))
    ] = None
    service_tier: Annotated[
        str | None, hint("there is one service tier", passes=("auto", "default"))
    ] = None
    truncation: Annotated[
        str | None, hint("nothing of the input is left out", passes=("disabled",))
    ] = None


class InputItemsQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `GET /v1/responses/{id}/input_items`; `include` has no effect."""

    after: str | None = None
    include: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20  # OpenAI's
    order: Literal["asc", "desc"] = "desc"
