"""The grammar of a call's arguments as Python writes them: `a=1, b="x"`.

The values are JSON, which `pythonic` reads as well. So the schema has to be a plain object whose
properties are known; anything else cannot be spelled and is refused with the key that stands in
the way.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping
from typing import Any

from quickstep.engine.grammar.json_spacing import ONE_LINE
from quickstep.errors import RequestError

__all__ = ["pythonic_arguments"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_FORM = {**ONE_LINE, "lenient": False}
_NOTES = frozenset({"$schema", "$id", "title", "description", "examples", "default"})
_KNOWN = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}


def pythonic_arguments(function: Mapping[str, Any], rule: str) -> list[str]:
    """Lark rules of the arguments, `{rule}_arguments` first, in the order of the schema.

    `rest` of place i is what may follow once something stands before it, so that commas fit.
    Raises RequestError. Parameters that are None allow any arguments.
    """
    name, schema = function["name"], function["parameters"]
    if not _NAME.fullmatch(name):
        raise _refused(name, "begins with no letter")
    if schema is None:
        return _any_arguments(rule)
    properties, required = _checked(name, schema)
    lines = []
    first, rest = f"{rule}_arguments", f"{rule}_rest"
    for place, (key, value) in enumerate(properties.items()):
        here = f"{rule}_value_{place}"
        told = f"%json {json.dumps(_value_schema(schema, value), ensure_ascii=False)}"
        lines.append(f"{here}: {json.dumps(f'{key}=')} {told}")
        then = f"{rest}_{place + 1}"
        may_be_missing = key not in required
        without = f" | {first}_{place + 1}" if may_be_missing else ""
        lines.append(f"{first}_{place}: {here} {then}{without}")
        without = f" | {then}" if may_be_missing else ""
        lines.append(f'{rest}_{place}: ", " {here} {then}{without}')
    last = len(properties)
    return [f"{first}: {first}_0", f'{first}_{last}: ""', f'{rest}_{last}: ""', *lines]


def _any_arguments(rule: str) -> list[str]:
    """Lark rules of any keywords, with any values."""
    return [
        f'{rule}_arguments: "" | {rule}_any (", " {rule}_any)*',
        f"{rule}_any: /[A-Za-z_][A-Za-z0-9_]*=/ %json {json.dumps({'x-guidance': _FORM})}",
    ]


def _checked(name: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """The properties, those that are only required included, and the required ones."""
    unknown = next((key for key in schema if key not in _KNOWN), None)
    if unknown is not None:
        raise _refused(name, f"has {unknown[:64]} in its parameters")
    told, names = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(told, Mapping) or not isinstance(names, list):
        raise _refused(name, "has parameters that are no JSON schema")
    properties, required = dict(told), frozenset(key for key in names if isinstance(key, str))
    for key in sorted(required):
        properties.setdefault(key, {})
    for key in properties:
        if not key.isidentifier() or keyword.iskeyword(key):
            raise _refused(name, f"has the parameter {key[:64]!r}, which is no Python name")
    return properties, required


def _value_schema(schema: Mapping[str, Any], value: object) -> dict[str, Any]:
    told = dict(value) if isinstance(value, Mapping) else {} if value else {"not": {}}
    defs = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**defs, **told, "x-guidance": _FORM}


def _refused(name: str, why: str) -> RequestError:
    return RequestError(
        f"tools has the function {name}, whose calls cannot be enforced in the format pythonic: it "
        f"{why}; send it without strict, and tool_choice auto",
        param="tools",
    )
