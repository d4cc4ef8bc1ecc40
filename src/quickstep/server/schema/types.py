"""Walking msgspec types: which structs a schema is made of, and their names in the document."""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from quickstep.server.schema.field_parts import parts_of

__all__ = ["branches", "component_names", "field_types", "reachable_structs"]


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
