"""The JSON bodies of OpenAI's requests, as msgspec types: the complete schema.

Every field of OpenAI's schema is declared here or in `fields/sampling_fields.py` with its class, so
that what we do not do is reported or refused by name. `null` means "not given" everywhere. Names
beyond OpenAI's are vLLM's. `completions` and `chat` read these types and nothing else does.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from quickstep.server.fields.field_classes import effect, hint, note, refused
from quickstep.server.fields.sampling_fields import SamplingFields
from quickstep.server.fields.shared_fields import (
    Account,
    AddGenerationPrompt,
    AnswerTimeout,
    CacheSalt,
    ChatTemplateKwargs,
    Dimensions,
    InputTruncation,
    ModelName,
    ParallelToolCalls,
    Priority,
    PromptCacheKey,
    PromptCacheOptions,
    PromptCacheRetention,
    ReasoningEffort,
    ReturnProgress,
    SafetyIdentifier,
    ServiceTier,
    ToolChoice,
    Tools,
    TopLogprobs,
    WithLogprobs,
)

_TEMPLATE = effect("Given to the chat template.")


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
    model: ModelName = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        effect("Numbers, or the base64 of little-endian float32; float if not given."),
    ] = None
    dimensions: Dimensions = None
    user: Account = None
    pooling: Annotated[
        Literal["mean", "last", "cls"] | None,
        effect(
            "How the hidden states become one vector: their mean, or the last or first token's; "
            "the model's card decides if not given, else it is the last one's."
        ),
    ] = None
    input_type: Annotated[
        str | None,
        effect(
            "The task, such as query or document: the model's text for it goes before each input; "
            "that of the card's default task if not given."
        ),
    ] = None
    truncate_prompt_tokens: InputTruncation = None
    add_special_tokens: Annotated[
        bool | None, effect("Whether the tokenizer adds its special tokens; true if not given.")
    ] = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout_s: AnswerTimeout = None
