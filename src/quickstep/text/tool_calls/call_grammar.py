"""The grammar of an answer that must be a call: `tool_choice` required, or a function's name.

Every format says how it spells calls: as a row of texts with slots for the name and for the
arguments, which match the function's schema. Called by the server.

    begin call separator call ... end        call: texts, NAME, texts, ARGUMENTS, texts
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quickstep.text.tool_calls.argument_rules import FORM, ArgumentRules, ParameterSpelling
from quickstep.types import Grammar


class CallSlot(enum.Enum):
    """The parts that differ from call to call: the name, a number, and the arguments as JSON, in
    Python's syntax, as tags or in Gemma's braces.
    """

    NAME = "name"
    NUMBER = "number"
    ARGUMENTS = "arguments"
    KEYWORDS = "keywords"
    PARAMETERS = "parameters"
    BRACED = "braced"


_FORM_NAMES = {
    CallSlot.KEYWORDS: "pythonic",
    CallSlot.PARAMETERS: "of tags",
    CallSlot.BRACED: "gemma4",
}


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
        parameters: How the slot PARAMETERS is spelled.
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
    parameters: ParameterSpelling | None = None


def call_grammar(
    spelling: CallSpelling,
    functions: Sequence[Mapping[str, Any]],
    one_call: bool,
    special_id: Callable[[str], int | None],
    loosened: set[str] | None = None,
) -> Grammar:
    """A grammar of calls of `functions` and nothing else: at least one, or exactly one.

    A function has a `name` and `parameters`: its schema, or None for any object. With `strict`
    False, keywords of the schema that the format cannot spell have no effect and are added to
    `loosened`. `special_id` gives the id of a text that is a special token, which a grammar's text
    never matches, else None.

    Raises:
        RequestError: The format cannot spell a function's name or its parameters.
    """
    writing = CallWriting(special_id)
    message = writing.message(spelling, functions, one_call)
    if loosened is not None:
        loosened |= writing.loosened
    if spelling.thoughts is not None:
        opening, closing = spelling.thoughts
        # special tokens never match a text, others could pass for the closing marker
        text = "/(.|\\n)*/" if special_id(closing[0]) is not None else "/[^<]*/"
        parts = [*writing.texts(opening), text, *writing.texts(closing)]
        writing.lines.insert(0, f"thoughts: {' '.join(parts)}")
        message = f"thoughts? {message}"
    return Grammar.of_lark("\n".join([f"start: {message}", *writing.lines]) + "\n")


class CallWriting:
    """Writes parts of a Lark grammar; `lines` has the rules so far, `loosened` the keywords that
    have no effect.
    """

    def __init__(self, special_id: Callable[[str], int | None]) -> None:
        self.special_id = special_id
        self.lines: list[str] = []
        self.loosened: set[str] = set()

    def texts(self, texts: Sequence[str | CallSlot]) -> list[str]:
        """Texts and numbers as parts of a rule; neighbours that are no special tokens become one
        part.
        """
        parts: list[str] = []
        plain = ""
        for text in texts:
            if isinstance(text, CallSlot):
                part = "/[0-9]{1,4}/"
            elif (token_id := self.special_id(text)) is not None:
                part = f"<[{token_id}]>"
            else:
                plain += text
                continue
            parts += [_quoted(plain), part] if plain else [part]
            plain = ""
        return [*parts, _quoted(plain)] if plain else parts

    def message(
        self, spelling: CallSpelling, functions: Sequence[Mapping[str, Any]], one_call: bool
    ) -> str:
        """A message that has only calls, as a part of a rule; writes the rules of its calls."""
        calls = ["call"]
        if spelling.repeats and not one_call:
            calls.append(f"({' '.join([*self.texts(spelling.separator), 'call'])})*")
        self.calls(spelling, spelling.call, functions)
        return " ".join([*self.texts(spelling.begin), *calls, *self.texts(spelling.end)])

    def calls(
        self,
        spelling: CallSpelling,
        call: Sequence[str | CallSlot],
        functions: Sequence[Mapping[str, Any]],
    ) -> None:
        """Write the rules `call`, and `function_0`, `function_0_arguments`, ...

        `call` is that of `spelling`, or what follows its opening.
        """
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
            self.lines += self._arguments(spelling, call, function, rule)

    def _arguments(
        self,
        spelling: CallSpelling,
        call: Sequence[str | CallSlot],
        function: Mapping[str, Any],
        rule: str,
    ) -> list[str]:
        """The rules of a function's arguments."""
        slot = next((slot for slot in _FORM_NAMES if slot in call), CallSlot.ARGUMENTS)
        if slot is CallSlot.ARGUMENTS:
            schema = {**(function["parameters"] or {}), "type": "object", "x-guidance": FORM}
            return [f"{rule}_arguments: %json {json.dumps(schema, ensure_ascii=False)}"]
        rules = ArgumentRules(function, rule, self.texts, self.special_id, _FORM_NAMES[slot])
        if slot is CallSlot.KEYWORDS:
            lines = rules.keywords()
        elif slot is CallSlot.BRACED:
            lines = rules.braces()
        else:
            assert spelling.parameters is not None, "a format of tags has a spelling of parameters"
            lines = rules.tags(spelling.parameters)
        self.loosened |= rules.loosened
        return lines


def around_arguments(
    call: Sequence[str | CallSlot], name: str
) -> tuple[list[str | CallSlot], list[str | CallSlot]]:
    """The parts of a call of the function `name` before its arguments, and after them."""
    texts: list[str | CallSlot] = [name if piece is CallSlot.NAME else piece for piece in call]
    place = next(
        at
        for at, piece in enumerate(texts)
        if isinstance(piece, CallSlot) and piece is not CallSlot.NUMBER
    )
    return texts[:place], texts[place + 1 :]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
