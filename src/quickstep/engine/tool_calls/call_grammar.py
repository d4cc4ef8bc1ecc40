"""The grammar of an answer that has to be a call: `tool_choice` required, or a function's name.

Every format says how it spells calls, as a row of texts with slots for the name and for the
arguments, which follow the function's schema. Called by the server.

    begin call separator call ... end        call: texts, NAME, texts, ARGUMENTS, texts
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quickstep.engine.grammar.json_spacing import ONE_LINE
from quickstep.engine.tool_calls.pythonic_grammar import pythonic_arguments
from quickstep.types import Grammar

__all__ = ["CallSpelling", "CallWriting", "Slot", "around_arguments", "call_grammar"]

_FORM = {**ONE_LINE, "lenient": False}


class Slot(enum.Enum):
    """What differs from call to call; KEYWORDS are arguments as Python writes them."""

    NAME = "name"
    ARGUMENTS = "arguments"
    KEYWORDS = "keywords"


class CallSpelling(msgspec.Struct, frozen=True):
    """How a message of calls only is written.

    Attributes:
        thoughts: Texts around what may stand before the calls; empty where nothing may.
        repeats: Several calls may follow each other.
        openings: Markers that open calls wherever they stand in the text.
        other_openings: Markers that the format's reader takes for more markup, and that free text
            must not have.
        anchor: Pattern of what the reader takes for a call at the beginning of a message; None
            where calls have a marker.
    """

    call: tuple[str | Slot, ...]
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
    """Calls of `functions` and nothing else; at least one, or exactly one.

    A function has a `name` and `parameters`: its schema, or None for any object.

    `special_id` tells the token of a text that is a special one: a grammar's text never matches it.

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
    """Writes parts of a Lark grammar; `lines` are the rules so far."""

    def __init__(self, special_id: Callable[[str], int | None]) -> None:
        self.special_id = special_id
        self.lines: list[str] = []

    def texts(self, texts: Sequence[str]) -> list[str]:
        """Texts in the grammar's words; those that are no special tokens join their neighbours."""
        words: list[str] = []
        plain = ""
        for text in texts:
            token_id = self.special_id(text)
            if token_id is None:
                plain += text
                continue
            words += [_quoted(plain), f"<[{token_id}]>"] if plain else [f"<[{token_id}]>"]
            plain = ""
        return [*words, _quoted(plain)] if plain else words

    def message(
        self, spelling: CallSpelling, functions: Sequence[Mapping[str, Any]], one_call: bool
    ) -> str:
        """A message of calls only, as a part of a rule; writes the rules of its calls."""
        calls = ["call"]
        if spelling.repeats and not one_call:
            calls.append(f"({' '.join([*self.texts(spelling.separator), 'call'])})*")
        self.calls(spelling.call, functions)
        return " ".join([*self.texts(spelling.begin), *calls, *self.texts(spelling.end)])

    def calls(self, call: Sequence[str | Slot], functions: Sequence[Mapping[str, Any]]) -> None:
        """The rules `call`, and `function_0`, `function_0_arguments`, ..."""
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
            if Slot.KEYWORDS in call:
                self.lines += pythonic_arguments(function, rule)
                continue
            schema = {**(function["parameters"] or {}), "type": "object", "x-guidance": _FORM}
            told = json.dumps(schema, ensure_ascii=False)
            self.lines.append(f"{rule}_arguments: %json {told}")


def around_arguments(call: Sequence[str | Slot], name: str) -> tuple[list[str], list[str]]:
    """The texts of a call of the function `name` before its arguments, and behind them."""
    texts = [name if piece is Slot.NAME else piece for piece in call]
    place = next(at for at, piece in enumerate(texts) if isinstance(piece, Slot))
    before, after = texts[:place], texts[place + 1 :]
    return [str(text) for text in before], [str(text) for text in after]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
