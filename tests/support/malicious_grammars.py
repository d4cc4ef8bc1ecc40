"""Grammars that are made to hurt: to recurse, to explode, to take all memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from quickstep.types import Grammar


def chain(length: int, inner: Callable[[dict[str, str]], Any]) -> dict[str, Any]:
    definitions = {f"d{i}": inner({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "null"}}}


def bomb(keyword: str, width: int, length: int) -> dict[str, Any]:
    """Each level says the next one several times."""
    levels = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * width} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**levels, f"a{length}": {"type": "string"}}}


def nested(depth: int) -> Any:
    value: Any = {"type": "null"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


_SCHEMAS: dict[str, Any] = {
    "a cycle of references": chain(1, lambda ref: {"$ref": "#/$defs/d0"}),
    "a reference to itself": {"$ref": "#"},
    "an endless object": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "a tree": {"$ref": "#/$defs/n", "$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}},
    "allOf bomb": bomb("allOf", 4, 12),
    "anyOf bomb": bomb("anyOf", 6, 20),
    "oneOf bomb": bomb("oneOf", 3, 12),
    "3000 names": {"enum": [f"value number {i}" for i in range(3000)]},
    "1500 properties": {
        "properties": {f"p{i}": {"type": "string"} for i in range(1500)},
        "required": [f"p{i}" for i in range(0, 1500, 2)],
    },
    "nested repetitions": {"type": "string", "pattern": "^(a{0,10000}){0,10000}$"},
    "a long string": {"type": "string", "minLength": 10**9},
    "a long list": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "long list of long lists": {
        "type": "array",
        "items": {"type": "array", "items": {}, "minItems": 9999},
        "minItems": 9999,
    },
    "a wide range": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "a tiny step": {"type": "number", "multipleOf": 1e-300},
    "patterns of names": {"patternProperties": {"^(a+)+$": {}, ".*.*.*.*x": {}}},
    "many formats": {
        "type": "array",
        "items": {"type": "string", "format": "uri"},
        "minItems": 50,
    },
    "31 levels": nested(15),
    "2000 levels": nested(400),
    "a name of brackets": {"properties": {"[" * 9999: {}}},
}
_REGEXES = {
    "{0,10000}": "[ab]{0,10000}",
    "{0,1000} thrice": "((a{0,1000}){0,1000}){0,1000}",
    "catastrophic": "(a*)*(a*)*(a*)*b",
    "exponential states": "(a|b)*a(a|b){500}",
    "900 groups": "(" * 900 + "a" + ")" * 900,
    "letters of all alphabets": r"\p{L}{1,500}\P{L}{500}",
    "300 branches": "|".join(f"a{i}.*" for i in range(300)),
    "nothing": "[^\\s\\S]",
}
_LARK = {
    "a million": 'start: ("a"{1000}){1000}',
    "left recursion": 'start: start start | "a"',
    "intersections": "start: /(.*a.*)&(.*b.*)&(.*c.*)&~(.*d.*)/",
    "an empty loop": 'start: a*\na: ""',
    "itself": "start: start",
}
NASTY = {
    **{name: Grammar.of_json_schema(json.dumps(schema)) for name, schema in _SCHEMAS.items()},
    **{name: Grammar.of_regex(pattern) for name, pattern in _REGEXES.items()},
    **{name: Grammar.of_lark(text) for name, text in _LARK.items()},
}
