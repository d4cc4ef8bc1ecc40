"""The JSON bodies of OpenAI's requests, as msgspec types: the whole schema, nothing beside it.

`decode` turns bytes into a typed request or a `RequestError` that names the field. Every field of
OpenAI's schema is declared here with its class (`field_classes`), so that what we do not do is
reported or refused by name. `null` means "not given" everywhere. Names beyond OpenAI's are vLLM's.
The adapters (`completions`, `chat`) read these types and nothing else does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from quickstep.errors import RequestError
from quickstep.server.schema.field_classes import hint, refused

__all__ = [
    "AssistantMessage",
    "ChatRequest",
    "ChoiceFields",
    "CompletionRequest",
    "DeveloperMessage",
    "EmbeddingRequest",
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
    "ToolMessage",
    "UserMessage",
    "decode",
    "decode_values",
    "invalid_json",
    "unknown_field",
    "validation_error",
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`stream_options`: a usage chunk at the end, or the running usage in every chunk (vLLM)."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, hint("chunks are not padded", passes=(False,))] = (
        None
    )


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
    structural_tag: Annotated[Any, refused("send a grammar")] = None


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What completions, chat and responses share. Here inheritance declares fields only."""

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
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    guided_choice: Annotated[Any, refused("send structured_outputs.choice")] = None
    guided_grammar: Annotated[Any, refused("send structured_outputs.grammar")] = None
    guided_json: Annotated[Any, refused("send structured_outputs.json")] = None
    guided_regex: Annotated[Any, refused("send structured_outputs.regex")] = None
    logits_processors: Annotated[Any, refused("there are no processors of clients")] = None


class ChoiceFields(SamplingFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What completions and chat ask for beside the text, by vLLM's names."""

    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
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
    prompt_embeds: Annotated[Any, refused("send text or token ids")] = None


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
    refusal: Annotated[str | None, refused("the model has no refusals", passes=("",))] = None
    annotations: Annotated[list[Any] | None, hint("the model reads text only", passes=([],))] = None
    audio: Annotated[Any, refused("the model gives text only")] = None
    function_call: Annotated[Any, refused("it is deprecated; send tool_calls")] = None


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
    """A tool that the client runs."""

    function: FunctionSpec


class ChatRequest(ChoiceFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: Annotated[
        bool | None,
        hint("the last message is not the assistant's", passes=(False,), conditional=True),
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: Annotated[str | None, hint("one engine has every prefix in its reach")] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    audio: Annotated[Any, refused("the model gives text only")] = None
    chat_template: Annotated[Any, refused("the model's own template is used")] = None
    documents: Annotated[Any, refused("send them in chat_template_kwargs")] = None
    function_call: Annotated[
        Any, refused("it is deprecated; send tool_choice", passes=("none",))
    ] = None
    functions: Annotated[Any, refused("it is deprecated; send tools", passes=([],))] = None
    include_reasoning: Annotated[
        bool | None, refused("the reasoning is always given", passes=(True,))
    ] = None
    modalities: Annotated[Any, refused("the model gives text only", passes=(["text"],))] = None
    moderation: Annotated[Any, refused("there is no moderation model")] = None
    prediction: Annotated[
        dict[str, Any] | None, hint("predicted outputs make nothing faster here")
    ] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, hint("prefixes are cached without a lifetime")
    ] = None
    prompt_cache_retention: Annotated[
        str | None, hint("prefixes are cached in memory only", passes=("in_memory",))
    ] = None
    reasoning_effort: Annotated[
        str | None, hint("the model has no such level", conditional=True)
    ] = None
    service_tier: Annotated[
        str | None, hint("there is one service tier", passes=("auto", "default"))
    ] = None
    store: Annotated[bool | None, hint("completions are not stored", passes=(False,))] = None
    verbosity: Annotated[
        str | None, hint("the model has no verbosity setting", passes=("medium",), conditional=True)
    ] = None
    web_search_options: Annotated[dict[str, Any] | None, hint("the server runs no tools")] = None


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Texts or token ids. A flat list in `input` is texts or one input's token ids.

    `dimensions` keeps the first ones and scales them to length 1 again, which models that were
    trained for it (Matryoshka) allow. `pooling` is how the hidden states become one vector; without
    it the model's card decides, else the last token's state.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: Literal["mean", "last"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None


_Schema = TypeVar("_Schema", bound=msgspec.Struct)
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>.*)`$", re.DOTALL)
_NAMED_FIELD = re.compile(r"field `(?P<field>.*)`$", re.DOTALL)


def decode(body: bytes, schema: type[_Schema]) -> _Schema:
    """A body that may have known fields only, typed. Raises RequestError that names the field."""
    try:
        return msgspec.json.decode(body.decode(), type=schema)
    except msgspec.ValidationError as error:
        raise validation_error(error, schema) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_json(error) from None


def decode_values(values: Mapping[str, object], schema: type[_Schema]) -> _Schema:
    """The typed fields of a query or a form, whose numbers are texts. Raises RequestError."""
    try:
        return msgspec.convert(dict(values), schema, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(error, schema) from None


def invalid_json(error: Exception) -> RequestError:
    """What is wrong with a body that is no JSON text, or one that is nested too deeply."""
    if isinstance(error, RecursionError):
        return RequestError("the body's JSON is nested too deeply")
    return RequestError(f"the body is not valid JSON: {error}")


def unknown_field(path: str, schema: type[msgspec.Struct], within: str = "") -> RequestError:
    """A field that `schema`, which is at `within` in the body, does not have."""
    name = path.removeprefix(f"{within}.")
    near = difflib.get_close_matches(name, schema.__struct_fields__, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return RequestError(f"{path} is unknown{hint}", param=path)


def validation_error(
    error: msgspec.ValidationError, schema: type[msgspec.Struct], within: str = ""
) -> RequestError:
    """Msgspec's sentence as ours: unknown, missing or of a wrong type, and where."""
    text = str(error)
    at = _PATH.search(text)
    path = ".".join(part for part in (within, at.group("path") if at else "") if part)
    reason = text[: at.start()] if at else text
    field = _NAMED_FIELD.search(reason)
    if field:
        path = f"{path}.{field.group('field')}" if path else field.group("field")
        if "unknown" in reason:
            return unknown_field(path, schema, within)
        return RequestError(f"{path} is missing", param=path)
    where = f"{path}: " if path else "the body: "
    return RequestError(f"{where}{reason[:1].lower()}{reason[1:]}", param=path or None)
