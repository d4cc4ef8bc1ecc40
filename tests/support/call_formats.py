"""The formats of tool calls that are tested: the known ones, and those that templates write."""

from __future__ import annotations

import json

from quickstep.text.tool_calls.argument_rules import braced_texts
from quickstep.text.tool_calls.call_grammar import CallSlot
from quickstep.text.tool_calls.formats import TOOL_CALL_FORMATS, formats_of

TEMPLATES = {
    "mistral, named": "[TOOL_CALLS][ARGS]",
    "deepseek, fenced": "tool▁call▁begin```json",
    "glm45, in a line": "<arg_key>k</arg_key><arg_value>v",
}
FORMATS = dict(TOOL_CALL_FORMATS)
FORMATS |= {name: formats_of(text).tool_calls for name, text in TEMPLATES.items()}


def parameters_of(functions):
    """The schemas that a reader of calls needs."""
    return {function["name"]: function["parameters"] or {} for function in functions}


def written_call(known, name, arguments):
    """The spelled call, as a model that was trained on it writes it."""
    spelling = known.spelling
    values = json.loads(arguments)
    slots = {
        CallSlot.NAME: lambda: name,
        CallSlot.NUMBER: lambda: "0",
        CallSlot.ARGUMENTS: lambda: arguments,
        CallSlot.KEYWORDS: lambda: ", ".join(f"{k}={json.dumps(v)}" for k, v in values.items()),
        CallSlot.PARAMETERS: lambda: _tags(spelling.parameters, values),
        CallSlot.BRACED: lambda: "".join(braced_texts(values)),
    }
    pieces = [*spelling.begin, *spelling.call, *spelling.end]
    return "".join(piece if isinstance(piece, str) else slots[piece]() for piece in pieces)


def _tags(spelling, values):
    parts = []
    for key, value in values.items():
        is_text = isinstance(value, str)
        parts += [*spelling.before_key, key]
        parts += spelling.before_string if is_text else spelling.before_json
        parts += [value if is_text else json.dumps(value), spelling.line_end, spelling.stop]
        parts += spelling.after_stop
    return "".join(parts)
