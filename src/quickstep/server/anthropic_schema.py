"""The JSON bodies of Anthropic's Messages API, as msgspec types: the whole schema.

Read by `anthropic` and `anthropic_messages`, and by nothing else. What the server does not do is
declared as well, so that it is refused by name: whole fields in the tables at the end, parts of
fields where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from quickstep.server.refused import Refusal

__all__ = [
    "MESSAGES_REFUSED",
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
    """A mark where a prefix ends. Every prefix is cached without it, and for no fixed time."""

    ttl: Literal["5m", "1h"] | None = None


class PlainBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="text"):
    """A piece of text."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class OpaqueBlock(msgspec.Struct, frozen=True, tag="image"):
    """An image: known, so that it is refused in words."""


class DocumentBlock(OpaqueBlock, frozen=True, tag="document"):
    """A document: known, so that it is refused in words."""


class SearchResultBlock(OpaqueBlock, frozen=True, tag="search_result"):
    """A search result: known, so that it is refused in words."""


class RedactedThinkingBlock(OpaqueBlock, frozen=True, tag="redacted_thinking"):
    """Reasoning that only Anthropic can read: known, so that it is refused in words."""


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="thinking"):
    """Earlier reasoning. This server signs nothing, so any signature is fine."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="tool_use"):
    """An earlier call."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None
    toolset_name: str | None = None


class ToolResultBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="tool_result"):
    """What a tool gave back; `is_error` makes the model read `Error: ` before it."""

    tool_use_id: str
    content: str | list[PlainBlock | OpaqueBlock | DocumentBlock | SearchResultBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: str | None = None


UserBlock = PlainBlock | ToolResultBlock | OpaqueBlock | DocumentBlock | SearchResultBlock
AssistantBlock = PlainBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserTurn(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="user", tag_field="role"
):
    """What the user says, and the results of tools."""

    content: str | list[UserBlock]


class AssistantTurn(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="assistant", tag_field="role"
):
    """What the model said and called."""

    content: str | list[AssistantBlock]


class SystemTurn(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="system", tag_field="role"
):
    """Instructions inside the conversation."""

    content: str | list[PlainBlock]


Turn = UserTurn | AssistantTurn | SystemTurn


class CustomToolSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A tool of the client's."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None


class AutoChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="auto"):
    """The model may call."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="any"):
    """The model has to call."""

    disable_parallel_tool_use: bool | None = None


class AnyTool(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="tool"):
    """The model has to call this one."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="none"):
    """The model sees no tools."""


class EnabledThinking(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="enabled"):
    """Reasoning within a budget of tokens."""

    budget_tokens: int
    display: Literal["summarized", "omitted"] | None = None


class AdaptiveThinking(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="adaptive"):
    """Reasoning as long as the model likes."""

    display: Literal["summarized", "omitted"] | None = None


class DisabledThinking(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="disabled"):
    """No reasoning, where the template can turn it off."""


class BetweenToolsThinking(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="between_tools"
):
    """Reasoning between calls only: known, so that it is refused in words."""


class JsonOutput(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="json_schema"):
    """Output that fits a JSON schema."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The form of the answer."""

    effort: str | None = None
    format: JsonOutput | None = None


class RequestMetadata(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`user_id`: whom the work is accounted to."""

    user_id: str | None = None


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/messages/count_tokens`."""

    model: str
    messages: list[Turn]
    system: str | list[PlainBlock] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: AutoChoice | AnyChoice | AnyTool | NoChoice | None = None
    thinking: (
        EnabledThinking | AdaptiveThinking | DisabledThinking | BetweenToolsThinking | None
    ) = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: Any = None
    mcp_servers: Any = None
    speed: Any = None


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: RequestMetadata | None = None
    service_tier: Any = None
    betas: Any = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None


MESSAGES_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "betas": Refusal(([],), "there are no beta features"),
        "container": Refusal((), "the server runs no tools"),
        "context_management": Refusal((), "the conversation is taken as it is"),
        "diagnostics": Refusal((), "the prefix cache keeps no record per message"),
        "inference_geo": Refusal((), "the server runs where it runs"),
        "mcp_servers": Refusal(([],), "the server makes no outbound requests"),
        "service_tier": Refusal(("auto", "standard_only"), "there is one service tier"),
        "speed": Refusal(("standard",), "there is one speed"),
    }
)
