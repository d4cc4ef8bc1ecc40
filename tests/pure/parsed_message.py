"""Runs a message parser over a text, whole or in pieces."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from quickstep.engine.tool_calls.formats import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    message_grammar,
)
from quickstep.engine.tool_calls.parser import MessageParser


@dataclass(frozen=True)
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def new_parser(tool_calls=None, reasoning=None, inside=False):
    counter = itertools.count()
    grammar = message_grammar(
        TOOL_CALL_FORMATS[tool_calls] if tool_calls else None,
        REASONING_FORMATS[reasoning] if reasoning else None,
        inside,
    )
    return MessageParser(grammar, lambda: f"call{next(counter)}")


def parse(deltas, tool_calls=None, reasoning=None, inside=False):
    """What all deltas add up to; a string is one delta. Checks indices and ids on the way."""
    parser = new_parser(tool_calls, reasoning, inside)
    deltas = [deltas] if isinstance(deltas, str) else deltas
    found = [*map(parser.feed, deltas), parser.finish()]
    calls = [call for delta in found for call in delta.calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert [call.call_id for call in calls] == [f"call{n}" for n in range(len(calls))]
    return Parsed(
        "".join(delta.content for delta in found),
        "".join(delta.reasoning for delta in found),
        tuple((call.name, call.arguments) for call in calls),
    )
