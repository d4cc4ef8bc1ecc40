"""Fields of a body that its schema does not have: found by one walk over the decoded body.

The walk takes as long as the body is large, and what it remembers is bounded: fields of the same
name in the items of one list count as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

__all__ = ["take_out_unknown"]

_MAX_PATHS = 64


def take_out_unknown(content: object, schema: type[msgspec.Struct], path: str = "") -> list[str]:
    """Remove the unknown fields from `content`, and give their paths.

    Of the fields with the same name in the items of one list, only the first one's path is given.
    `path` leads to `content` in the body.
    """
    found: dict[str, str] = {}
    _walk(content, _described(schema), path, path, found)
    return list(found.values())


def _walk(
    content: object, declared: inspect.Type, path: str, shape: str, found: dict[str, str]
) -> None:
    """`shape` is the path without the positions in lists."""
    if isinstance(content, list):
        item_type = _list_item(declared)
        if item_type is not None:
            for index, item in enumerate(content):
                _walk(item, item_type, f"{path}[{index}]", f"{shape}[]", found)
    elif isinstance(content, dict):
        struct = _struct_of(content, declared)
        if struct is not None:
            _walk_struct(content, struct, path, shape, found)


def _walk_struct(
    content: dict[str, Any],
    struct: inspect.StructType,
    path: str,
    shape: str,
    found: dict[str, str],
) -> None:
    fields = _field_types(struct.cls)
    for name in list(content):
        place, form = (f"{at}.{name}" if at else name for at in (path, shape))
        if name in fields:
            _walk(content[name], fields[name], place, form, found)
        elif name != struct.tag_field and struct.forbid_unknown_fields:
            value = content.pop(name)
            if value is not None and len(found) < _MAX_PATHS:  # null is not given
                found.setdefault(form, place)


@cache
def _described(schema: type[msgspec.Struct]) -> inspect.StructType:
    described = inspect.type_info(schema)
    assert isinstance(described, inspect.StructType), "a schema is a struct"
    return described


@cache
def _field_types(schema: type[msgspec.Struct]) -> Mapping[str, inspect.Type]:
    return {field.encode_name: field.type for field in _described(schema).fields}


def _list_item(declared: inspect.Type) -> inspect.Type | None:
    """The type of a list's items; None if no list is expected."""
    for member in _members(declared):
        if isinstance(member, inspect.ListType):
            return member.item_type
    return None


def _struct_of(content: dict[str, Any], declared: inspect.Type) -> inspect.StructType | None:
    """The struct that an object is; None for an open object, and for one of a form unknown."""
    structs = [one for one in _members(declared) if isinstance(one, inspect.StructType)]
    if len(structs) == 1:
        return structs[0]
    for struct in structs:
        if struct.tag_field is not None and content.get(struct.tag_field) == struct.tag:
            return struct
    return None


def _members(declared: inspect.Type) -> tuple[inspect.Type, ...]:
    """The members of a union, or the type itself."""
    if isinstance(declared, inspect.Metadata):
        return _members(declared.type)
    return declared.types if isinstance(declared, inspect.UnionType) else (declared,)
