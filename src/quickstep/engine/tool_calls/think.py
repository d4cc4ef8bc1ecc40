"""Reasoning before the answer: `<think>...</think>`, or Mistral's `[THINK]...[/THINK]`.

It stands at the beginning of the message only, so that an answer may speak of the tag. Templates
that open it in the prompt make the output start inside.
"""

from __future__ import annotations

from quickstep.engine.tool_calls.reader import Markers, Parsing, Reader

__all__ = ["think"]


def think(reader: Reader, opening: str, closing: Markers, inside: bool) -> Parsing[None]:
    """Read the reasoning, if there is any; what follows is for the next grammar."""
    yield from reader.space()
    opened = yield from reader.literal(opening)
    if not opened and not inside:
        reader.reject()
        return
    reader.drop()
    reader.reasoning.cut()
    if (yield from reader.text_until(reader.reasoning, closing)) is not None:
        reader.drop()
        reader.reasoning.cut()
