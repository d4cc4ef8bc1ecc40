"""Python's literals as JSON, read from a text that arrives in pieces. Nothing is evaluated: they
are parsed here, character by character. Used by `pythonic`, and by `parameter_types` for values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quickstep.text.tool_calls.reader import Malformed, Parsing, Reader

_MAX_DEPTH = 64
KEYWORD_CHARS = re.compile(r"\w++")
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
_HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_PLAIN_ESCAPES = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n",
    "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip


def series(reader: Reader, closing: str, item: Callable[[], Parsing[None]]) -> Parsing[None]:
    """Items with commas between them, and maybe one after the last, up to `closing`."""
    yield from reader.space()
    while not (yield from reader.literal(closing)):
        yield from item()
        yield from reader.space()
        if not (yield from reader.literal(",")):
            yield from reader.expect(closing)
            return
        yield from reader.space()


def json_of_literal(text: str) -> str | None:
    """The JSON text of a complete literal; None if `text` is none."""
    reader = Reader(str)
    reader.push(text)
    reader.end()
    parsing = json_of(reader, 0)
    try:
        next(parsing)
    except StopIteration as end:
        return str(end.value) if reader.is_at_end else None
    except Malformed:
        pass
    return None


def json_of(reader: Reader, depth: int) -> Parsing[str]:
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
        parts.append(json_string((yield from _strings(reader))))
    elif first == "(":
        yield from _parentheses(reader, depth, parts)
    elif first == "[":
        yield from _list(reader, depth, parts)
    elif first == "{":
        yield from _dict(reader, depth, parts)
    elif first in "-+.0123456789":
        parts.append(_json_number((yield from reader.span(_NUMBER_CHARS))))
    else:
        constant = _CONSTANTS.get((yield from reader.span(KEYWORD_CHARS)))
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

    yield from series(reader, "]", item)
    parts.append("[]" if comma == "[" else "]")


def _dict(reader: Reader, depth: int, parts: list[str]) -> Parsing[None]:
    reader.take()
    comma = "{"

    def item() -> Parsing[None]:
        nonlocal comma
        quote = yield from reader.peek()
        if quote not in _STRING_CHARS:
            raise Malformed
        key = json_string((yield from _strings(reader)))
        yield from reader.expect(":")
        yield from reader.space()
        parts.append(f"{comma}{key}: ")
        comma = ", "
        yield from _value(reader, depth + 1, parts)

    yield from series(reader, "}", item)
    parts.append("{}" if comma == "{" else "}")


def _parentheses(reader: Reader, depth: int, parts: list[str]) -> Parsing[None]:
    """A tuple, which becomes a list, or one value between parentheses."""
    reader.take()
    items: list[str] = []
    has_comma = False
    yield from reader.space()
    while not (yield from reader.literal(")")):
        items.append((yield from json_of(reader, depth + 1)))
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
                return _HALVES.sub(_character, _ESCAPE.sub(_unescaped, body))
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


def _character(match: re.Match[str]) -> str:
    """The character of two escapes, each of half of it, as JSON writes it and many models do."""
    return match.group().encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def json_string(text: str) -> str:
    """The JSON text of a string. Raises Malformed for one that is no Unicode text."""
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
