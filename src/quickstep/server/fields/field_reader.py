"""Reads the fields of one request: typed, known, and each one honoured, reported or refused.

An API makes a reader for each body, decodes with it, and passes `ignored` on: the answer has it as
the header `x-quickstep-ignored`. Unknown fields are found by one walk over the decoded body, whose
time is linear in its size and whose result is bounded: fields of the same name in the items of one
list count as one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from quickstep.errors import RequestError
from quickstep.server.fields.decode import invalid_json, unknown_field, validation_error
from quickstep.server.fields.field_classes import Hint, findings
from quickstep.server.options import FieldRules

_Schema = TypeVar("_Schema", bound=msgspec.Struct)
_POSITION = re.compile(r"\[\d+\]")
_MAX_IGNORED = 64
_MAX_PATHS = 64


class FieldReader:
    """Decodes one request's body and collects the fields that have no effect."""

    def __init__(self, rules: FieldRules) -> None:
        self._rules = rules
        self._ignored: dict[str, None] = {}

    @property
    def ignored(self) -> tuple[str, ...]:
        """The paths of fields without effect, without positions: `messages[].mood`. Bounded."""
        return tuple(self._ignored)

    def decode(self, body: bytes, schema: type[_Schema]) -> _Schema:
        """The typed request. Raises RequestError with the path of the first wrong field."""
        try:
            # decoding the text first refuses invalid UTF-8 in skipped values as well
            text = body.decode()
            try:
                fields = msgspec.json.decode(text, type=schema)
            except msgspec.ValidationError:  # what follows the wrong field may be no JSON
                value = msgspec.json.decode(text)
                return self.convert(value, schema)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid_json(error, body) from None
        self._judge(fields, "")
        return fields

    def convert(self, value: Any, schema: type[_Schema], path: str = "") -> _Schema:
        """A decoded part of a body, at `path`, as its type; what is unknown is taken out of it.

        Raises RequestError with the path of the first wrong field.
        """
        for place in take_out_unknown(value, schema, path):
            if self._rules.refuse_unknown:
                raise unknown_field(place, schema, path)
            self._report(place)
        try:
            fields = msgspec.convert(value, schema)
        except msgspec.ValidationError as error:
            raise validation_error(error, schema, path) from None
        self._judge(fields, path)
        return fields

    def ignore(self, path: str, why: str) -> None:
        """Report a hint that has no effect here. Raises RequestError where hints are refused."""
        if self._rules.refuse_hints:
            raise RequestError(
                f"{path} has no effect: {why}; leave it out, or start the server without --strict",
                param=path,
            )
        self._report(path)

    def _judge(self, fields: msgspec.Struct, path: str) -> None:
        for finding in findings(fields, path):
            why = finding.declared.why
            if isinstance(finding.declared, Hint):
                self.ignore(finding.path, why)
            else:
                raise RequestError(f"{finding.path} is not supported: {why}", param=finding.path)

    def _report(self, path: str) -> None:
        if len(self._ignored) < _MAX_IGNORED:
            self._ignored[_POSITION.sub("[]", path)] = None


def loosened_keyword(path: str) -> RequestError:
    """The refusal, where hints are refused, of a schema's keyword that is not enforced exactly."""
    return RequestError(
        f"{path} is enforced less strictly than it says; change the schema, or start the server "
        "without --strict",
        param=path,
    )


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
    structs = [member for member in _members(declared) if isinstance(member, inspect.StructType)]
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
