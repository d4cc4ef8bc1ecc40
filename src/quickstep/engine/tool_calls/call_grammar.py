"""The grammar of an answer that has to be a call: `tool_choice` required, or a function's name.

A format that is JSON around its markers says how it spells calls; the arguments then follow the
function's schema. Formats without a spelling cannot be forced. Called by the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quickstep.types import Grammar

__all__ = ["CallSpelling", "call_grammar"]

_COMPACT = {"whitespace_flexible": False, "lenient": False}


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """Texts around `{"name": ..., "arguments": ...}`; `arguments` is that member's name."""

    opening: tuple[str, ...] = ()
    separator: str = ""
    closing: tuple[str, ...] = ()
    arguments: str = "arguments"


def call_grammar(
    spelling: CallSpelling,
    functions: Sequence[Mapping[str, Any]],
    one_call: bool,
    is_special: Callable[[str], bool],
) -> Grammar:
    """Calls of `functions` (`name`, `parameters`) and nothing else; at least one, or exactly one.

    `is_special`: whether a text is a special token, which llguidance spells in its own way.
    """

    def spelled(text: str) -> str:
        return text if is_special(text) else _quoted(text)

    rules = [f"function_{index}" for index in range(len(functions))]
    parts = [*map(spelled, spelling.opening), "function", *map(spelled, spelling.closing)]
    more = "" if one_call else f" ({_quoted(spelling.separator)} call)*"
    lines = [f"start: call{more}", f"call: {' '.join(parts)}", f"function: {' | '.join(rules)}"]
    for rule, function in zip(rules, functions, strict=True):
        head = f'{{"name": {_quoted(function["name"])}, {_quoted(spelling.arguments)}: '
        schema = {**function["parameters"], "type": "object", "x-guidance": _COMPACT}
        lines.append(f"{rule}: {_quoted(head)} %json {_quoted(schema)} {_quoted('}')}")
    return Grammar.of_lark("\n".join(lines) + "\n")


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
