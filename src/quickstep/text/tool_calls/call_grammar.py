"""The grammar of an answer that must be a call: `tool_choice` required, or a function's name.

Every format says how it spells calls: as a row of texts with slots for the name and for the
arguments, which match the function's schema. Called by the server.

    begin call separator call ... end        call: texts, NAME, texts, ARGUMENTS, texts
"""

from __future__ import annotations

import enum
import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quickstep.errors import RequestError
from quickstep.text.grammar.json_schema import ONE_LINE
from quickstep.types import Grammar

_FORM = {**ONE_LINE, "lenient": False}
_FUNCTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_ANNOTATIONS = frozenset({"$schema", "$id", "title", "description", "examples", "default"})
_KNOWN_KEYS = _ANNOTATIONS | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
}


class CallSlot(enum.Enum):
    """The parts that differ from call to call; KEYWORDS are arguments in Python's syntax."""

    NAME = "name"
    ARGUMENTS = "arguments"
    KEYWORDS = "keywords"


class CallSpelling(msgspec.Struct, frozen=True):
    """How a format writes a message that has only calls.

    Attributes:
        thoughts: The texts before and after the reasoning that may precede the calls; None where
            no reasoning may.
        repeats: Several calls may follow each other.
        openings: Markers that open calls anywhere in the text.
        other_openings: Markers that the format's reader treats as more markup, and that free text
            must not contain.
        anchor: Pattern of a message's beginning that the reader treats as a call; None where calls
            have a marker.
    """

    call: tuple[str | CallSlot, ...]
    begin: tuple[str, ...] = ()
    separator: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    thoughts: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    repeats: bool = True
    openings: tuple[str, ...] = ()
    other_openings: tuple[str, ...] = ()
    anchor: str | None = None


def call_grammar(
    spelling: CallSpelling,
    functions: Sequence[Mapping[str, Any]],
    one_call: bool,
    special_id: Callable[[str], int | None],
) -> Grammar:
    """A grammar of calls of `functions` and nothing else: at least one, or exactly one.

    A function has a `name` and `parameters`: its schema, or None for any object. `special_id` gives
    the id of a text that is a special token, which a grammar's text never matches, else None.

    Raises:
        RequestError: The format cannot spell a function's name or its parameters.
    """
    writing = CallWriting(special_id)
    message = writing.message(spelling, functions, one_call)
    if spelling.thoughts is not None:
        opening, closing = spelling.thoughts
        # special tokens never match a text, others could pass for the closing marker
        text = "/(.|\\n)*/" if special_id(closing[0]) is not None else "/[^<]*/"
        parts = [*writing.texts(opening), text, *writing.texts(closing)]
        writing.lines.insert(0, f"thoughts: {' '.join(parts)}")
        message = f"thoughts? {message}"
    return Grammar.of_lark("\n".join([f"start: {message}", *writing.lines]) + "\n")


class CallWriting:
    """Writes parts of a Lark grammar; `lines` has the rules so far."""

    def __init__(self, special_id: Callable[[str], int | None]) -> None:
        self.special_id = special_id
        self.lines: list[str] = []

    def texts(self, texts: Sequence[str]) -> list[str]:
        """Texts as parts of a rule; neighbours that are no special tokens become one part."""
        parts: list[str] = []
        plain = ""
        for text in texts:
            token_id = self.special_id(text)
            if token_id is None:
                plain += text
                continue
            parts += [_quoted(plain), f"<[{token_id}]>"] if plain else [f"<[{token_id}]>"]
            plain = ""
        return [*parts, _quoted(plain)] if plain else parts

    def message(
        self, spelling: CallSpelling, functions: Sequence[Mapping[str, Any]], one_call: bool
    ) -> str:
        """A message that has only calls, as a part of a rule; writes the rules of its calls."""
        calls = ["call"]
        if spelling.repeats and not one_call:
            calls.append(f"({' '.join([*self.texts(spelling.separator), 'call'])})*")
        self.calls(spelling.call, functions)
        return " ".join([*self.texts(spelling.begin), *calls, *self.texts(spelling.end)])

    def calls(self, call: Sequence[str | CallSlot], functions: Sequence[Mapping[str, Any]]) -> None:
        """Write the rules `call`, and `function_0`, `function_0_arguments`, ..."""
        rules = [f"function_{index}" for index in range(len(functions))]
        self.lines.append(f"call: {' | '.join(rules)}")
        for rule, function in zip(rules, functions, strict=True):
            before, after = around_arguments(call, function["name"])
            head = self.texts(before)
            if head[0].startswith('"{') and len(head[0]) > len('"{"'):
                # a lexeme of its own, so that an answer in JSON may begin in the same way
                head[0] = f'"{{" "{head[0][2:]}'
            parts = [*head, f"{rule}_arguments", *self.texts(after)]
            self.lines.append(f"{rule}: {' '.join(parts)}")
            if CallSlot.KEYWORDS in call:
                self.lines += _keyword_rules(function, rule)
                continue
            schema = {**(function["parameters"] or {}), "type": "object", "x-guidance": _FORM}
            self.lines.append(f"{rule}_arguments: %json {json.dumps(schema, ensure_ascii=False)}")


def around_arguments(call: Sequence[str | CallSlot], name: str) -> tuple[list[str], list[str]]:
    """The texts of a call of the function `name` before its arguments, and after them."""
    texts = [name if piece is CallSlot.NAME else piece for piece in call]
    place = next(at for at, piece in enumerate(texts) if isinstance(piece, CallSlot))
    before, after = texts[:place], texts[place + 1 :]
    return [str(text) for text in before], [str(text) for text in after]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _keyword_rules(function: Mapping[str, Any], rule: str) -> list[str]:
    """Lark rules of arguments in Python's syntax (`a=1, b="x"`), `{rule}_arguments` first.

    The values are JSON, which `pythonic` reads as well. So the schema has to be a plain object
    with known properties, whose order the arguments have; None allows any arguments. `rest_i` is
    what may follow after an argument, so it begins with a comma.

    Raises:
        RequestError: The format cannot spell the name or the schema; it names the key.
    """
    name, schema = function["name"], function["parameters"]
    if not _FUNCTION_NAME.fullmatch(name):
        raise _refused(name, "begins with no letter")
    if schema is None:
        return _any_arguments(rule)
    properties, required = _checked(name, schema)
    lines = []
    first, rest = f"{rule}_arguments", f"{rule}_rest"
    for place, (key, value) in enumerate(properties.items()):
        here = f"{rule}_value_{place}"
        value_json = f"%json {json.dumps(_value_schema(schema, value), ensure_ascii=False)}"
        lines.append(f"{here}: {json.dumps(f'{key}=')} {value_json}")
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
    """All properties (some may only be named in `required`), and the required ones."""
    unknown = next((key for key in schema if key not in _KNOWN_KEYS), None)
    if unknown is not None:
        raise _refused(name, f"has {unknown[:64]} in its parameters")
    listed, names = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(listed, Mapping) or not isinstance(names, list):
        raise _refused(name, "has parameters that are no JSON schema")
    properties, required = dict(listed), frozenset(key for key in names if isinstance(key, str))
    for key in sorted(required):
        properties.setdefault(key, {})
    for key in properties:
        if not key.isidentifier() or keyword.iskeyword(key):
            raise _refused(name, f"has the parameter {key[:64]!r}, which is no Python name")
    return properties, required


def _value_schema(schema: Mapping[str, Any], value: object) -> dict[str, Any]:
    own = dict(value) if isinstance(value, Mapping) else {} if value else {"not": {}}
    defs = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**defs, **own, "x-guidance": _FORM}


def _refused(name: str, why: str) -> RequestError:
    return RequestError(
        f"tools has the function {name}, whose calls cannot be enforced in the format pythonic: it "
        f"{why}; send it without strict, and tool_choice auto",
        param="tools",
    )
