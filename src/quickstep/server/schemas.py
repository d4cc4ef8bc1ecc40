"""The JSON bodies of OpenAI's requests, as msgspec types: the whole schema, nothing beside it.

`decode` turns bytes into a typed request or a `RequestError` that names the field. Every field of
OpenAI's schema is declared here, so that what we do not do is refused by name in `refused.py`
and what nobody knows is refused as unknown. `null` means "not given" everywhere. Names beyond
OpenAI's are vLLM's. The adapters (`completions`, `chat`) read these types and nothing else does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from quickstep.errors import RequestError

__all__ = [
    "AssistantMessage",
    "ChatRequest",
    "ChoiceFields",
    "CompletionRequest",
    "CustomTool",
    "DeveloperMessage",
    "FunctionMessage",
    "FunctionTool",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "MediaPart",
    "Message",
    "RefusalPart",
    "SamplingFields",
    "StreamOptions",
    "StructuredOutputs",
    "SystemMessage",
    "TextFormat",
    "TextPart",
    "Tool",
    "ToolMessage",
    "UserMessage",
    "converted",
    "decode",
    "decode_values",
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`stream_options`: a usage chunk at the end, or the running usage in every chunk (vLLM)."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="text"):
    """Output without a form."""


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="json_object"):
    """Output that is a JSON object."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A named schema. It is enforced whatever `strict` says; name and description are notes."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="json_schema"):
    """Output that fits a JSON schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """vLLM's `structured_outputs`: one of these; `grammar` is in Lark or GBNF."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What both surfaces share. The one use of inheritance: it declares fields, not behaviour."""

    model: str | None = None
    n: int | None = None
    preset: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = None
    dry_sequence_breakers: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_budget: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None


class ChoiceFields(SamplingFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What completions and chat ask for beside the text, by vLLM's names."""

    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None


class CompletionRequest(ChoiceFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/completions`. A flat list in `prompt` is texts or one prompt's token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="text"):
    """A piece of a message's content."""

    text: str


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="refusal"):
    """A refusal in an assistant message's content; the template sees its text."""

    refusal: str


class MediaPart(msgspec.Struct, frozen=True, tag="image_url"):
    """An image: known, so that it is refused in words."""


class AudioPart(msgspec.Struct, frozen=True, tag="input_audio"):
    """A sound: known, so that it is refused in words."""


class FilePart(msgspec.Struct, frozen=True, tag="file"):
    """A file: known, so that it is refused in words."""


ContentPart = TextPart | RefusalPart | MediaPart | AudioPart | FilePart
Content = str | list[ContentPart]


class SystemMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="system", tag_field="role"
):
    """Instructions."""

    content: Content
    name: str | None = None


class DeveloperMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="developer", tag_field="role"
):
    """OpenAI's later name of `system`; the template sees `system`."""

    content: Content
    name: str | None = None


class UserMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="user", tag_field="role"
):
    """What the user says."""

    content: Content
    name: str | None = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Name and JSON text of the arguments of an earlier call."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An earlier call in the history; `index` is there when a client sends back what it got."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class AssistantMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="assistant", tag_field="role"
):
    """What the model said. The null fields are there when a client sends back what it got."""

    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class ToolMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="tool", tag_field="role"
):
    """What a tool gave back."""

    content: Content
    tool_call_id: str
    name: str | None = None


class FunctionMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="function", tag_field="role"
):
    """The deprecated form of `tool`: known, so that it is refused in words."""

    content: Content | None = None
    name: str | None = None


Message = (
    SystemMessage
    | DeveloperMessage
    | UserMessage
    | AssistantMessage
    | ToolMessage
    | FunctionMessage
)


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A function that the model may call; `parameters` is the JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="function"):
    """A tool of the one kind that there is."""

    function: FunctionSpec


class CustomTool(msgspec.Struct, frozen=True, tag="custom"):
    """A tool with free text as input: known, so that it is refused in words."""


Tool = FunctionTool | CustomTool


class ChatRequest(ChoiceFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: str | None = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None


_Schema = TypeVar("_Schema", bound=msgspec.Struct)
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>.*)`$", re.DOTALL)
_NAMED_FIELD = re.compile(r"field `(?P<field>.*)`$", re.DOTALL)


def decode(body: bytes, schema: type[_Schema]) -> _Schema:
    """The typed request. Raises RequestError with the path of the first wrong field."""
    try:
        # decoding the text first refuses invalid UTF-8 in skipped values as well
        return msgspec.json.decode(body.decode(), type=schema)
    except msgspec.ValidationError as error:
        raise _named(str(error), schema) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("the body's JSON is nested too deeply") from None


def decode_values(values: Mapping[str, object], schema: type[_Schema]) -> _Schema:
    """The typed fields of a query or a form, whose numbers are texts. Raises RequestError."""
    try:
        return msgspec.convert(dict(values), schema, strict=False)
    except msgspec.ValidationError as error:
        raise _named(str(error), schema) from None


def converted(value: object, schema: type[_Schema], path: str) -> _Schema:
    """A part of a body, at `path`, as its type. Raises RequestError with the whole path."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        raise _named(str(error), schema, path) from None


def _named(text: str, schema: type[msgspec.Struct], within: str = "") -> RequestError:
    """Msgspec's sentence as ours: unknown, missing or of a wrong type, and where."""
    at = _PATH.search(text)
    path = ".".join(part for part in (within, at.group("path") if at else "") if part)
    reason = text[: at.start()] if at else text
    field = _NAMED_FIELD.search(reason)
    if field:
        path = f"{path}.{field.group('field')}" if path else field.group("field")
        if "unknown" not in reason:
            return RequestError(f"{path} is missing", param=path)
        name = path.removeprefix(f"{within}.")
        near = difflib.get_close_matches(name, schema.__struct_fields__, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return RequestError(f"{path} is unknown{hint}", param=path)
    where = f"{path}: " if path else "the body: "
    return RequestError(f"{where}{reason[:1].lower()}{reason[1:]}", param=path or None)
