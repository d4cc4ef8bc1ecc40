"""Runs a message parser over a text, whole or in pieces."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from quickstep.text.tool_calls.formats import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    message_grammar,
)
from quickstep.text.tool_calls.message_delta import CallDelta
from quickstep.text.tool_calls.reader import MessageParser


@dataclass(frozen=True)
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def new_parser(tool_calls=None, reasoning=None, inside=False, parameters=None):
    counter = itertools.count()
    grammar = message_grammar(
        TOOL_CALL_FORMATS[tool_calls] if tool_calls else None,
        REASONING_FORMATS[reasoning] if reasoning else None,
        inside,
    )
    return MessageParser(grammar, lambda: f"call{next(counter)}", parameters)


def parse(deltas, tool_calls=None, reasoning=None, inside=False, parameters=None):
    """What all deltas add up to; a string is one delta. Checks the pieces of calls on the way."""
    parser = new_parser(tool_calls, reasoning, inside, parameters)
    deltas = [deltas] if isinstance(deltas, str) else deltas
    return added_up([*map(parser.feed, deltas), parser.finish()])


def added_up(found):
    """The message that deltas add up to, whose calls come one after the other."""
    calls = []
    is_open = False
    for part in (part for delta in found for part in delta.parts):
        if not isinstance(part, CallDelta):
            assert not is_open, "a call is complete before anything else comes"
        elif part.name:
            assert (part.index, part.call_id) == (len(calls), f"call{len(calls)}")
            assert not part.arguments
            assert not is_open
            is_open = True
            calls.append((part.name, ""))
        else:
            assert part.index == len(calls) - 1
            assert is_open, "nothing follows the last piece of a call"
            is_open = not part.is_last
            calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
    assert not is_open
    return Parsed(
        "".join(delta.content for delta in found),
        "".join(delta.reasoning for delta in found),
        tuple(calls),
    )
