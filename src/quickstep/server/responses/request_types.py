"""The JSON body of OpenAI's Responses API, as msgspec types: all fields.

`endpoint`, `input_items` and `writer` read them. The sampling fields beyond OpenAI's are those of
chat. Fields that have no effect here are declared as well, with their class
(`fields/field_classes.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from quickstep.server.fields.field_classes import effect, hint, note, refused
from quickstep.server.fields.sampling_fields import (
    JsonObjectFormat,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    TextFormat,
)
from quickstep.server.fields.shared_fields import (
    AllowedCallers,
    ChatTemplateKwargs,
    DeferLoading,
    ParallelToolCalls,
    PromptCacheKey,
    PromptCacheOptions,
    PromptCacheRetention,
    ReasoningEffort,
    SafetyIdentifier,
    ServiceTier,
    StrictArguments,
    StrictSchema,
    ToolChoice,
    Tools,
)

_ITEM_ID = effect("Repeated in the list of the input; one is made if not given.")
_ITEM_STATUS = effect("Repeated in the list of the input.")
_TEMPLATE = effect("Given to the chat template.")


Status = Literal["in_progress", "completed", "incomplete"]


class InputTextPart(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="input_text", omit_defaults=True
):
    """A text part of a message to the model."""

    text: Annotated[str, effect("The text; parts are joined by line ends.")]
    prompt_cache_breakpoint: Annotated[
        dict[str, Any] | None, hint("prefixes are cached without marks")
    ] = None


class OutputTextPart(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="output_text", omit_defaults=True
):
    """A text part of a message of the model; annotations and logprobs have no effect."""

    text: Annotated[str, effect("The text, as the model wrote it.")]
    annotations: Annotated[
        list[Any] | None,
        effect("Notes about the text; they come back in the listing of the input."),
    ] = None
    logprobs: Annotated[
        list[Any] | None,
        effect("Notes about the text; they come back in the listing of the input."),
    ] = None


class OutputRefusalPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="refusal"):
    """A refusal of the model; the template gets its text."""

    refusal: Annotated[str, effect("Read by the template as text.")]


class InputImagePart(msgspec.Struct, frozen=True, tag="input_image"):
    """An image: declared so that the error names it."""

    refused_form: ClassVar[str] = "the model reads text only"


class InputFilePart(msgspec.Struct, frozen=True, tag="input_file"):
    """A file: declared so that the error names it."""

    refused_form: ClassVar[str] = "the model reads text only"


class InputAudioPart(msgspec.Struct, frozen=True, tag="input_audio"):
    """Audio: declared so that the error names it."""

    refused_form: ClassVar[str] = "the model reads text only"


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

    role: Annotated[
        Literal["user", "assistant", "system", "developer"],
        effect("The author of the message; developer is read as system."),
    ]
    content: Annotated[str | list[InputPart], effect("The content of the message.")]
    type: Annotated[Literal["message"], effect("May be left out.")] = "message"
    id: Annotated[str | None, _ITEM_ID] = None
    status: Annotated[Status | None, _ITEM_STATUS] = None
    phase: Annotated[str | None, hint("the model has no phases")] = None


class FunctionCallItem(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An earlier call of the model."""

    type: Annotated[Literal["function_call"], effect("Says that this is an earlier call.")]
    call_id: Annotated[str, _TEMPLATE]
    name: Annotated[str, _TEMPLATE]
    arguments: Annotated[
        str, effect("Given to the chat template; mostly the JSON text of an object.")
    ]
    id: Annotated[str | None, _ITEM_ID] = None
    status: Annotated[Status | None, _ITEM_STATUS] = None
    caller: Annotated[Any, refused("only the model calls", passes=({"type": "direct"},))] = None
    namespace: Annotated[Any, refused("functions have no namespaces")] = None


class FunctionCallOutputItem(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The result of a function call."""

    type: Annotated[Literal["function_call_output"], effect("Says that this is a call's result.")]
    call_id: Annotated[str, _TEMPLATE]
    output: Annotated[str | list[InputPart], effect("What the function gave back.")]
    id: Annotated[str | None, _ITEM_ID] = None
    status: Annotated[Status | None, _ITEM_STATUS] = None
    caller: Annotated[Any, refused("only the model calls", passes=({"type": "direct"},))] = None
    name: Annotated[str | None, note("the call has the name already")] = None
    namespace: Annotated[Any, refused("functions have no namespaces")] = None


class SummaryPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="summary_text"):
    """A part of a summary of the reasoning."""

    text: Annotated[str, effect("The text.")]


class ReasoningPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="reasoning_text"):
    """A part of the reasoning."""

    text: Annotated[str, effect("The text.")]


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Earlier reasoning: its content, else its `encrypted_content`, else its summary."""

    type: Annotated[Literal["reasoning"], effect("Says that this is earlier reasoning.")]
    id: Annotated[str | None, _ITEM_ID] = None
    summary: Annotated[list[SummaryPart] | None, effect("Read where there is no content.")] = None
    content: Annotated[
        list[ReasoningPart] | None, effect("Given to the chat template, which may leave it out.")
    ] = None
    encrypted_content: Annotated[
        str | None, effect("Reasoning that this server handed out; read where there is no content.")
    ] = None
    status: Annotated[Status | None, _ITEM_STATUS] = None


class FunctionToolSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A function that the model may call."""

    name: Annotated[str, effect("The name in a call; each one once.")]
    type: Annotated[Literal["function"], effect("Only function is known.")] = "function"
    description: Annotated[str | None, effect("Included in the prompt.")] = None
    parameters: Annotated[
        dict[str, Any] | None,
        effect("The JSON schema of the arguments; enforced if the call itself is enforced."),
    ] = None
    strict: StrictArguments = None
    allowed_callers: AllowedCallers = None
    defer_loading: DeferLoading = None
    output_schema: Annotated[
        dict[str, Any] | None, hint("what a function gives back is not checked")
    ] = None


class SchemaFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="json_schema"):
    """Output that matches a JSON schema."""

    name: Annotated[str, effect("The response repeats it; it changes nothing else.")]
    schema: Annotated[
        dict[str, Any],
        effect("The JSON schema that the output fits; a keyword that cannot be enforced is 400."),
    ]
    description: Annotated[
        str | None, effect("The response repeats it; it changes nothing else.")
    ] = None
    strict: StrictSchema = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The format and the verbosity of the output."""

    format: Annotated[
        TextFormat | JsonObjectFormat | SchemaFormat | None,
        effect("Enforces the form of the complete output by a grammar."),
    ] = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None,
        effect("Sets the answer's length where the chat template has such a level."),
        hint("the model has no verbosity setting", passes=("medium",), conditional=True),
    ] = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The reasoning effort; the other fields have no effect."""

    effort: ReasoningEffort = None
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

    input: Annotated[
        str | list[dict[str, Any]] | None,
        effect("What to answer: a text, or items of a conversation."),
    ] = None
    instructions: Annotated[
        str | None,
        effect("A system message before the conversation; the next response forgets it."),
    ] = None
    max_output_tokens: Annotated[
        int | None, effect("Ends the response after this many tokens, with status incomplete.")
    ] = None
    max_tool_calls: Annotated[
        int | None,
        effect(
            "The response repeats it; it bounds tools that run inside the server, of which there "
            "are none."
        ),
    ] = None
    metadata: Annotated[dict[str, str] | None, effect("The response repeats it.")] = None
    parallel_tool_calls: ParallelToolCalls = None
    previous_response_id: Annotated[
        str | None, effect("Continues a stored response; 400 for one that is not stored.")
    ] = None
    prompt_cache_key: PromptCacheKey = None
    safety_identifier: SafetyIdentifier = None
    store: Annotated[
        bool | None, effect("Whether the response can be fetched and continued; true if not given.")
    ] = None
    background: Annotated[
        bool | None,
        effect(
            "The response continues when the client leaves: it is fetched, followed or cancelled by"
            " its id. Needs store."
        ),
    ] = None
    text: Annotated[TextConfig | None, effect("The form of the answer.")] = None
    reasoning: Annotated[
        ReasoningConfig | None,
        effect("How much the model reasons, if its template has a setting for it."),
    ] = None
    include: Annotated[
        list[str] | None,
        effect(
            "message.output_text.logprobs adds logprobs, reasoning.encrypted_content the reasoning"
            " in a form to hand back."
        ),
    ] = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    top_logprobs: Annotated[
        int | None, effect("Alternatives per token; needs message.output_text.logprobs in include.")
    ] = None
    stream_options: Annotated[
        ResponsesStreamOptions | None, note("it may only ask for nothing; needs stream: true")
    ] = None
    chat_template_kwargs: ChatTemplateKwargs = None
    access_programs: Annotated[Any, refused("there are no access programs")] = None
    max_tokens: Annotated[int | None, refused("send max_output_tokens")] = None
    n: Annotated[int | None, refused("a response has one output", passes=(1,))] = None
    response_format: Annotated[ResponseFormat | None, refused("send text.format")] = None
    background_options: Annotated[Any, refused("background: true has no options")] = None
    context_management: Annotated[Any, hint("the input is used unchanged", passes=([],))] = None
    conversation: Annotated[Any, refused("send previous_response_id")] = None
    image: Annotated[Any, refused("the model reads text only")] = None
    moderation: Annotated[Any, refused("there is no moderation model")] = None
    prompt: Annotated[Any, refused("there are no stored prompts")] = None
    prompt_cache_options: PromptCacheOptions = None
    prompt_cache_retention: PromptCacheRetention = None
    service_tier: ServiceTier = None
    truncation: Annotated[
        str | None, hint("nothing of the input is left out", passes=("disabled",))
    ] = None


class RetrieveQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `GET /v1/responses/{id}`; `include` has no effect. With `stream`, the events of
    a response in the background come from the one after `starting_after` on.
    """

    include: str | None = None
    stream: bool = False
    starting_after: Annotated[int, msgspec.Meta(ge=0)] | None = None


class InputItemsQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `GET /v1/responses/{id}/input_items`; `include` has no effect."""

    after: str | None = None
    include: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20  # OpenAI's
    order: Literal["asc", "desc"] = "desc"
