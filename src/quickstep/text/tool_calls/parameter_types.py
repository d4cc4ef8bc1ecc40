"""The types of a function's parameters, for formats that write values without their type.

In XML the text `5` may be a number or a string: the function's schema decides. A text that is no
value of its parameter's types stays a string, so that no call is lost. Called by `tagged`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from quickstep.text.grammar.schema_logic import resolved
from quickstep.text.tool_calls.python_literals import json_of_literal, json_string

# a number with decimals is a `number` only
_VALUES_OF: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "string": frozenset(("string",)),
        "integer": frozenset(("integer",)),
        "number": frozenset(("integer", "number")),
        "boolean": frozenset(("boolean",)),
        "null": frozenset(("null",)),
        "array": frozenset(("array",)),
        "object": frozenset(("object",)),
    }
)
ALL_TYPES = frozenset(_VALUES_OF)
STRING = _VALUES_OF["string"]
_CONSTANTS = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}


def parameter_schema(parameters: Mapping[str, Any] | None, name: str) -> object:
    """The schema of the parameter `name`; True (anything) where none is declared.

    `parameters` is the schema of a function's arguments.
    """
    if parameters is None:
        return True
    found = [
        declared
        for schema in _schemas_here(parameters, parameters, set())
        if (declared := _property(schema, name)) is not None
    ]
    return found[0] if len(found) == 1 else {"anyOf": found} if found else True


def value_types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The types of the values that a schema allows, through `$ref`, `anyOf` and lists of types.

    `root` is the schema that references point into.
    """
    return _types(schema, root, {})


def json_of_value(text: str, schema: object, root: Mapping[str, Any]) -> str:
    """The JSON text of a value that a model wrote as `text`: of a type that the schema allows.

    `True` and `None` are JSON's constants where the schema names their types, and a Python literal
    is an array or object where no string is allowed. Everything else is a string.
    """
    types = value_types(schema, root)
    if types == STRING or text in _strings_of(schema, root):
        return json_string(text)
    value = text.strip()
    constant = _CONSTANTS.get(value.lower())
    if constant is not None and constant in types and (types != ALL_TYPES or _type_of(value)):
        return "null" if constant == "null" else value.lower()
    if _type_of(value) in types:
        return value
    if "string" not in types:
        literal = json_of_literal(value)
        if literal is not None and _type_of(literal) in types:
            return literal
    return json_string(text)


def beginning_of_value(text: str, schema: object, root: Mapping[str, Any]) -> str:
    """What there is of a value that the end of the output cut, as JSON without an end."""
    if "string" not in value_types(schema, root):
        return text.lstrip()
    return json_string(text)[:-1] if text else ""


def _type_of(text: str) -> str:
    """The type of a JSON text; "" for a string and for what is no JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_int=_Digits, parse_float=float)
        text.encode()
    except (ValueError, RecursionError):
        return ""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case _Digits():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case list():
            return "array"
        case dict():
            return "object"
    return ""


class _Digits(str):
    """An integer of any length, whose text is kept."""

    __slots__ = ()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _types(
    schema: object, root: Mapping[str, Any], known: dict[str, frozenset[str]]
) -> frozenset[str]:
    """`known` has the types of the references so far; a circle adds none."""
    if not isinstance(schema, Mapping):
        return frozenset() if schema is False else ALL_TYPES
    found = ALL_TYPES
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    if isinstance(names, list):
        found &= _union(_VALUES_OF.get(str(name), frozenset()) for name in names)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        kinds = (_type_of(json.dumps(value)) or "string" for value in values)
        found &= _union(_VALUES_OF[kind] for kind in kinds)
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list):
            found &= _union(_types(branch, root, known) for branch in branches)
    for branch in _conditions(schema):
        found &= _types(branch, root, known)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = frozenset()
            target = resolved(root, reference)
            known[reference] = ALL_TYPES if target is None else _types(target, root, known)
        found &= known[reference]
    return found


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def _conditions(schema: Mapping[str, Any]) -> list[object]:
    """The schemas in a schema that a value has to match as well."""
    branches = schema.get("allOf")
    return branches if isinstance(branches, list) else []


def _schemas_here(
    schema: object, root: Mapping[str, Any], followed: set[str]
) -> Iterator[Mapping[str, Any]]:
    """The schema and those that apply to the same value; `followed` are the references so far."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    branches = [*_conditions(schema)]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            branches += schema[keyword]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        followed.add(reference)
        branches.append(resolved(root, reference))
    for branch in branches:
        yield from _schemas_here(branch, root, followed)


def _property(schema: Mapping[str, Any], name: str) -> object:
    """What a schema says about a property; None for nothing."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    others = schema.get("additionalProperties")
    return others if isinstance(others, Mapping) and others else None


def _strings_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The strings that a schema lists."""
    listed: list[object] = []
    for found in _schemas_here(schema, root, set()):
        values = found.get("enum")
        listed += values if isinstance(values, list) else []
        listed.append(found.get("const"))
    return frozenset(value for value in listed if isinstance(value, str))
