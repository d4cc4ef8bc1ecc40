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
from quickstep.errors import RequestError
from quickstep.text.grammar.schema_numbers import exact_float
from quickstep.types import Grammar

_DECODER = json.JSONDecoder(parse_float=exact_float)
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

    text_bytes: int = InputConfig().schema_bytes
    regex_bytes: int = InputConfig().regex_bytes
    depth: int = InputConfig().schema_depth
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
    """The text to compile, and its form.

    `loosened` names the keywords of schemas that the text enforces less strictly.
    """

    form: Literal["json_schema", "json_object", "regex", "lark"]
    text: str
    loosened: tuple[str, ...] = ()


def grammar_source(
    grammar: Grammar,
    limits: GrammarLimits,
    one_of_as_any_of: bool = False,
    merges_references: bool = False,
) -> GrammarSource:
    """The grammar within the limits. Raises RequestError.

    With `one_of_as_any_of`, every `oneOf` is enforced as `anyOf`; a strict grammar never is. With
    `merges_references`, references in a circle may have keywords next to them.
    """
    text = grammar.text
    is_regex = grammar.kind == "regex"
    _bound(_num_bytes(text), limits.regex_bytes if is_regex else limits.text_bytes, "bytes")
    schemas = _Schemas(limits, one_of_as_any_of, merges_references)
    match grammar.kind:
        case "json_schema":
            source = GrammarSource("json_schema", schemas.of_text(text), schemas.loosened)
        case "json_object":
            return GrammarSource("json_object", '{"type": "object"}')
        case "regex":
            if not text:
                raise RequestError("grammar is an empty regular expression", param="grammar")
            return GrammarSource("regex", text)
        case "choice":
            return GrammarSource("lark", _choice(text, limits))
        case "lark":
            source = GrammarSource("lark", schemas.in_lark(text), schemas.loosened)
        case "gbnf":
            lark = _translated(text, limits)
            source = GrammarSource("lark", schemas.in_lark(lark), schemas.loosened)
    if grammar.strict and source.loosened:
        raise RequestError(f"grammar {_NOT_EXACT[source.loosened[0]]}", param="grammar")
    return source


# Why a strict grammar is refused, by the keyword.
_NOT_EXACT = {
    "oneOf": "has a oneOf whose branches may overlap, which cannot be enforced exactly; give each"
    " branch a required property with a const of its own, use anyOf, or send it without strict",
    "uniqueItems": "has uniqueItems for items with many values, which cannot be enforced; leave it"
    " out, list the values in an enum, or send it without strict",
}


class _Schemas:
    """Rewrites the schemas of one grammar; `loosened` names what is not enforced exactly."""

    def __init__(
        self, limits: GrammarLimits, one_of_as_any_of: bool, merges_references: bool
    ) -> None:
        self._limits = limits
        self._one_of_as_any_of = one_of_as_any_of
        self._merges_references = merges_references
        self._loosened: set[str] = set()

    @property
    def loosened(self) -> tuple[str, ...]:
        """Keywords, sorted."""
        return tuple(sorted(self._loosened))

    def of_text(self, text: str) -> str:
        """The schema's text as we parse it, so that the original spelling has no effect."""
        schema = _parsed(text)
        if not isinstance(schema, dict):
            raise RequestError("grammar is no JSON schema: it must be an object", param="grammar")
        if "x-guidance" in schema:
            raise RequestError("grammar has the unknown key x-guidance", param="grammar")
        return self._of(schema)

    def in_lark(self, text: str) -> str:
        """Lark with lines, brackets and schemas within the limits. Raises RequestError."""
        _bound(text.count("\n") + 1, self._limits.lines, "lines")
        pieces: list[str] = []
        num_groups = end = 0
        for found in _SCHEMA_IN_LARK.finditer(text):
            if found.start() < end:
                continue
            num_groups += sum(map(text[end : found.start()].count, "([{"))
            pieces.append(text[end : found.end()])
            try:
                schema, end = _DECODER.raw_decode(text, found.end())
            except (ValueError, RecursionError):
                raise RequestError(
                    "grammar has a %json without a schema", param="grammar"
                ) from None
            pieces.append(self._of(schema))
        num_groups += sum(map(text[end:].count, "([{"))
        _bound(num_groups, self._limits.groups, "brackets")
        return "".join([*pieces, text[end:]])

    def _of(self, schema: Any) -> str:
        """A bounded schema in llguidance's keywords. Raises RequestError."""
        from quickstep.text.grammar.json_schema import (
            ESCAPES_BY_NUMBER,
            for_llguidance,
            has_escapes_by_number,
            reference_depth,
        )

        for _, depth in _values(schema):
            _bound(depth, self._limits.depth, "levels")
        if isinstance(schema, dict):
            levels = reference_depth(schema, self._limits.reference_levels)
            _bound(levels, self._limits.reference_levels, "levels of $ref")
            rewritten = for_llguidance(schema, self._one_of_as_any_of, self._merges_references)
            schema = rewritten.schema
            self._loosened |= rewritten.loosened
        text = json.dumps(schema, ensure_ascii=False)
        if has_escapes_by_number(text) and isinstance(schema, dict) and "x-guidance" in schema:
            form = {**schema["x-guidance"], **ESCAPES_BY_NUMBER}
            text = json.dumps({**schema, "x-guidance": form}, ensure_ascii=False)
        return text


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
        return _DECODER.decode(text)
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
