"""Walking msgspec types: which structs a schema is made of, and their names in the document.

Some lists leave the type of their entries open, since the entry's own `type` decides how it is
read (`schemas.converted`); `parts_of` says which types these are.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from quickstep.server.anthropic.request_types import CountTokensRequest, CustomToolSpec
from quickstep.server.ollama.request_types import OllamaChatRequest
from quickstep.server.openai.request_types import ChatRequest, FunctionTool
from quickstep.server.openai.tokenize_types import ApplyTemplateRequest, TokenizeRequest
from quickstep.server.responses.request_types import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionToolSpec,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)

__all__ = [
    "TOOL_TYPES",
    "branches",
    "component_names",
    "field_types",
    "parts_of",
    "reachable_structs",
]

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


def reachable_structs(declared: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs in a type, those in their fields included, each once."""
    seen: set[type] = set()
    waiting = [declared]
    while waiting:
        item = waiting.pop()
        waiting.extend(get_args(item))
        if isinstance(item, type) and issubclass(item, msgspec.Struct) and item not in seen:
            seen.add(item)
            waiting.extend(field_types(item).values())
            waiting.extend(part for parts in parts_of(item).values() for part in parts)
            yield item


def field_types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of a struct's fields, under the names that JSON uses."""
    hints = typing.get_type_hints(struct)
    fields = msgspec.structs.fields(struct)
    return {field.encode_name: hints[field.name] for field in fields}


def branches(declared: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)


def component_names(types: Collection[type[msgspec.Struct]]) -> dict[type[msgspec.Struct], str]:
    """The name of each struct's schema, as msgspec gives it: unique, in a stable order."""
    ordered = sorted(types, key=lambda struct: (struct.__name__, struct.__module__))
    references, _ = msgspec.json.schema_components(ordered, ref_template="{name}")
    return {struct: ref["$ref"] for struct, ref in zip(ordered, references, strict=True)}


def parts_of(struct: type[msgspec.Struct]) -> _Parts:
    """The types of the entries, by the field that lists them; inherited fields included."""
    found: dict[str, tuple[type[msgspec.Struct], ...]] = {}
    for parent in reversed(struct.__mro__):
        found |= _PARTS.get(parent, {})
    return found
