"""A request's grammar within its bounds, in one of the forms that llguidance reads.

What is known to exhaust the compiler's stack (long chains of rules or references) is refused here
by counting; what counting cannot find, `grammar.trial` finds in a process of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from quickstep.config import InputConfig
from quickstep.engine.grammar.json_schema import for_llguidance, reference_depth
from quickstep.errors import RequestError
from quickstep.types import Grammar

__all__ = ["GrammarLimits", "GrammarSource", "grammar_source"]

_SCHEMA_IN_LARK = re.compile(r"%json\s*")


class GrammarLimits(msgspec.Struct, frozen=True):
    """Bounds on one grammar, and on the compiled ones that are kept.

    Attributes:
        text_bytes: UTF-8 of a schema, a Lark grammar, or all choices.
        regex_bytes: UTF-8 of a regular expression.
        depth: Nested objects and lists of a schema.
        reference_levels: Depth of a schema by way of its `$ref`s: llguidance follows chains of
            them on its stack; 8 MB suffice for about 3,000.
        lines: Lines of a Lark grammar, hence rules, which may chain in the same way.
        groups: Opening brackets of a Lark grammar outside its schemas.
        choices: Texts to choose from.
        gbnf_chars: Of a GBNF grammar, whose translation takes time that grows with its square.
        compile_fuel: llguidance's measure of work to compile; 300,000 stay below 0.5 s.
        step_fuel: The same per token; 50,000 stay below 50 ms.
        lexer_states: States of a sequence's lexer, at most about 2 kB each.
        symbols: Size of a compiled grammar.
        kept: Compiled grammars, the last used ones.
    """

    text_bytes: int = 512 * 1024
    regex_bytes: int = 2 * 1024
    depth: int = 32
    reference_levels: int = 1024
    lines: int = 512
    groups: int = 512
    choices: int = 1024
    gbnf_chars: int = 4096
    compile_fuel: int = 300_000
    step_fuel: int = 50_000
    lexer_states: int = 50_000
    symbols: int = 100_000
    kept: int = 64

    @classmethod
    def of(cls, inputs: InputConfig) -> GrammarLimits:
        """The limits that the operator sets; the others depend on llguidance."""
        return cls(
            text_bytes=inputs.schema_bytes,
            depth=inputs.schema_depth,
            regex_bytes=inputs.regex_bytes,
        )


class GrammarSource(msgspec.Struct, frozen=True):
    """The text to compile, and its form."""

    form: Literal["json_schema", "json_object", "regex", "lark"]
    text: str


def grammar_source(
    grammar: Grammar, limits: GrammarLimits, one_of_as_any_of: bool = False
) -> GrammarSource:
    """The grammar within the limits. Raises RequestError.

    With `one_of_as_any_of`, llguidance may treat `oneOf` as `anyOf`.
    """
    text = grammar.text
    is_regex = grammar.kind == "regex"
    _bound(_num_bytes(text), limits.regex_bytes if is_regex else limits.text_bytes, "bytes")
    match grammar.kind:
        case "json_schema":
            return GrammarSource("json_schema", _schema(text, limits, one_of_as_any_of))
        case "json_object":
            return GrammarSource("json_object", '{"type": "object"}')
        case "regex":
            if not text:
                raise RequestError("grammar is an empty regular expression", param="grammar")
            return GrammarSource("regex", text)
        case "choice":
            return GrammarSource("lark", _choice(text, limits))
        case "lark":
            return GrammarSource("lark", _lark(text, limits, one_of_as_any_of))
        case "gbnf":
            lark = _translated(text, limits)
            return GrammarSource("lark", _lark(lark, limits, one_of_as_any_of))


def _schema(text: str, limits: GrammarLimits, one_of_as_any_of: bool) -> str:
    """The schema's text as we parse it, so that the original spelling has no effect."""
    schema = _parsed(text)
    if not isinstance(schema, dict):
        raise RequestError("grammar is no JSON schema: it must be an object", param="grammar")
    if "x-guidance" in schema:
        raise RequestError("grammar has the unknown key x-guidance", param="grammar")
    return _schema_text(schema, limits, one_of_as_any_of)


def _schema_text(schema: Any, limits: GrammarLimits, one_of_as_any_of: bool) -> str:
    """A bounded schema in llguidance's keywords. Raises RequestError."""
    for _, depth in _values(schema):
        _bound(depth, limits.depth, "levels")
    if isinstance(schema, dict):
        levels = reference_depth(schema, limits.reference_levels)
        _bound(levels, limits.reference_levels, "levels of $ref")
        schema = for_llguidance(schema)
        if one_of_as_any_of:
            options = {**schema.get("x-guidance", {}), "coerce_one_of": True}
            schema["x-guidance"] = options
    return json.dumps(schema, ensure_ascii=False)


def _lark(text: str, limits: GrammarLimits, one_of_as_any_of: bool) -> str:
    """Lark with lines, brackets and schemas within the limits. Raises RequestError."""
    _bound(text.count("\n") + 1, limits.lines, "lines")
    pieces: list[str] = []
    num_groups = end = 0
    for found in _SCHEMA_IN_LARK.finditer(text):
        if found.start() < end:
            continue
        num_groups += sum(map(text[end : found.start()].count, "([{"))
        pieces.append(text[end : found.end()])
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            raise RequestError("grammar has a %json without a schema", param="grammar") from None
        pieces.append(_schema_text(schema, limits, one_of_as_any_of))
    num_groups += sum(map(text[end:].count, "([{"))
    _bound(num_groups, limits.groups, "brackets")
    return "".join([*pieces, text[end:]])


def _translated(gbnf: str, limits: GrammarLimits) -> str:
    """llama.cpp's grammar in Lark. It takes milliseconds: do not call it in an event loop."""
    from llguidance.gbnf_to_lark import any_to_lark

    _bound(len(gbnf), limits.gbnf_chars, "characters of GBNF")
    try:
        return any_to_lark(gbnf)
    except Exception as error:  # the translator raises bare Exception
        raise RequestError(f"grammar is no GBNF: {error}"[:500], param="grammar") from None


def _choice(text: str, limits: GrammarLimits) -> str:
    """A Lark grammar of the choices. JSON's strings are Lark's."""
    choices = _parsed(text)
    if not isinstance(choices, list) or not all(isinstance(item, str) for item in choices):
        raise RequestError("grammar is no choice: it must be a list of texts", param="grammar")
    if not choices or not all(choices):
        raise RequestError("grammar has an empty choice", param="grammar")
    _bound(len(choices), limits.choices, "choices")
    return "start: " + " | ".join(json.dumps(item, ensure_ascii=False) for item in choices)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"grammar is not valid JSON: {error}", param="grammar") from None


def _values(value: object) -> Iterator[tuple[object, int]]:
    """Every value in a JSON value with its depth, without recursion."""
    pending = [(value, 1)]
    while pending:
        value, depth = pending.pop()
        yield value, depth
        if isinstance(value, dict):
            pending += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            pending += [(item, depth + 1) for item in value]


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(
            "grammar is not valid Unicode: it holds half a surrogate pair", param="grammar"
        ) from None


def _bound(value: int, limit: int, unit: str) -> None:
    if value > limit:
        raise RequestError(f"grammar has {value} {unit}, the limit is {limit}", param="grammar")
