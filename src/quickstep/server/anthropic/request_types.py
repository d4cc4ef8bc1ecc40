"""The JSON bodies of Anthropic's Messages API, as msgspec types: all fields.

`endpoint` and `turns` read them. Fields that have no effect here are declared as well, with their
class (`schema/field_classes.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quickstep.server.schema.field_classes import hint, refused

__all__ = [
    "AdaptiveThinking",
    "AnyChoice",
    "AnyTool",
    "AssistantTurn",
    "AutoChoice",
    "BetweenToolsThinking",
    "CountTokensRequest",
    "CustomToolSpec",
    "DisabledThinking",
    "EnabledThinking",
    "MessagesRequest",
    "NoChoice",
    "OpaqueBlock",
    "PlainBlock",
    "SystemTurn",
    "ThinkingBlock",
    "ToolResultBlock",
    "ToolUseBlock",
    "Turn",
    "UserTurn",
]


class CacheControl(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="ephemeral"):
    """A mark at the end of a prefix. Every prefix is cached without it, without a lifetime."""

    ttl: Literal["5m", "1h"] | None = None


class PlainBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="text"):
    """A block of text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any] | None, hint("the model cites nothing", passes=([],))] = None


class OpaqueBlock(msgspec.Struct, frozen=True, tag="image"):
    """An image: declared so that the error names it."""


class DocumentBlock(OpaqueBlock, frozen=True, tag="document"):
    """A document: declared so that the error names it."""


class SearchResultBlock(OpaqueBlock, frozen=True, tag="search_result"):
    """A search result: declared so that the error names it."""


class RedactedThinkingBlock(OpaqueBlock, frozen=True, tag="redacted_thinking"):
    """Reasoning that only Anthropic can read: declared so that the error names it."""


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="thinking"):
    """Earlier reasoning. This server verifies no signatures and accepts any."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="tool_use"):
    """An earlier call."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Annotated[
        dict[str, Any] | None, refused("only the model calls", passes=({"type": "direct"},))
    ] = None
    toolset_name: Annotated[str | None, refused("there are no toolsets")] = None


class ToolResultBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="tool_result"):
    """The result of a tool; with `is_error`, the model reads `Error: ` before it."""

    tool_use_id: str
    content: str | list[PlainBlock | OpaqueBlock | DocumentBlock | SearchResultBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Annotated[str | None, refused("there are no toolsets")] = None


UserBlock = PlainBlock | ToolResultBlock | OpaqueBlock | DocumentBlock | SearchResultBlock
AssistantBlock = PlainBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserTurn(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="user", tag_field="role"
):
    """The user's text and the results of tools."""

    content: str | list[UserBlock]


class AssistantTurn(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="assistant", tag_field="role"
):
    """The model's text, reasoning and calls."""

    content: str | list[AssistantBlock]


class SystemTurn(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="system", tag_field="role"
):
    """Instructions inside the conversation."""

    content: str | list[PlainBlock]


Turn = UserTurn | AssistantTurn | SystemTurn


class CustomToolSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A tool that the client defines."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    allowed_callers: Annotated[
        list[str] | None, refused("only the model calls", passes=(["direct"],))
    ] = None
    defer_loading: Annotated[bool | None, hint("every tool is in the prompt", passes=(False,))] = (
        None
    )
    eager_input_streaming: Annotated[
        bool | None, hint("arguments are sent as the model writes them", passes=(False,))
    ] = None
    input_examples: Annotated[
        list[Any] | None, hint("templates do not render examples", passes=([],))
    ] = None


class AutoChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="auto"):
    """The model may call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class AnyTool(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="tool"):
    """The model must call this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="none"):
    """The model sees no tools."""


class EnabledThinking(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="enabled"):
    """Reasoning within a token budget."""

    budget_tokens: Annotated[
        int, hint("the model sets no reasoning apart by tags", conditional=True)
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

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The format of the output and the reasoning effort."""

    effort: Annotated[str | None, hint("the model has no such level", conditional=True)] = None
    format: JsonOutput | None = None


class RequestMetadata(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`user_id`: the tenant that the request is counted for."""

    user_id: str | None = None


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/messages/count_tokens`."""

    model: str
    messages: list[Turn]
    system: str | list[PlainBlock] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: AutoChoice | AnyChoice | AnyTool | NoChoice | None = None
    thinking: Annotated[
        EnabledThinking | AdaptiveThinking | DisabledThinking | BetweenToolsThinking | None,
        hint("the model has no such mode", conditional=True),
    ] = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: Annotated[Any, hint("the conversation is used unchanged")] = None
    mcp_servers: Annotated[
        list[dict[str, Any]] | None, hint("the server makes no outbound requests", passes=([],))
    ] = None
    output_format: Annotated[Any, refused("send output_config.format")] = None
    speed: Annotated[str | None, hint("there is one speed", passes=("standard",))] = None


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: RequestMetadata | None = None
    service_tier: Annotated[
        str | None, hint("there is one service tier", passes=("auto", "standard_only"))
    ] = None
    betas: Annotated[list[str] | None, hint("there are no beta features", passes=([],))] = None
    container: Annotated[Any, hint("the server runs no tools")] = None
    diagnostics: Annotated[Any, hint("the prefix cache keeps no record per message")] = None
    inference_geo: Annotated[Any, refused("the server runs where it runs")] = None
