"""The JSON bodies of Anthropic's Messages API, as msgspec types: all fields.

`endpoint` and `turns` read them. Fields that have no effect here are declared as well, with their
class (`fields/field_classes.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from quickstep.server.fields.field_classes import effect, hint, note, refused
from quickstep.server.fields.shared_fields import (
    AllowedCallers,
    DeferLoading,
    ReasoningEffort,
    StrictArguments,
)

_MARK = effect(
    "Has the usage tell what was added to the cache; every prefix is cached without a mark."
)
_ONE_CALL = effect("True keeps the first call only.")
_TEMPLATE = effect("Given to the chat template.")


class CacheControl(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="ephemeral"):
    """A mark at the end of a prefix. Every prefix is cached without it, without a lifetime."""

    ttl: Annotated[Literal["5m", "1h"] | None, note("prefixes are cached for no fixed time")] = None


class PlainBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="text"):
    """A block of text."""

    text: Annotated[
        str, effect("The text; a template that reads no parts has blocks joined by line ends.")
    ]
    cache_control: Annotated[CacheControl | None, _MARK] = None
    citations: Annotated[list[Any] | None, hint("the model cites nothing", passes=([],))] = None


class OpaqueBlock(msgspec.Struct, frozen=True, tag="image"):
    """An image: declared so that the error names it."""

    refused_form: ClassVar[str] = "the model reads text only"


class UploadBlock(OpaqueBlock, frozen=True, tag="container_upload"):
    """A file for a tool of another server: declared so that the error names it."""

    refused_form: ClassVar[str] = "the server runs no tools"


class TextSource(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="text"):
    """A document's text."""

    data: Annotated[str, effect("The text.")]
    media_type: Annotated[Literal["text/plain"] | None, note("it is plain text in any case")] = None


class ContentSource(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="content"):
    """A document of blocks."""

    content: Annotated[
        str | list[PlainBlock | OpaqueBlock], effect("The text; blocks are joined by line ends.")
    ]


class OpaqueSource(msgspec.Struct, frozen=True, tag="base64"):
    """A PDF: declared so that the error names it."""

    refused_form: ClassVar[str] = "the model reads text only; send the document's text"


class UrlSource(OpaqueSource, frozen=True, tag="url"):
    """An address: declared so that the error names it."""

    refused_form: ClassVar[str] = "the server makes no outbound requests; send the document's text"


class FileSource(OpaqueSource, frozen=True, tag="file"):
    """A file of Anthropic's: declared so that the error names it."""

    refused_form: ClassVar[str] = "there are no such files; send the document's text"


class Citations(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Whether the answer cites the text."""

    enabled: Annotated[bool | None, hint("the model cites nothing", passes=(False,))] = None


class DocumentBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="document"):
    """A document of text, after its title and its context."""

    source: Annotated[
        TextSource | ContentSource | OpaqueSource | UrlSource | FileSource,
        effect("The document's text."),
    ]
    title: Annotated[str | None, effect("Written before the text.")] = None
    context: Annotated[str | None, effect("Written before the text.")] = None
    citations: Annotated[Citations | None, note("see its field")] = None
    cache_control: Annotated[CacheControl | None, _MARK] = None


class SearchResultBlock(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="search_result"
):
    """A result of the client's search: its text, after its title and its source."""

    content: Annotated[list[PlainBlock], effect("The text; blocks are joined by line ends.")]
    source: Annotated[str, effect("Written before the text.")]
    title: Annotated[str, effect("Written before the text.")]
    citations: Annotated[Citations | None, note("see its field")] = None
    cache_control: Annotated[CacheControl | None, _MARK] = None


class ForeignBlock(msgspec.Struct, frozen=True, tag="redacted_thinking"):
    """A block that another server wrote and only it can read. The model does not get it, which is
    reported.
    """


class ServerToolUseBlock(ForeignBlock, frozen=True, tag="server_tool_use"):
    """A call that another server ran itself."""


class WebSearchResultBlock(ForeignBlock, frozen=True, tag="web_search_tool_result"):
    """The result of another server's tool."""


class WebFetchResultBlock(ForeignBlock, frozen=True, tag="web_fetch_tool_result"):
    """The result of another server's tool."""


class CodeResultBlock(ForeignBlock, frozen=True, tag="code_execution_tool_result"):
    """The result of another server's tool."""


class BashResultBlock(ForeignBlock, frozen=True, tag="bash_code_execution_tool_result"):
    """The result of another server's tool."""


class EditorResultBlock(ForeignBlock, frozen=True, tag="text_editor_code_execution_tool_result"):
    """The result of another server's tool."""


class ToolSearchResultBlock(ForeignBlock, frozen=True, tag="tool_search_tool_result"):
    """The result of another server's tool."""


class McpToolUseBlock(ForeignBlock, frozen=True, tag="mcp_tool_use"):
    """A call that another server sent to an MCP server."""


class McpToolResultBlock(ForeignBlock, frozen=True, tag="mcp_tool_result"):
    """The result of such a call."""


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="thinking"):
    """Earlier reasoning. This server verifies no signatures and accepts any."""

    thinking: Annotated[str, effect("Given to the chat template, which may leave it out.")]
    signature: Annotated[str | None, note("this server signs nothing")] = None


class ToolUseBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="tool_use"):
    """An earlier call."""

    id: Annotated[str, _TEMPLATE]
    name: Annotated[str, _TEMPLATE]
    input: Annotated[dict[str, Any], effect("The arguments, given to the chat template.")]
    cache_control: Annotated[CacheControl | None, _MARK] = None
    caller: Annotated[
        dict[str, Any] | None, refused("only the model calls", passes=({"type": "direct"},))
    ] = None
    toolset_name: Annotated[str | None, refused("there are no toolsets")] = None


class ToolResultBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="tool_result"):
    """The result of a tool; with `is_error`, the model reads `Error: ` before it."""

    tool_use_id: Annotated[str, _TEMPLATE]
    content: Annotated[
        str | list[PlainBlock | DocumentBlock | SearchResultBlock | OpaqueBlock] | None,
        effect("What the tool gave back."),
    ] = None
    is_error: Annotated[bool | None, effect("True puts `Error: ` before the result.")] = None
    cache_control: Annotated[CacheControl | None, _MARK] = None
    toolset_name: Annotated[str | None, refused("there are no toolsets")] = None


TextBlock = PlainBlock | DocumentBlock | SearchResultBlock | OpaqueBlock | UploadBlock
UserBlock = TextBlock | ToolResultBlock
AssistantBlock = (
    PlainBlock
    | ThinkingBlock
    | ToolUseBlock
    | ForeignBlock
    | ServerToolUseBlock
    | WebSearchResultBlock
    | WebFetchResultBlock
    | CodeResultBlock
    | BashResultBlock
    | EditorResultBlock
    | ToolSearchResultBlock
    | McpToolUseBlock
    | McpToolResultBlock
)


class UserTurn(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="user", tag_field="role"
):
    """The user's text and the results of tools."""

    content: Annotated[
        str | list[UserBlock], effect("The text of the user, and the results of tools.")
    ]


class AssistantTurn(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="assistant", tag_field="role"
):
    """The model's text, reasoning and calls."""

    content: Annotated[
        str | list[AssistantBlock],
        effect(
            "The model's text and calls; as the last turn, the beginning of the answer: a text."
        ),
    ]


class SystemTurn(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="system", tag_field="role"
):
    """Instructions inside the conversation."""

    content: Annotated[str | list[PlainBlock], effect("Instructions inside the conversation.")]


Turn = UserTurn | AssistantTurn | SystemTurn


class CustomToolSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A tool that the client defines."""

    name: Annotated[str, effect("The name in a call; each one once.")]
    input_schema: Annotated[
        dict[str, Any],
        effect("The JSON schema of the arguments; enforced if the call itself is enforced."),
    ]
    description: Annotated[str | None, effect("Included in the prompt.")] = None
    type: Annotated[Literal["custom"] | None, effect("May be left out.")] = None
    strict: StrictArguments = None
    cache_control: Annotated[CacheControl | None, _MARK] = None
    allowed_callers: AllowedCallers = None
    defer_loading: DeferLoading = None
    eager_input_streaming: Annotated[
        bool | None, hint("arguments are sent as the model writes them", passes=(False,))
    ] = None
    input_examples: Annotated[
        list[Any] | None, hint("templates do not render examples", passes=([],))
    ] = None


class AutoChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="auto"):
    """The model may call tools."""

    disable_parallel_tool_use: Annotated[bool | None, _ONE_CALL] = None


class AnyChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: Annotated[bool | None, _ONE_CALL] = None


class AnyTool(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="tool"):
    """The model must call this tool."""

    name: Annotated[str, effect("The tool that has to be called.")]
    disable_parallel_tool_use: Annotated[
        bool | None, note("one named tool is called once in any case")
    ] = None


class NoChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="none"):
    """The model sees no tools."""


class EnabledThinking(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="enabled"):
    """Reasoning within a token budget."""

    budget_tokens: Annotated[
        int,
        effect(
            "Tokens of reasoning after which its closing tag is written; from 1 to max_tokens - 1."
        ),
        hint("the model sets no reasoning apart by tags", conditional=True),
    ]
    display: Annotated[
        Literal["summarized", "omitted"] | None,
        hint("the reasoning is in the response", passes=("summarized",)),
    ] = None


class AdaptiveThinking(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="adaptive"):
    """Reasoning without a token budget."""

    display: Annotated[
        Literal["summarized", "omitted"] | None,
        hint("the reasoning is in the response", passes=("summarized",)),
    ] = None


class DisabledThinking(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="disabled"):
    """No reasoning, if the template can turn it off."""


class BetweenToolsThinking(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="between_tools"
):
    """Reasoning between calls only: declared so that the error names it."""


class JsonOutput(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="json_schema"):
    """Output that matches a JSON schema."""

    schema: Annotated[dict[str, Any], effect("The JSON schema that the answer fits.")]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The format of the output and the reasoning effort."""

    effort: ReasoningEffort = None
    format: Annotated[
        JsonOutput | None, effect("Enforces the form of the complete answer by a grammar.")
    ] = None


class RequestMetadata(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`user_id`: the tenant that the request is counted for."""

    user_id: Annotated[
        str | None, effect("To whom the work is accounted, below the name of the API key.")
    ] = None


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/messages/count_tokens`."""

    model: Annotated[str, effect("Which served name answers; 404 for an unknown one.")]
    messages: Annotated[
        list[Turn], effect("The conversation, as the model's chat template writes it.")
    ]
    system: Annotated[str | list[PlainBlock] | None, effect("Instructions for the model.")] = None
    tools: Annotated[list[dict[str, Any]] | None, effect("Tools that the model may call.")] = None
    tool_choice: Annotated[
        AutoChoice | AnyChoice | AnyTool | NoChoice | None,
        effect("Whether calls are possible, forbidden, or enforced by a grammar."),
    ] = None
    thinking: Annotated[
        EnabledThinking | AdaptiveThinking | DisabledThinking | BetweenToolsThinking | None,
        effect("Whether the model reasons, if its template has a setting for it."),
        hint("the model has no such mode", conditional=True),
    ] = None
    output_config: Annotated[OutputConfig | None, effect("The form of the answer.")] = None
    cache_control: Annotated[CacheControl | None, _MARK] = None
    context_management: Annotated[Any, hint("the conversation is used unchanged")] = None
    mcp_servers: Annotated[
        list[dict[str, Any]] | None, hint("the server makes no outbound requests", passes=([],))
    ] = None
    output_format: Annotated[Any, refused("send output_config.format")] = None
    speed: Annotated[str | None, hint("there is one speed", passes=("standard",))] = None


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/messages`."""

    max_tokens: Annotated[
        int, effect("Ends the message after this many tokens, with stop_reason max_tokens.")
    ]
    stop_sequences: Annotated[
        list[str] | None,
        effect("Ends the message where one of these texts appears after its reasoning."),
    ] = None
    stream: Annotated[
        bool | None, effect("Sends the message as server-sent events while it is generated.")
    ] = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Annotated[RequestMetadata | None, effect("Whom the work is accounted to.")] = None
    service_tier: Annotated[
        str | None, hint("there is one service tier", passes=("auto", "standard_only"))
    ] = None
    betas: Annotated[list[str] | None, hint("there are no beta features", passes=([],))] = None
    container: Annotated[Any, hint("the server runs no tools")] = None
    diagnostics: Annotated[Any, hint("the prefix cache keeps no record per message")] = None
    inference_geo: Annotated[Any, refused("the server runs where it runs")] = None
