"""Lists whose entries a schema leaves open, since their type alone tells the kinds apart.

The surfaces read each entry by its own type (`schemas.converted`); here stands which types these
are, so that the document, the reference and the tests know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from quickstep.server.anthropic_schema import CountTokensRequest, CustomToolSpec
from quickstep.server.ollama.requests import OllamaChatRequest
from quickstep.server.responses_schema import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionToolSpec,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)
from quickstep.server.schemas import ChatRequest, FunctionTool
from quickstep.server.schemas_tokens import ApplyTemplateRequest, TokenizeRequest

__all__ = ["TOOL_TYPES", "parts_of"]

_Parts = Mapping[str, tuple[type[msgspec.Struct], ...]]

_PARTS: Mapping[type[msgspec.Struct], _Parts] = MappingProxyType(
    {
        ResponsesRequest: {
            "input": (MessageItem, FunctionCallItem, FunctionCallOutputItem, ReasoningItem),
            "tools": (FunctionToolSpec,),
        },
        CountTokensRequest: {"tools": (CustomToolSpec,)},
        ChatRequest: {"tools": (FunctionTool,)},
        OllamaChatRequest: {"tools": (FunctionTool,)},
        TokenizeRequest: {"tools": (FunctionTool,)},
        ApplyTemplateRequest: {"tools": (FunctionTool,)},
    }
)


# The `type` that a tool of this form has; a tool of another type is left out and reported.
TOOL_TYPES: Mapping[type[msgspec.Struct], str] = MappingProxyType(
    {FunctionTool: "function", FunctionToolSpec: "function", CustomToolSpec: "custom"}
)


def parts_of(struct: type[msgspec.Struct]) -> _Parts:
    """The types of the entries, by the field that lists them; inherited fields included."""
    found: dict[str, tuple[type[msgspec.Struct], ...]] = {}
    for parent in reversed(struct.__mro__):
        found |= _PARTS.get(parent, {})
    return found
