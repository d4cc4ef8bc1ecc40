"""The JSON bodies of OpenAI's requests, as msgspec types: the complete schema.

`decode` turns bytes into a typed request or a `RequestError` that names the field. Every field of
OpenAI's schema is declared here with its class (`field_classes`), so that what we do not do is
reported or refused by name. `null` means "not given" everywhere. Names beyond OpenAI's are vLLM's.
The adapters (`completions`, `chat`) read these types and nothing else does.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from quickstep.errors import RequestError
from quickstep.server.fields.field_classes import effect, hint, note, refused
from quickstep.server.fields.shared_fields import (
    Account,
    AdaptiveTarget,
    AddGenerationPrompt,
    CacheSalt,
    ChatTemplateKwargs,
    Dimensions,
    DynatempExponent,
    DynatempRange,
    LoRAScales,
    Mirostat,
    MirostatSetting,
    ParallelToolCalls,
    Priority,
    PromptCacheKey,
    PromptCacheOptions,
    PromptCacheRetention,
    ReasoningEffort,
    RequestClassName,
    ReturnProgress,
    SafetyIdentifier,
    ServiceTier,
    Stream,
    StrictArguments,
    StrictSchema,
    ToolChoice,
    Tools,
    TopLogprobs,
    TopNSigma,
    TtftDeadline,
    WithLogprobs,
)

_MODEL = effect("Which served name answers; the first one if not given, 404 for an unknown one.")
_TEMPLATE = effect("Given to the chat template.")
# other servers' names of `thinking_budget`, in which -1 is no limit
BUDGET_NAMES = (
    "thinking_token_budget",
    "reasoning_budget",
    "thinking_budget_tokens",
    "reasoning_budget_tokens",
)
_BUDGET = effect(
    "Another name of thinking_budget; -1 for no limit. Several may be sent if they agree."
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`stream_options`: a usage chunk at the end, or the running usage in every chunk (vLLM)."""

    include_usage: Annotated[
        bool | None, effect("The last chunk has the usage and no choices.")
    ] = None
    continuous_usage_stats: Annotated[bool | None, effect("Every chunk has the usage so far.")] = (
        None
    )
    include_obfuscation: Annotated[bool | None, hint("chunks are not padded", passes=(False,))] = (
        None
    )


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="text"):
    """Output without a form."""


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="json_object"):
    """Output that is a JSON object."""

    schema: Annotated[
        dict[str, Any] | None, effect("llama.cpp's name of a schema that the output fits.")
    ] = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A named schema; name and description are notes."""

    name: Annotated[str, note("for readers of the request")]
    description: Annotated[str | None, note("for readers of the request")] = None
    schema: Annotated[
        dict[str, Any] | None,
        effect("The JSON schema that the output fits; a keyword that cannot be enforced is 400."),
    ] = None
    strict: StrictSchema = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="json_schema"):
    """Output that fits a JSON schema, given with a name, or by itself as llama.cpp takes it."""

    json_schema: Annotated[JsonSchema | None, effect("The schema, with a name.")] = None
    schema: Annotated[dict[str, Any] | None, effect("The schema by itself.")] = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """vLLM's `structured_outputs`: one of these; `grammar` is in Lark or GBNF."""

    json: Annotated[
        dict[str, Any] | str | None,
        effect("The output fits this JSON schema, given as an object or as its text."),
    ] = None
    json_object: Annotated[bool | None, effect("The output is a JSON object.")] = None
    regex: Annotated[
        str | None, effect("The complete output matches this regular expression (Rust's syntax).")
    ] = None
    choice: Annotated[list[str] | None, effect("The output is one of these texts.")] = None
    grammar: Annotated[
        str | None, effect("The output derives from this grammar, in llguidance's Lark or in GBNF.")
    ] = None
    structural_tag: Annotated[Any, refused("send a grammar")] = None


class RepetitionDetection(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """vLLM's `repetition_detection`: the same tokens several times in a row end the choice."""

    max_pattern_size: Annotated[
        int, msgspec.Meta(ge=0, le=1024), effect("Most tokens that repeat; 0 ends nothing.")
    ] = 0
    min_pattern_size: Annotated[
        int, msgspec.Meta(ge=0, le=1024), effect("Fewest tokens that repeat; 0 is 1.")
    ] = 0
    min_count: Annotated[
        int, msgspec.Meta(ge=0), effect("How often they occur in a row, at least 2.")
    ] = 0


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The fields that completions, chat and responses share."""

    model: Annotated[str | None, _MODEL] = None
    n: int | None = None
    preset: Annotated[
        str | None,
        effect(
            "Sets temperature and top_p for a kind of task; the request's own fields override it."
        ),
    ] = None
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
    thinking_token_budget: Annotated[int | None, _BUDGET] = None
    reasoning_budget: Annotated[int | None, _BUDGET] = None
    thinking_budget_tokens: Annotated[int | None, _BUDGET] = None
    reasoning_budget_tokens: Annotated[int | None, _BUDGET] = None
    reasoning_budget_message: str | None = None
    repetition_detection: RepetitionDetection | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: Annotated[
        ResponseFormat | None, effect("Enforces the form of the output by a grammar.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        effect("Enforces the form of the output by one of several grammars."),
    ] = None
    stream: Stream = None
    stream_options: Annotated[
        StreamOptions | None,
        effect("What the stream contains in addition to the text; needs stream: true."),
    ] = None
    user: Account = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    lora: LoRAScales = None
    timeout_s: Annotated[
        float | None,
        effect("Seconds after which what was generated is the answer, with finish_reason timeout."),
    ] = None
    request_class: RequestClassName = None
    ttft_deadline_ms: TtftDeadline = None
    speculation: Annotated[
        bool | None,
        effect("False generates without draft tokens; the output is the same."),
    ] = None
    quickstep_timings: Annotated[
        bool | None,
        effect("Adds `quickstep` to the response: times of each choice, device seconds, costs."),
    ] = None
    grammar: Annotated[
        str | None, effect("llama.cpp's field: the output follows this grammar (GBNF).")
    ] = None
    json_schema: Annotated[
        dict[str, Any] | None, effect("llama.cpp's field: the output fits this JSON schema.")
    ] = None
    n_predict: Annotated[int | None, refused("send max_tokens", passes=(-1,))] = None
    samplers: Annotated[Any, refused("the order of the samplers is fixed")] = None
    mirostat: Mirostat = None
    mirostat_tau: MirostatSetting = None
    mirostat_eta: MirostatSetting = None
    dynatemp_range: DynatempRange = None
    dynatemp_exponent: DynatempExponent = None
    top_n_sigma: TopNSigma = None
    adaptive_target: AdaptiveTarget = None
    repeat_penalty: Annotated[float | None, refused("send repetition_penalty", passes=(1.0,))] = (
        None
    )
    dry_penalty_last_n: Annotated[int | None, refused("send dry_range", passes=(-1,))] = None
    t_max_predict_ms: Annotated[int | None, refused("send timeout_s", passes=(0, -1))] = None
    regex: Annotated[Any, refused("send structured_outputs.regex")] = None
    ebnf: Annotated[Any, refused("send grammar")] = None
    structural_tag: Annotated[Any, refused("send structured_outputs.grammar")] = None
    min_new_tokens: Annotated[int | None, refused("send min_tokens", passes=(0,))] = None
    max_new_tokens: Annotated[int | None, refused("send max_tokens")] = None
    stop_regex: Annotated[Any, refused("send stop")] = None
    guided_choice: Annotated[Any, refused("send structured_outputs.choice")] = None
    guided_grammar: Annotated[Any, refused("send structured_outputs.grammar")] = None
    guided_json: Annotated[Any, refused("send structured_outputs.json")] = None
    guided_regex: Annotated[Any, refused("send structured_outputs.regex")] = None
    logits_processors: Annotated[Any, refused("there are no processors of clients")] = None


class ChoiceFields(SamplingFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The fields that completions and chat share, by vLLM's names."""

    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    return_token_ids: Annotated[bool | None, effect("Adds the token ids of prompt and output.")] = (
        None
    )
    return_tokens_as_token_ids: Annotated[
        bool | None, effect("Names the tokens of logprobs by their ids: token_id:7.")
    ] = None
    return_progress: ReturnProgress = None
    truncate_prompt_tokens: Annotated[
        int | None,
        effect("Reads only so many of the prompt's last tokens; -1 leaves space for the answer."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        effect(
            "The side at which truncate_prompt_tokens removes tokens: left (the default) keeps the "
            "last ones, right the first."
        ),
    ] = None
    use_beam_search: Annotated[
        bool | None, effect("Beam search of the n likeliest texts instead of sampling.")
    ] = None
    length_penalty: Annotated[
        float | None,
        effect("How much longer texts gain in a beam search; needs use_beam_search: true."),
    ] = None
    early_stopping: Annotated[
        bool | None,
        effect("Ends a beam search with the first n texts; needs use_beam_search: true."),
    ] = None


class CompletionRequest(ChoiceFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/completions`. A flat list in `prompt` is texts or one prompt's token ids."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        effect("What to continue: a text, token ids, or a list of either."),
    ]
    logprobs: int | None = None
    add_special_tokens: Annotated[
        bool | None,
        effect("Whether the tokenizer adds its special tokens to the prompt; true if not given."),
    ] = None
    best_of: Annotated[
        int | None, effect("Samples this many and returns the n of the highest mean logprob.")
    ] = None
    echo: Annotated[
        bool | None,
        effect("The prompt comes before the text, with its logprobs if they are requested."),
    ] = None
    suffix: Annotated[
        str | None,
        effect(
            "Requests the text between prompt and suffix; 400 if the model has no tokens for that."
        ),
    ] = None
    prompt_embeds: Annotated[Any, refused("send text or token ids")] = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="text"):
    """A piece of a message's content."""

    text: Annotated[
        str, effect("The text; a template that reads no parts has them joined by line ends.")
    ]


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="refusal"):
    """A refusal in an assistant message's content; the template sees its text."""

    refusal: Annotated[str, effect("Read by the template as text.")]


class MediaPart(msgspec.Struct, frozen=True, tag="image_url"):
    """An image: declared, so that the refusal names it."""

    refused_form: ClassVar[str] = "the model reads text only"


class AudioPart(msgspec.Struct, frozen=True, tag="input_audio"):
    """A sound: declared, so that the refusal names it."""

    refused_form: ClassVar[str] = "the model reads text only"


class FilePart(msgspec.Struct, frozen=True, tag="file"):
    """A file: declared, so that the refusal names it."""

    refused_form: ClassVar[str] = "the model reads text only"


ContentPart = TextPart | RefusalPart | MediaPart | AudioPart | FilePart
Content = str | list[ContentPart]


class SystemMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="system", tag_field="role"
):
    """Instructions."""

    content: Annotated[Content, effect("Instructions for the model.")]
    name: Annotated[str | None, _TEMPLATE] = None


class DeveloperMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="developer", tag_field="role"
):
    """OpenAI's later name of `system`; the template sees `system`."""

    content: Annotated[Content, effect("Instructions; the template sees role system.")]
    name: Annotated[str | None, _TEMPLATE] = None


class UserMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="user", tag_field="role"
):
    """A message of the user."""

    content: Annotated[Content, effect("The user's message.")]
    name: Annotated[str | None, _TEMPLATE] = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Name and JSON text of the arguments of an earlier call."""

    name: Annotated[str, _TEMPLATE]
    arguments: Annotated[
        str, effect("Given to the chat template; mostly the JSON text of an object.")
    ]


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An earlier call in the history; `index` is there when a client sends back what it got."""

    id: Annotated[str, _TEMPLATE]
    function: Annotated[CalledFunction, effect("What was called.")]
    type: Annotated[Literal["function"], effect("Only function is known.")] = "function"
    index: Annotated[int | None, note("clients send back what a stream gave them")] = None


class AssistantMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="assistant", tag_field="role"
):
    """A message of the model. Fields that are null in a response may be sent back."""

    content: Annotated[
        Content | None, effect("The model's message; may be null with tool_calls.")
    ] = None
    name: Annotated[str | None, _TEMPLATE] = None
    tool_calls: Annotated[
        list[ToolCall] | None,
        effect("The calls that the model made; 400 if the template cannot write them."),
    ] = None
    reasoning_content: Annotated[
        str | None, effect("Given to the chat template, which may leave it out.")
    ] = None
    reasoning: Annotated[str | None, effect("Another name of reasoning_content.")] = None
    refusal: Annotated[str | None, refused("the model has no refusals", passes=("",))] = None
    annotations: Annotated[list[Any] | None, hint("the model reads text only", passes=([],))] = None
    audio: Annotated[Any, refused("the model gives text only")] = None
    function_call: Annotated[Any, refused("it is deprecated; send tool_calls")] = None


class ToolMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="tool", tag_field="role"
):
    """The result of a tool."""

    content: Annotated[Content, effect("The tool's result.")]
    tool_call_id: Annotated[str, _TEMPLATE]
    name: Annotated[str | None, _TEMPLATE] = None


class FunctionMessage(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="function", tag_field="role"
):
    """The deprecated form of `tool`: declared, so that the refusal names it."""

    refused_form: ClassVar[str] = "it is deprecated; send role tool"

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

    name: Annotated[str, effect("The name in a call; each one once.")]
    description: Annotated[str | None, effect("Included in the prompt.")] = None
    parameters: Annotated[
        dict[str, Any] | None,
        effect(
            "The JSON schema of the arguments, part of the prompt, and enforced where a call is."
        ),
    ] = None
    strict: StrictArguments = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="function"):
    """A tool that the client runs."""

    function: Annotated[FunctionSpec, effect("The function that may be called.")]


class ChatRequest(ChoiceFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[
        list[Message], effect("The conversation, as the model's chat template writes it.")
    ]
    max_completion_tokens: Annotated[
        int | None, effect("OpenAI's later name of max_tokens; both may be sent if they agree.")
    ] = None
    logprobs: WithLogprobs = None
    top_logprobs: TopLogprobs = None
    echo: Annotated[
        bool | None,
        effect("Puts the last message before the answer, if it is the assistant's."),
        hint("the last message is not the assistant's", passes=(False,), conditional=True),
    ] = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: Annotated[
        bool | None,
        effect(
            "The answer continues from the last message's text, which is the assistant's; a "
            "grammar or a stop string is of what is new."
        ),
    ] = None
    chat_template_kwargs: ChatTemplateKwargs = None
    metadata: Annotated[dict[str, str] | None, effect("The response repeats it.")] = None
    safety_identifier: SafetyIdentifier = None
    prompt_cache_key: PromptCacheKey = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: ParallelToolCalls = None
    audio: Annotated[Any, refused("the model gives text only")] = None
    chat_template: Annotated[Any, refused("start the server with --chat-template")] = None
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
    prompt_cache_options: PromptCacheOptions = None
    prompt_cache_retention: PromptCacheRetention = None
    reasoning_effort: ReasoningEffort = None
    service_tier: ServiceTier = None
    store: Annotated[bool | None, hint("completions are not stored", passes=(False,))] = None
    verbosity: Annotated[
        str | None,
        effect("Sets the answer's length where the chat template has such a level."),
        hint("the model has no verbosity setting", passes=("medium",), conditional=True),
    ] = None
    web_search_options: Annotated[dict[str, Any] | None, hint("the server runs no tools")] = None


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Texts or token ids. A flat list in `input` is texts or one input's token ids.

    `dimensions` keeps the first ones and scales them to length 1 again, which models that were
    trained for it (Matryoshka) allow. `pooling` is how the hidden states become one vector; without
    it the model's card decides, else the last token's state.
    """

    input: Annotated[
        str | list[str | int | list[int]],
        effect("What to embed: a text, token ids, or a list of either."),
    ]
    model: Annotated[str | None, _MODEL] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        effect("Numbers, or the base64 of little-endian float32; float if not given."),
    ] = None
    dimensions: Dimensions = None
    user: Account = None
    pooling: Annotated[
        Literal["mean", "last"] | None,
        effect(
            "How the hidden states become one vector; the model's card decides if not given, else "
            "the last token's state."
        ),
    ] = None
    add_special_tokens: Annotated[
        bool | None, effect("Whether the tokenizer adds its special tokens; true if not given.")
    ] = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout_s: Annotated[
        float | None, effect("After this many seconds the answer is the error 408.")
    ] = None


_Schema = TypeVar("_Schema", bound=msgspec.Struct)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>.*)`$", re.DOTALL)
_NAMED_FIELD = re.compile(r"field `(?P<field>.*)`$", re.DOTALL)


def decode(body: bytes, schema: type[_Schema]) -> _Schema:
    """A body that may have known fields only, typed. Raises RequestError that names the field."""
    try:
        return msgspec.json.decode(body.decode(), type=schema)
    except msgspec.ValidationError as error:
        raise validation_error(error, schema) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_json(error, body) from None


def decode_values(values: Mapping[str, object], schema: type[_Schema]) -> _Schema:
    """The typed fields of a query or a form, in which numbers are strings. Raises RequestError."""
    try:
        return msgspec.convert(dict(values), schema, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(error, schema) from None


def invalid_json(error: Exception, body: bytes) -> RequestError:
    """What is wrong with a body that is no JSON text, or one that is nested too deeply."""
    if isinstance(error, RecursionError):
        return RequestError("the body's JSON is nested too deeply")
    path = _path_of_half_pair(body)
    if path is not None:
        return RequestError(
            f"{path or 'the body'} holds half a surrogate pair, which is not Unicode text; send "
            "both halves, or U+FFFD instead",
            param=path or None,
        )
    return RequestError(f"the body is not valid JSON: {error}")


def _path_of_half_pair(body: bytes) -> str | None:
    """The path of the first string with half a surrogate pair; None if there is none.

    JSON can spell such a string, and Python's decoder reads it where ours reports an odd error.
    """
    if _SURROGATE.search(body) is None:
        return None
    try:
        found: list[tuple[str, object]] = [("", json.loads(body))]
    except (ValueError, RecursionError):
        return None
    while found:
        path, value = found.pop()
        if isinstance(value, dict):
            if any(map(_has_surrogate, value)):
                return path
            inner = [(f"{path}.{name}".removeprefix("."), each) for name, each in value.items()]
            found += reversed(inner)
        elif isinstance(value, list):
            found += reversed([(f"{path}[{index}]", each) for index, each in enumerate(value)])
        elif isinstance(value, str) and _has_surrogate(value):
            return path
    return None


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


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
