"""DeepSeek: calls between markers of their own, `｜` and `▁` being no ASCII.

V3 and R1 fence the arguments; V3.1 does not and leaves the kind out:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    {...}
    ```<｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜> ...
"""

from __future__ import annotations

import re

from quickstep.engine.tool_calls.call_grammar import CallSpelling, Slot
from quickstep.engine.tool_calls.json_text import arguments_text, known_name
from quickstep.engine.tool_calls.reader import Found, Malformed, Markers, Parsing, Reader

__all__ = ["DEEPSEEK_FENCED", "DEEPSEEK_MARKERS", "DEEPSEEK_PLAIN", "deepseek"]

_BAR = "\uff5c"  # a bar of full width
_CALLS, _CALLS_END = f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁calls▁end{_BAR}>"
_CALL, _CALL_END = f"<{_BAR}tool▁call▁begin{_BAR}>", f"<{_BAR}tool▁call▁end{_BAR}>"
_SEPARATOR = f"<{_BAR}tool▁sep{_BAR}>"
DEEPSEEK_MARKERS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
DEEPSEEK_PLAIN = CallSpelling(
    begin=(_CALLS,),
    call=(_CALL, Slot.NAME, _SEPARATOR, Slot.ARGUMENTS, _CALL_END),
    end=(_CALLS_END,),
    openings=(_CALLS,),
    other_openings=(_CALL,),
)
DEEPSEEK_FENCED = CallSpelling(
    begin=(_CALLS,),
    call=(
        _CALL,
        "function",
        _SEPARATOR,
        Slot.NAME,
        "\n```json\n",
        Slot.ARGUMENTS,
        "\n```",
        _CALL_END,
    ),
    separator=("\n",),
    end=(_CALLS_END,),
    openings=(_CALLS,),
    other_openings=(_CALL,),
)
_OPENING, _STOPS = Markers(_CALLS, _CALL), Markers(_CALL, _CALL_END, _CALLS_END)
_FENCED_STOPS = Markers("```", *_STOPS.texts)
_NAME_CHARS = re.compile(r"[^<\s`{}]++")


def deepseek(reader: Reader) -> Parsing[None]:
    """The grammar of a message."""
    while (marker := (yield from reader.content_until(_OPENING))) is not None:
        opened = marker == _CALL
        while (yield from reader.attempt(_call(reader, opened), is_marked=True)) is Found.CALLS:
            yield from reader.space()
            if (yield from reader.markup(_CALLS_END)):
                reader.drop()
                break
            if not (yield from reader.markup(_CALL)):
                reader.reject()
                break
            opened = True


def _call(reader: Reader, opened: bool) -> Parsing[None]:
    yield from reader.space()
    if not opened:
        yield from reader.expect(_CALL)
    name = yield from reader.span(_NAME_CHARS)
    yield from reader.expect(_SEPARATOR)
    yield from reader.space()
    fenced = (yield from reader.peek()) != "{"
    if fenced:
        name = yield from reader.span(_NAME_CHARS)
        yield from reader.space()
        fenced = yield from reader.markup("```")
        yield from reader.markup("json")
        yield from reader.space()
    if not fenced and (yield from reader.peek()) != "{":
        raise Malformed
    reader.begin_call(known_name(name))
    yield from arguments_text(reader, _FENCED_STOPS if fenced else _STOPS)
    reader.end_call()
    yield from reader.space()
    if fenced:
        yield from reader.markup("```")
        yield from reader.space()
    if not (yield from reader.markup(_CALL_END)) and (yield from reader.peek()):
        raise Malformed
