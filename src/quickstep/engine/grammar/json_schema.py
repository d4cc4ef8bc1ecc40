"""A client's JSON schema in the keywords that llguidance knows, with the same meaning.

llguidance enforces what it knows and refuses the rest. JSON Schema says that a `format` which an
implementation does not know is an annotation, so those are removed here; `dependencies` of
properties and some forms of `not` are rewritten with keywords that llguidance has. It treats
`oneOf` as `anyOf` only on request: `grammars` requests and reports it where the branches are not
provably disjoint. Nothing else is ignored.

Called by `grammar_source`, which bounds the schema in size and depth first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

__all__ = ["KNOWN_FORMATS", "ONE_LINE", "for_llguidance", "reference_depth"]

# llguidance's options for JSON on one line, with a space after each comma and colon. `json.dumps`
# and chat templates write it so, hence models have seen it; without the spaces a small model loses
# track. Fixed spacing also keeps a model from writing white space up to the limit.
ONE_LINE: Mapping[str, object] = MappingProxyType(
    {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
)

# The formats of llguidance 1.x; a test compares them with the installed one.
KNOWN_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration"),
        *("email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"),
    )
)
# The values of these keywords are data or names, not schemas.
_DATA = frozenset(("const", "enum", "default", "example", "examples", "required"))
# The values of these keywords map names to schemas.
_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
# Each doubles the ways through an object.
_MAX_DEPENDENCIES = 4


def for_llguidance(schema: Any) -> Any:
    """The schema without formats that are annotations, with dependencies and `not` rewritten.

    Recursive: the caller bounds the depth.
    """
    if isinstance(schema, list):
        return [for_llguidance(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "format" and isinstance(value, str) and value not in KNOWN_FORMATS:
            continue
        if keyword in _DATA:
            found[keyword] = value
        elif keyword in _BY_NAME and isinstance(value, dict):
            found[keyword] = {name: for_llguidance(inner) for name, inner in value.items()}
        else:
            found[keyword] = for_llguidance(value)
    return _without_not(_without_dependencies(found))


def _without_dependencies(schema: dict[str, Any]) -> dict[str, Any]:
    """A property that demands others, or a schema: either it is absent or the demand holds."""
    values = [schema[keyword] for keyword in _DEPENDENCIES if schema.get(keyword) is not None]
    if not values or not all(isinstance(value, dict) for value in values):
        return schema
    demands = [(name, demand) for value in values for name, demand in value.items()]
    if len(demands) > _MAX_DEPENDENCIES or not all(map(_is_demand, demands)):
        return schema  # which is then refused
    rest = {key: value for key, value in schema.items() if key not in _DEPENDENCIES}
    if not demands:
        return rest
    choices = [
        {
            "anyOf": [
                {"properties": {name: False}},
                {"required": demand} if isinstance(demand, list) else demand,
            ]
        }
        for name, demand in demands
    ]
    return {**rest, "allOf": [*rest.get("allOf", ()), *choices]}


def _without_not(schema: dict[str, Any]) -> dict[str, Any]:
    """`not` of everything allows nothing; `not` of required names, an object without one."""
    refused = schema.get("not")
    rest = {key: value for key, value in schema.items() if key != "not"}
    if refused is True or refused == {}:
        return {**rest, "allOf": [*rest.get("allOf", ()), False]}
    if not isinstance(refused, dict) or list(refused) != ["required"]:
        return schema  # which is then refused
    names = refused["required"]
    if not isinstance(names, list) or not names:
        return schema
    lacking = [{"type": "object", "properties": {name: False}} for name in names]
    return {**rest, "allOf": [*rest.get("allOf", ()), {"anyOf": lacking}]}


def _is_demand(named: tuple[str, Any]) -> bool:
    _, demand = named
    if isinstance(demand, list):
        return all(isinstance(name, str) for name in demand)
    return isinstance(demand, dict | bool)


def reference_depth(schema: Mapping[str, Any], limit: int) -> int:
    """How deep llguidance goes into a schema by way of `$ref`s, each of which it follows once.

    Stops counting beyond `limit`.
    """
    deepest = 0
    followed: set[str] = set()
    pending: list[tuple[Any, int]] = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        deepest = max(deepest, depth)
        if deepest > limit:
            break
        if isinstance(value, list):
            pending += [(item, depth + 1) for item in reversed(value)]
        elif isinstance(value, dict):
            pending += [
                (inner, depth + 1)
                for keyword, inner in reversed(value.items())
                if keyword not in ("$defs", "definitions")
            ]
            target = value.get("$ref")
            if isinstance(target, str) and target not in followed:
                followed.add(target)
                pending.append((_resolved(schema, target), depth + 1))
    return deepest


def _resolved(schema: Mapping[str, Any], reference: str) -> Any:
    """The target of a reference within the schema; None where it points elsewhere."""
    _, has_pointer, pointer = reference.partition("#")
    value: Any = schema
    if not has_pointer or not pointer.startswith("/"):
        return None if pointer or not has_pointer else schema
    for part in pointer[1:].split("/"):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict):
            value = value.get(key)
        else:
            return None
    return value
