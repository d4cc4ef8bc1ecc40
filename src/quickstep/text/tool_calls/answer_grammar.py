"""The grammar of an answer that may call: text, or text and calls whose arguments match.

For functions that are `strict` where the model may choose. Text is free up to what the format's
reader treats as the opening of a call; from there on the grammar spells the call:

    text                                  no call
    (text OPENING calls)* text            an opening that may be anywhere
    calls                                 calls that begin the message without a marker

So whatever is sampled is parsed as content, or as calls whose arguments match. A lazy rule ends
with its first match, hence the opening is never part of the text; a special token is in no text
anyway. Where the answer has a grammar of its own, the message is such an answer or calls. The
grammar does not cover the reasoning before the message, except in channels. Called by the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quickstep.text.tool_calls.argument_rules import FORM, pattern_of
from quickstep.text.tool_calls.call_grammar import (
    CallSlot,
    CallSpelling,
    CallWriting,
    around_arguments,
)
from quickstep.types import Grammar

_ANY = "(.|\\n)*"
_CHANNELS = ("analysis", "commentary", "final")  # of parts that are no calls
_SPACE = "[ \\t\\n\\r]*"


def answer_grammar(
    spelling: CallSpelling,
    functions: Sequence[Mapping[str, Any]],
    one_call: bool,
    special_id: Callable[[str], int | None],
    answer: Grammar | None = None,
) -> Grammar:
    """A grammar of text, or of an answer under the grammar `answer`, or of calls of `functions`.

    `functions` and `special_id` are those of `call_grammar`.

    Raises:
        RequestError: The format cannot spell a function's name or its parameters.
        NotNestable: The answer's grammar cannot be part of another one.
    """
    writing = CallWriting(special_id)
    rule = None if answer is None else _rule_of(answer)
    if spelling.thoughts is not None:
        return _of_channels(writing, spelling, functions, rule)
    if rule is None:
        return _Answer(writing, spelling, functions, one_call).grammar()
    calls = writing.message(spelling, functions, one_call)
    lines = [f"start: {calls} | answer", f"answer: {rule}", *writing.lines]
    return Grammar.of_lark("\n".join(lines) + "\n")


class NotNestable(ValueError):
    """A grammar that cannot be part of another one."""


def _rule_of(grammar: Grammar) -> str:
    """The grammar as the right side of a rule. Raises NotNestable."""
    match grammar.kind:
        case "json_schema" | "json_object":
            schema = _schema_of(grammar)
            return f"%json {json.dumps({**schema, 'x-guidance': FORM}, ensure_ascii=False)}"
        case "regex" if grammar.text:
            pattern = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", grammar.text)
            return f"/{pattern}/".replace("\n", "\\n")
        case "choice":
            texts = json.loads(grammar.text)
            if texts and all(isinstance(text, str) and text for text in texts):
                return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    raise NotNestable(
        f"is a grammar of the kind {grammar.kind}, which cannot go with tools or channels; send a "
        "schema, or tool_choice none"
    )


def _schema_of(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == "json_object":
        return {"type": "object"}
    schema = json.loads(grammar.text)
    if not isinstance(schema, dict):
        raise NotNestable("is no JSON schema: it must be an object")
    return schema


class _Answer:
    """Writes the rules of one format that has calls within text."""

    def __init__(
        self,
        writing: CallWriting,
        spelling: CallSpelling,
        functions: Sequence[Mapping[str, Any]],
        one_call: bool,
    ) -> None:
        self._writing = writing
        self._spelling = spelling
        self._functions = functions
        self._one_call = one_call
        self._begin, self._call = _without_opening(spelling)

    def grammar(self) -> Grammar:
        """Write all rules."""
        lines = self._writing.lines
        lines += [
            "start: answer",
            *self._message("answer", "TEXT"),
            f"TEXT: {self._text(without_anchor=True)}",
        ]
        self._write_calls()
        return Grammar.of_lark("\n".join(lines) + "\n")

    def _message(self, rule: str, text: str) -> list[str]:
        """The rules of a message that begins with `text`."""
        ways = [text, f"{rule}_opening calls"]
        if self._spelling.anchor is None and not self._one_call:
            ways[1] += " more"
        if self._spelling.anchor is not None:
            ways.append("anchored")
        return [f"{rule}: {' | '.join(ways)}", *self._openings(f"{rule}_opening", text)]

    def _openings(self, rule: str, text: str) -> list[str]:
        special_id = self._writing.special_id
        markers = [self._marker(marker) for marker in self._spelling.openings if special_id(marker)]
        texts = [marker for marker in self._spelling.openings if special_id(marker) is None]
        ways = [f"{text} {marker}" for marker in markers]
        lines = []
        if texts:
            ways.append(f"{rule}_text")
            lines.append(f"{rule}_text[lazy]: {text} /{'|'.join(map(pattern_of, texts))}/")
        return [f"{rule}: {' | '.join(ways)}", *lines]

    def _write_calls(self) -> None:
        """The calls after an opening, the same ones that begin the message, and what follows."""
        writing, spelling = self._writing, self._spelling
        writing.calls(spelling, self._call, self._functions)
        repeated = ""
        if not self._one_call and (spelling.begin or spelling.anchor):
            repeated = f" ({' '.join([*writing.texts(spelling.separator), 'call'])})*"
        end = " ".join(["", *writing.texts(spelling.end)])
        begin = " ".join([*writing.texts(self._begin), ""])
        writing.lines.append(f"calls: {begin}call{repeated}{end}")
        if spelling.anchor is None:
            if not self._one_call:
                writing.lines += [
                    "more: (more_opening calls)* PLAIN",
                    *self._openings("more_opening", "PLAIN"),
                    f"PLAIN: {self._text(without_anchor=False)}",
                ]
            return
        writing.lines += [f"anchored: first_call{repeated}{end}", f"SPACE: /{_SPACE}/"]
        ways = []
        for index, function in enumerate(self._functions):
            before, after = around_arguments(self._call, function["name"])
            text = json.dumps("".join(map(str, [*self._begin, *before])), ensure_ascii=False)
            writing.lines.append(f"ANCHOR_{index}: SPACE {text}")
            rest = [f"function_{index}_arguments", *writing.texts(after)]
            ways.append(" ".join([f"ANCHOR_{index}", *rest]))
        writing.lines.append(f"first_call: {' | '.join(ways)}")

    def _text(self, without_anchor: bool) -> str:
        """Free text: nothing in it opens a call that the grammar does not spell."""
        text = f"/{_ANY}/"
        special_id = self._writing.special_id
        others = [other for other in self._spelling.other_openings if special_id(other) is None]
        if others:
            text += f" & ~/{_ANY}({'|'.join(map(pattern_of, others))}){_ANY}/"
        if without_anchor and self._spelling.anchor is not None:
            text += f" & ~/{_SPACE}{self._spelling.anchor}{_ANY}/"
        return text

    def _marker(self, text: str) -> str:
        return self._writing.texts([text])[0]


def _without_opening(
    spelling: CallSpelling,
) -> tuple[tuple[str, ...], tuple[str | CallSlot, ...]]:
    """What is before the first call, and a call, both without the opening."""
    begin, call = spelling.begin, spelling.call
    if begin and begin[0] in spelling.openings:
        return begin[1:], call
    if not begin and call[0] in spelling.openings:
        return begin, call[1:]
    return begin, call


def _of_channels(
    writing: CallWriting,
    spelling: CallSpelling,
    functions: Sequence[Mapping[str, Any]],
    answer: str | None,
) -> Grammar:
    """Harmony: parts with a header and a body, the last of which may be a call.

        part (<|end|> <|start|> "assistant" part)*      part: <|channel|> CHANNEL <|message|> text

    `other_openings` are the markers of headers, which no text contains. `answer` is the rule of
    the final channel's content; None for text.
    """
    assert spelling.thoughts is not None, "a format with channels has one of thoughts"
    (channel, _, message), (end, *following) = spelling.thoughts
    special_id = writing.special_id
    hidden = [other for other in spelling.other_openings if special_id(other) is None]
    text = f"/{_ANY}/"
    if hidden:
        text += f" & ~/{_ANY}({'|'.join(map(pattern_of, hidden))}){_ANY}/"
    lazy = "[lazy]" if special_id(end) is None else ""
    free = _CHANNELS if answer is None else _CHANNELS[:-1]
    headers = [" ".join(writing.texts([channel, name, message])) for name in free]
    ways = ["header TEXT"]
    lines = []
    if answer is not None:
        final = " ".join(writing.texts([channel, _CHANNELS[-1], message]))
        ways = [f"{final} answer"]
        lines.append(f"answer: {answer}")
    if functions:
        writing.calls(spelling, spelling.call, functions)
        ways.append("call")
    lines = [
        f"start: part* ({' | '.join(ways)})",
        f"part: header ended {' '.join(writing.texts(following))}",
        f"header: {' | '.join(headers)}",
        f"ended{lazy}: TEXT {writing.texts([end])[0]}",
        f"TEXT: {text}",
        *lines,
        *writing.lines,
    ]
    return Grammar.of_lark("\n".join(lines) + "\n")
