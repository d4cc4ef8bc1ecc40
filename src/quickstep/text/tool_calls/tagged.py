"""Formats whose calls are tags with a value per parameter: Qwen3-Coder, Seed, GLM, MiniMax and
DeepSeek V3.2. `TagWords` has the texts in which they differ.

    <tool_call>                         opening
    <function=NAME>                     call, NAME, name_end
    <parameter=KEY>                     key, KEY, key_end
    VALUE
    </parameter>                        value_end
    </function>                         call_end
    </tool_call>                        closing

A value has no quotes and no escapes, so it may contain anything, tags too: it ends at a `value_end`
that more markup follows. Its type is that of the function's schema (`parameter_types`). Strings are
returned as they are written, other values once they are complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from quickstep.text.tool_calls.argument_rules import ParameterSpelling, pattern_of
from quickstep.text.tool_calls.call_grammar import CallSlot, CallSpelling
from quickstep.text.tool_calls.parameter_types import (
    STRING,
    beginning_of_value,
    json_of_value,
    parameter_schema,
    value_types,
)
from quickstep.text.tool_calls.python_literals import json_string
from quickstep.text.tool_calls.reader import Found, Malformed, Markers, Parsing, Reader

_BAR = "\uff5c"  # a vertical bar of full width
# runs of a tag's inside; one that a delta cuts is read piece by piece
_HEADER_CHARS = re.compile(r"[^<>\n]++")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_QUOTES = "\"'"


class TagWords(msgspec.Struct, frozen=True):
    """The texts of one format.

    Attributes:
        call, name_end, call_end: Around the name of the function, and after its parameters; ""
            where a block is one call and begins with the name.
        value: A tag of its own before a value.
        has_lines: A line feed at either end of a value is layout.
        says_strings: The tag of a parameter says whether its value is a string.
        may_lack_opening: Models leave out the opening now and then.
    """

    opening: str
    closing: str
    key: str
    key_end: str
    value_end: str
    call: str = ""
    name_end: str = ""
    call_end: str = ""
    value: str = ""
    has_lines: bool = False
    says_strings: bool = False
    may_lack_opening: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """The complete tags, which may be special tokens."""
        texts = (self.opening, self.closing, self.call_end, self.key, self.key_end)
        return tuple(tag for tag in (*texts, self.value, self.value_end) if _is_tag(tag))


def _is_tag(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


QWEN3_CODER = TagWords(
    opening="<tool_call>",
    closing="</tool_call>",
    call="<function=",
    name_end=">",
    call_end="</function>",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    has_lines=True,
    may_lack_opening=True,
)
SEED_OSS = replace(QWEN3_CODER, opening="<seed:tool_call>", closing="</seed:tool_call>")
GLM = TagWords(
    opening="<tool_call>",
    closing="</tool_call>",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
)
MINIMAX = TagWords(
    opening="<minimax:tool_call>",
    closing="</minimax:tool_call>",
    call="<invoke name=",
    name_end=">",
    call_end="</invoke>",
    key="<parameter name=",
    key_end=">",
    value_end="</parameter>",
)


def _dsml(block: str) -> TagWords:
    begin, end = f"<{_BAR}DSML{_BAR}", f"</{_BAR}DSML{_BAR}"
    return TagWords(
        opening=f"{begin}{block}>",
        closing=f"{end}{block}>",
        call=f"{begin}invoke name=",
        name_end=">",
        call_end=f"{end}invoke>",
        key=f"{begin}parameter name=",
        key_end=">",
        value_end=f"{end}parameter>",
        says_strings=True,
    )


DSML, DSML_V4 = _dsml("function_calls"), _dsml("tool_calls")


def tag_spelling(words: TagWords, line: str = "\n", per_call: bool = False) -> CallSpelling:
    """How a format spells calls: `line` is between tags, `per_call`: each call has its block."""
    quote = '"' if words.call.endswith("name=") else ""
    inner = "\n" if words.has_lines else ""
    before_value = _texts(line, words.value) if words.value else _texts(inner)

    def after_key(said: str) -> tuple[str, ...]:
        attribute = f' string="{said}"' if words.says_strings else ""
        return (*_texts(quote + attribute + words.key_end), *before_value)

    other_stop = ""
    if words.call_end:
        other_stop = rf"{pattern_of(words.call_end)}[ \t\r\n]*{pattern_of(words.closing)}"
    parameters = ParameterSpelling(
        before_key=_texts(words.key, quote),
        before_string=after_key("true"),
        before_json=after_key("false"),
        line_end=inner,
        stop=words.value_end,
        other_stop=other_stop,
        after_stop=_texts(line),
        says_strings=words.says_strings,
    )
    # a line ends with its call, so that what follows tells a further call from the end of the block
    call: tuple[str | CallSlot, ...] = (CallSlot.NAME, *_texts(line), CallSlot.PARAMETERS)
    begin = _texts(words.opening)
    if words.call:
        name_end = _texts(quote + words.name_end, line)
        call = (words.call + quote, CallSlot.NAME, *name_end, CallSlot.PARAMETERS)
        call = (*call, words.call_end, "\n")
        begin = (words.opening, "\n")
    end = _texts(words.closing)
    if per_call:
        begin, call, end = (), (*begin, *call, *end), ()
    return CallSpelling(
        begin=begin,
        call=call,
        separator=_texts("\n" if per_call else ""),
        end=end,
        openings=(words.opening,),
        other_openings=(words.call,) if words.may_lack_opening else (),
        parameters=parameters,
    )


def _texts(*texts: str) -> tuple[str, ...]:
    return tuple(text for text in texts if text)


def tagged(reader: Reader, words: TagWords) -> Parsing[None]:
    """Read a message in a format of tags."""
    openings = Markers(words.opening, *(_texts(words.call) if words.may_lack_opening else ()))
    with_closings = Markers(*openings.texts, *_texts(words.call_end, words.closing))
    found = Found.NO_CALL
    while True:
        # after calls that broke off, what closes them is still markup
        markers = with_closings if found is Found.BROKEN_CALLS else openings
        marker = yield from reader.content_until(markers)
        if marker is None:
            return
        if marker in openings.texts:
            calls = _calls(reader, words, has_begun=marker == words.call)
            found = yield from reader.attempt(calls, is_marked=True)
            continue
        reader.drop()
        if marker == words.closing:
            found = Found.NO_CALL


def _calls(reader: Reader, words: TagWords, has_begun: bool) -> Parsing[None]:
    """The calls of a block; `has_begun`: the tag of the first one has been read."""
    while True:
        yield from reader.space()
        if words.call and not has_begun:
            yield from reader.expect(words.call)
        yield from _call(reader, words)
        yield from reader.space()
        if (yield from reader.markup(words.closing)) or not (yield from reader.peek()):
            return
        has_begun = bool(words.call) and (yield from reader.markup(words.call))
        if not has_begun:
            raise Malformed


def _call(reader: Reader, words: TagWords) -> Parsing[None]:
    name = yield from _function_name(reader, words)
    reader.begin_call(name)
    schema = reader.parameters.get(name, {})
    ends = Markers(*_texts(words.call_end, words.closing))
    before = "{"
    is_ended = False
    while not is_ended:
        yield from reader.space()
        if (yield from reader.at_marker(ends)):
            if words.call_end:
                yield from reader.markup(words.call_end)
            break
        yield from reader.expect(words.key)
        header = yield from reader.span(_HEADER_CHARS)
        yield from reader.expect(words.key_end)
        if words.value:
            yield from reader.space()
            yield from reader.expect(words.value)
        key, says_string = _key_of(header)
        before += f"{json_string(key)}: "
        declared = parameter_schema(schema, key)
        is_string = value_types(declared, schema) == STRING if says_string is None else says_string
        if is_string:
            reader.add_arguments(f'{before}"')
            is_ended = yield from _value(reader, words, lambda text: _add_string(reader, text))
            reader.add_arguments('"')
        else:
            pieces: list[str] = []
            try:
                is_ended = yield from _value(reader, words, pieces.append)
            except Malformed:
                cut = beginning_of_value("".join(pieces), declared, schema)
                reader.add_arguments(f"{before}{cut}" if cut else "")
                raise
            value = json_of_value("".join(pieces), declared, schema)
            reader.add_arguments(f"{before}{value}")
        before = ", "
    reader.add_arguments("{}" if before == "{" else "}")
    reader.end_call()


def _function_name(reader: Reader, words: TagWords) -> Parsing[str]:
    """The name of the function, and what ends it. Raises Malformed."""
    header = yield from reader.span(_HEADER_CHARS)
    name, _ = _key_of(header)
    if not _NAME.fullmatch(name):
        raise Malformed
    if words.name_end:
        yield from reader.expect(words.name_end)
        return name
    has_line = yield from reader.literal("\n")
    yield from reader.space()
    if (yield from reader.at_marker(Markers(words.key, words.closing), least_cut=1)):
        return name
    if (yield from reader.peek()) or not has_line:
        raise Malformed
    return name


def _key_of(header: str) -> tuple[str, bool | None]:
    """The name in a tag, which models quote or not, and whether the value is a string, where
    DeepSeek's attribute says it: `"NAME" string="true"`. Without an expression: a model may repeat
    spaces up to its limit.
    """
    name, is_string = header.strip(), None
    before, _, value = name.rpartition("=")
    flag, before = value.strip().strip(_QUOTES), before.rstrip()
    start = before.removesuffix("string")
    if flag in ("true", "false") and start != before and start[-1:].isspace():
        name, is_string = start.rstrip(), flag == "true"
    if len(name) > 1 and name[0] == name[-1] and name[0] in _QUOTES:
        name = name[1:-1]
    return name, is_string


def _value(reader: Reader, words: TagWords, add: Callable[[str], None]) -> Parsing[bool]:
    """Read a value, of which `add` gets the text, and its end. Returns whether the end of the call
    has been read as well: it is one without the end of the value if the block ends after it.

    Raises:
        Malformed: The end of the text cut it.
    """
    sink = _Value(add, words.has_lines)
    ends = Markers(*_texts(words.value_end, words.call_end))
    after_value = Markers(*_texts(words.key, words.call_end, words.closing))
    after_call = Markers(words.closing)
    while True:
        mark = reader.mark()
        found = yield from reader.text_until(sink, ends, may_be_cut=True)
        if found is None:
            raise Malformed
        yield from reader.space()
        following = after_value if found == words.value_end else after_call
        if not (yield from reader.peek()) or (yield from reader.at_marker(following, 1)):
            return found != words.value_end
        sink.add(reader.since(mark))
        reader.drop()


class _Value:
    """The text of a value without the line feed at either end, if that is layout."""

    def __init__(self, add: Callable[[str], None], has_lines: bool) -> None:
        self._add = add
        self._has_lines = has_lines
        self._is_first = has_lines
        self._held = ""

    def add(self, text: str) -> None:
        """Append text."""
        if self._is_first and text:
            text = text.removeprefix("\n")
            self._is_first = False
        if not text:
            return
        text = self._held + text
        body = text.removesuffix("\n") if self._has_lines else text
        self._held = text[len(body) :]
        if body:
            self._add(body)


def _add_string(reader: Reader, text: str) -> None:
    reader.add_arguments(json_string(text)[1:-1])
