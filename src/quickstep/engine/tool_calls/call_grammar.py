"""The grammar of an answer that has to be a call: `tool_choice` required, or a function's name.

Every format says how it spells calls, as a row of texts with slots for the name and for the
arguments, which follow the function's schema. Called by the server.

    begin call separator call ... end        call: texts, NAME, texts, ARGUMENTS, texts
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quickstep.engine.json_form import ONE_LINE
from quickstep.engine.tool_calls.pythonic_grammar import pythonic_arguments
from quickstep.types import Grammar

__all__ = ["CallSpelling", "Slot", "call_grammar"]

_FORM = {**ONE_LINE, "lenient": False}


class Slot(enum.Enum):
    """What differs from call to call; KEYWORDS are arguments as Python writes them."""

    NAME = "name"
    ARGUMENTS = "arguments"
    KEYWORDS = "keywords"


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How a message of calls only is written.

    Attributes:
        thoughts: Texts around what may stand before the calls; empty where nothing may.
        repeats: Several calls may follow each other.
    """

    call: tuple[str | Slot, ...]
    begin: tuple[str, ...] = ()
    separator: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    thoughts: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    repeats: bool = True


def call_grammar(
    spelling: CallSpelling,
    functions: Sequence[Mapping[str, Any]],
    one_call: bool,
    special_id: Callable[[str], int | None],
) -> Grammar:
    """Calls of `functions` (`name`, `parameters`) and nothing else; at least one, or exactly one.

    `special_id` tells the token of a text that is a special one: a grammar's text never matches it.

    Raises:
        RequestError: The format cannot spell a function's name or its parameters.
    """
    writing = _Writing(special_id)
    rules = [f"function_{index}" for index in range(len(functions))]
    calls = ["call"]
    if spelling.repeats and not one_call:
        calls.append(f"({' '.join([*writing.texts(spelling.separator), 'call'])})*")
    start = [*writing.texts(spelling.begin), *calls, *writing.texts(spelling.end)]
    if spelling.thoughts is not None:
        opening, closing = spelling.thoughts
        # special tokens never match a text, others could pass for the closing marker
        text = "/(.|\\n)*/" if special_id(closing[0]) is not None else "/[^<]*/"
        parts = [*writing.texts(opening), text, *writing.texts(closing)]
        writing.lines.append(f"thoughts: {' '.join(parts)}")
        start.insert(0, "thoughts?")
    lines = [f"start: {' '.join(start)}", f"call: {' | '.join(rules)}"]
    for rule, function in zip(rules, functions, strict=True):
        lines.append(f"{rule}: {writing.call(spelling, function, rule)}")
    return Grammar.of_lark("\n".join([*lines, *writing.lines]) + "\n")


class _Writing:
    """Writes parts of a Lark grammar; `lines` are the rules that come along."""

    def __init__(self, special_id: Callable[[str], int | None]) -> None:
        self._special_id = special_id
        self.lines: list[str] = []

    def texts(self, texts: Sequence[str]) -> list[str]:
        """Texts, each in the grammar's words."""
        return [self._text(text) for text in texts]

    def call(self, spelling: CallSpelling, function: Mapping[str, Any], rule: str) -> str:
        """One function's call."""
        parts: list[str] = []
        text = ""
        for piece in spelling.call:
            if piece is Slot.NAME:
                text += function["name"]
            elif isinstance(piece, Slot):
                parts += [self._text(text), self._arguments(piece, function, rule)]
                text = ""
            elif self._special_id(piece) is not None:
                parts += [self._text(text), self._text(piece)]
                text = ""
            else:
                text += piece
        return " ".join(part for part in [*parts, self._text(text)] if part)

    def _arguments(self, slot: Slot, function: Mapping[str, Any], rule: str) -> str:
        if slot is Slot.KEYWORDS:
            self.lines += pythonic_arguments(function, rule)
            return f"{rule}_arguments"
        schema = {**function["parameters"], "type": "object", "x-guidance": _FORM}
        return f"%json {json.dumps(schema, ensure_ascii=False)}"

    def _text(self, text: str) -> str:
        if not text:
            return ""
        token_id = self._special_id(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"
