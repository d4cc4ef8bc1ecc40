"""Llama's pythonic calls: `[f(a=1), g(b="x", c=[True, None])]`, Python literals only.

The list begins the message or follows `<|python_start|>`. It is a list of calls once a call in it
has a keyword followed by a literal, or closes. Arguments become JSON, value by value; after a value
that is no literal they stay as the model wrote them. Nothing is evaluated: the literals are parsed
here, character by character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quickstep.text.tool_calls.call_grammar import CallSlot, CallSpelling
from quickstep.text.tool_calls.reader import (
    Malformed,
    Markers,
    Parsing,
    Reader,
    calls_in_text,
)

PYTHONIC_MARKERS = ("<|python_start|>", "<|python_end|>")
PYTHONIC_SPELLING = CallSpelling(
    begin=("[",),
    call=(CallSlot.NAME, "(", CallSlot.KEYWORDS, ")"),
    separator=(", ",),
    end=("]",),
    openings=("<|python_start|>",),
    anchor=r"\[[ \t\n\r]*[A-Za-z_][A-Za-z0-9_.-]*\(",
)
_OPENING, _CLOSING = Markers("<|python_start|>"), Markers("<|python_end|>")
_MAX_DEPTH = 64
_NAME_CHARS = re.compile(r"[A-Za-z0-9_.-]++")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_KEYWORD_CHARS = re.compile(r"\w++")
_VALUE_START = re.compile(r"[-+.0-9'\"\[({TFNtfn]")
_NUMBER_CHARS = re.compile(r"[-+.0-9eE_]++")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_STRING_CHARS = {
    '"': re.compile(r'(?:[^"\\]|\\.)++', re.DOTALL),
    "'": re.compile(r"(?:[^'\\]|\\.)++", re.DOTALL),
}
_CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})"
    r"|([0-7]{1,3})|(.))",
    re.DOTALL,
)
_PLAIN_ESCAPES = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n",
    "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip


def pythonic(reader: Reader) -> Parsing[None]:
    """Read a message in the pythonic format."""
    yield from reader.space()
    if (yield from reader.peek()) == "[":
        yield from reader.attempt(_calls(reader), is_marked=False)
    else:
        reader.reject()
    yield from calls_in_text(reader, _OPENING, _CLOSING, lambda: _calls(reader))


def _calls(reader: Reader) -> Parsing[None]:
    num_calls = 0

    def call() -> Parsing[None]:
        nonlocal num_calls
        num_calls += 1
        yield from _call(reader)

    yield from reader.space()
    yield from reader.expect("[")
    yield from _series(reader, "]", call)
    if not num_calls:
        raise Malformed
    yield from reader.markup("<|python_end|>")


def _call(reader: Reader) -> Parsing[None]:
    name = yield from reader.span(_NAME_CHARS)
    if not _NAME.fullmatch(name):
        raise Malformed
    yield from reader.expect("(")
    arguments = "{"  # the JSON text that is next, before a value

    def argument() -> Parsing[None]:
        nonlocal arguments
        keyword = yield from reader.span(_KEYWORD_CHARS)
        if not keyword.isidentifier():
            raise Malformed
        yield from reader.space()
        yield from reader.expect("=")
        yield from reader.space()
        if arguments == "{":
            if not _VALUE_START.match((yield from reader.peek())):
                raise Malformed
            reader.begin_call(name)
        key, arguments = f"{arguments}{_json_string(keyword)}: ", ", "
        reader.add_arguments(key)
        mark = reader.mark()
        try:
            value = yield from _json_of(reader, 0)
        except Malformed:
            reader.add_arguments(reader.since(mark))
            yield from reader.arguments(reader.take_until(_CLOSING))
            raise
        reader.add_arguments(value)

    yield from _series(reader, ")", argument)
    if arguments == "{":
        reader.begin_call(name)
        reader.add_arguments("{")
    reader.add_arguments("}")
    reader.end_call()


def _series(reader: Reader, closing: str, item: Callable[[], Parsing[None]]) -> Parsing[None]:
    """Items with commas between them, and maybe one after the last, up to `closing`."""
    yield from reader.space()
    while not (yield from reader.literal(closing)):
        yield from item()
        yield from reader.space()
        if not (yield from reader.literal(",")):
            yield from reader.expect(closing)
            return
        yield from reader.space()


def _json_of(reader: Reader, depth: int) -> Parsing[str]:
    """The JSON text of a value."""
    parts: list[str] = []
    yield from _value(reader, depth, parts)
    return "".join(parts)


def _value(reader: Reader, depth: int, parts: list[str]) -> Parsing[None]:
    """Append the JSON text of a value to `parts`."""
    first = yield from reader.peek()
    if not first or depth > _MAX_DEPTH:
        raise Malformed
    if first in _STRING_CHARS:
        parts.append(_json_string((yield from _strings(reader))))
    elif first == "(":
        yield from _parentheses(reader, depth, parts)
    elif first == "[":
        yield from _list(reader, depth, parts)
    elif first == "{":
        yield from _dict(reader, depth, parts)
    elif first in "-+.0123456789":
        parts.append(_json_number((yield from reader.span(_NUMBER_CHARS))))
    else:
        constant = _CONSTANTS.get((yield from reader.span(_KEYWORD_CHARS)))
        if constant is None:
            raise Malformed
        parts.append(constant)


def _list(reader: Reader, depth: int, parts: list[str]) -> Parsing[None]:
    reader.take()
    comma = "["

    def item() -> Parsing[None]:
        nonlocal comma
        parts.append(comma)
        comma = ", "
        yield from _value(reader, depth + 1, parts)

    yield from _series(reader, "]", item)
    parts.append("[]" if comma == "[" else "]")


def _dict(reader: Reader, depth: int, parts: list[str]) -> Parsing[None]:
    reader.take()
    comma = "{"

    def item() -> Parsing[None]:
        nonlocal comma
        quote = yield from reader.peek()
        if quote not in _STRING_CHARS:
            raise Malformed
        key = _json_string((yield from _strings(reader)))
        yield from reader.expect(":")
        yield from reader.space()
        parts.append(f"{comma}{key}: ")
        comma = ", "
        yield from _value(reader, depth + 1, parts)

    yield from _series(reader, "}", item)
    parts.append("{}" if comma == "{" else "}")


def _parentheses(reader: Reader, depth: int, parts: list[str]) -> Parsing[None]:
    """A tuple, which becomes a list, or one value between parentheses."""
    reader.take()
    items: list[str] = []
    has_comma = False
    yield from reader.space()
    while not (yield from reader.literal(")")):
        items.append((yield from _json_of(reader, depth + 1)))
        yield from reader.space()
        if not (yield from reader.literal(",")):
            yield from reader.expect(")")
            break
        has_comma = True
        yield from reader.space()
    is_value = len(items) == 1 and not has_comma
    parts.append(items[0] if is_value else f"[{', '.join(items)}]")


def _strings(reader: Reader) -> Parsing[str]:
    """A string, or several of which Python makes one, and the white space after them."""
    texts: list[str] = []
    while (quote := (yield from reader.peek())) and quote in _STRING_CHARS:
        texts.append((yield from _string(reader, quote)))
        yield from reader.space()
    return "".join(texts)


def _string(reader: Reader, quote: str) -> Parsing[str]:
    """A string between single or triple quotes; line feeds may be in either."""
    reader.take()
    closing = quote * 3 if (yield from reader.literal(quote * 2)) else quote
    mark = reader.mark()
    while True:
        yield from reader.span(_STRING_CHARS[quote])
        char = yield from reader.peek()
        if char == quote:
            if (yield from reader.literal(closing)):
                body = reader.since(mark)[: -len(closing)]
                return _ESCAPE.sub(_unescaped, body)
            reader.take()
            continue
        yield from reader.expect("\\")
        if not (yield from reader.peek()):
            raise Malformed
        reader.take()


def _unescaped(match: re.Match[str]) -> str:
    """An escape as Python reads it; one that Python does not know stays as it is."""
    code = match.group(1) or match.group(2) or match.group(3)
    if code:
        return chr(int(code, 16))
    if match.group(4):
        return chr(int(match.group(4), 8))
    return _PLAIN_ESCAPES.get(match.group(5), match.group())


def _json_string(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Malformed from None
    return json.dumps(text, ensure_ascii=False)


def _json_number(text: str) -> str:
    if _NUMBER.fullmatch(text):
        return text
    for read in (int, float):
        try:
            return json.dumps(read(text), allow_nan=False)
        except (ValueError, OverflowError):
            continue
    raise Malformed
