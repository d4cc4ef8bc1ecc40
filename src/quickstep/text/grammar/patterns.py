r"""Regular expressions of JSON schemas, which are ECMA-262's, in the syntax of Rust that llguidance
reads; what Rust's or llguidance lacks is written out: look-ahead, word boundaries, and the texts
that a pattern does not match.

A pattern becomes a language: sets of characters, joined, chosen, repeated, intersected, negated.
Its derivatives (Brzozowski 1964) are the states of an automaton, whose states are eliminated one by
one until a regular expression is left. A text is framed by two marks, which `^` and `$` read:

    (?!x)y    not(x ANY*) and y

A word boundary is written out in the pattern itself, which may count far:

    x\by      x that ends in a letter, y that does not begin with one, or the other way round

Engines differ in what `\w`, `\d`, `\s`, `.` and `$` match beyond ASCII and at line ends. What
is written out here matches no text on which they differ, so the output is valid for all of them.

Called by `json_schema` and `schema_logic`. Work and size are bounded; beyond that the result is
None, and llguidance refuses the pattern by its name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

_LAST = 0x10FFFF
_BEGIN, _END = _LAST + 1, _LAST + 2  # the marks around a text
_MAX_NODES = 20_000
_MAX_STATES = 400
_MAX_LENGTH = 16 * 1024
_WORK_PER_STEP = 8
_MAX_UNROLLED = 64  # of a bounded repetition

Ranges = tuple[tuple[int, int], ...]  # sorted, without overlaps, both ends included
# How characters are matched on which engines differ: by none, by all, or as ECMA-262 says.
Mode = Literal["fewest", "most", "exact"]
_OPPOSITE: dict[Mode, Mode] = {"fewest": "most", "most": "fewest", "exact": "exact"}

_LOOKS = re.compile(r"\(\?<?[=!]")
_QUANTIFIER = re.compile(r"\{(\d+)(,?)(\d*)\}")
_BOUNDARY = re.compile(r"(?:^|[^\\])(?:\\\\)*\\[bB]")
_MAX_BOUNDARIES = 6
_RUST_ESCAPE = re.compile(r"\\[xupP]\{\w+\}")
_SET_OPERATIONS = ("&&", "--", "~~")


class _Unknown(Exception):
    """Syntax that is not read here, or a bound that is reached."""


class PatternWriter:
    """Writes out the patterns of one schema. `count` gets the work of each one, in steps of about
    30 microseconds, and may raise when it is too much.
    """

    def __init__(self, count: Callable[[int], None] = lambda steps: None) -> None:
        self._count = count
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...], Mode], str | None] = {}

    def rewritten(self, pattern: str) -> tuple[str, ...]:
        """Patterns in Rust's syntax that a text has to match all, so that it matches `pattern`; ()
        if no text does. llguidance reads anchors at the ends of a pattern only.
        """
        if _BOUNDARY.search(pattern):
            return (self._without_boundaries(pattern) or pattern,)
        if not _LOOKS.search(pattern):
            inner = self.common([pattern], []) if _has_inner_anchor(pattern) else None
            return (in_rust(pattern),) if inner is None else (inner,) if inner else ()
        refusals, rest = _leading_refusals(pattern)
        if refusals and not _LOOKS.search(rest):
            found = [self.other(refused) for refused in refusals]
            written = tuple(other for other in found if other)
            return (*written, in_rust(rest)) if len(written) == len(found) else (pattern,)
        return (self.common([pattern], [], "fewest") or pattern,)

    def _without_boundaries(self, pattern: str) -> str | None:
        """None where a boundary cannot be written out."""
        try:
            syntax = _Parser(pattern).parsed()
            ways = syntax.ways if isinstance(syntax, _Choice) else (syntax,)
            found = [text for way in ways for text in _texts_at_boundaries(way)]
        except (_Unknown, RecursionError):
            return None
        self._count(sum(map(len, found)) // _WORK_PER_STEP)
        if not found or sum(map(len, found)) > _MAX_LENGTH:
            return None
        return f"^(?:{'|'.join(found)})$"

    def other(self, pattern: str) -> str | None:
        """A pattern of the texts that `pattern` does not match; None if it cannot be written out,
        and "" if it matches all.
        """
        return self.common([], [pattern], "fewest")

    def common(
        self, matched: Sequence[str], refused: Sequence[str], mode: Mode = "exact"
    ) -> str | None:
        """A pattern of the texts that all of `matched` match and none of `refused`; None if it
        cannot be written out, and "" if there is no such text.
        """
        key = (*matched,), (*refused,), mode
        if key not in self._known:
            languages = _Languages()
            try:
                self._known[key] = _Automaton(languages, matched, refused, mode).pattern()
            except _Unknown:
                self._known[key] = None
            self._count(languages.work // _WORK_PER_STEP)
        return self._known[key]


def in_rust(pattern: str) -> str:
    """ECMA-262's pattern with what Rust would read in another way escaped: braces that repeat
    nothing, brackets and doubled signs in a class; and without anchors that say nothing new.
    """
    pattern = re.sub(r"^\^+((?:\((?:\?:)?)*)\^", r"^\1", pattern)
    found: list[str] = []
    place, in_class = 0, False
    while place < len(pattern):
        character = pattern[place]
        piece = character
        if character == "\\" and place + 1 < len(pattern):
            escaped = _RUST_ESCAPE.match(pattern, place)
            piece = pattern[place : place + 2] if escaped is None else escaped[0]
            place += len(piece) - 1
        elif in_class:
            if character == "]":
                in_class = False
            elif character == "[" or pattern[place : place + 2] in _SET_OPERATIONS:
                piece = "\\" + character
        elif character == "[":
            in_class = True
            follows = pattern[place + 1 : place + 3]
            if follows == "^]":
                piece, place, in_class = "[\\s\\S]", place + 2, False
        elif character == "{":
            quantifier = _QUANTIFIER.match(pattern, place)
            if quantifier is None:
                piece = "\\{"
            else:
                piece = quantifier[0]
                place += len(piece) - 1
        elif character == "}":
            piece = "\\}"
        found.append(piece)
        place += 1
    return "".join(found)


def _leading_refusals(pattern: str) -> tuple[list[str], str]:
    """What the negative look-aheads at a pattern's start refuse, and the rest of the pattern."""
    refused: list[str] = []
    rest = pattern
    while rest.startswith("^(?!"):
        end = _closing_bracket(rest, 1)
        if end is None:
            break
        refused.append(f"^(?:{rest[4:end]})")
        rest = "^" + rest[end + 1 :]
        if rest[1:2] in ("*", "+", "?", "{"):
            return [], pattern
    # a choice at the top would have the look-ahead in its first way only
    has_choice = _depth_zero_choice(rest)
    return ([], pattern) if has_choice else (refused, rest)


def _has_inner_anchor(pattern: str) -> bool:
    body = pattern.removeprefix("^").removesuffix("$")
    return any(character in "^$" for _, _, character in _structure(body, 0))


def _closing_bracket(pattern: str, start: int) -> int | None:
    for place, depth, character in _structure(pattern, start):
        if character == ")" and depth == 0:
            return place
    return None


def _depth_zero_choice(pattern: str) -> bool:
    return any(character == "|" and not depth for _, depth, character in _structure(pattern, 0))


def _structure(pattern: str, start: int) -> Iterator[tuple[int, int, str]]:
    """The brackets, choices and anchors of a pattern: place, depth after it, character."""
    depth, in_class, place = 0, False, start
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            place += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()|^$":
            depth += {"(": 1, ")": -1}.get(character, 0)
            yield place, depth, character
        place += 1


# -- sets of characters ---------------------------------------------------------------------------


def _union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def _others(ranges: Ranges, last: int = _LAST) -> Ranges:
    """The characters that are not in `ranges`."""
    found, low = [], 0
    for first, final in ranges:
        if first > low:
            found.append((low, first - 1))
        low = final + 1
    if low <= last:
        found.append((low, last))
    return tuple(found)


def _of_text(text: str) -> Ranges:
    return _union((ord(character), ord(character)) for character in text)


_CHARACTERS: Ranges = ((0, _LAST),)
_ASCII_OTHERS: Ranges = ((0x80, _LAST),)
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = _union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_ECMA_SPACE: Ranges = _union(
    [*_SPACE, *_of_text("\u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), (0x2000, 0x200A)]
)
_LINE_ENDS = _of_text("\n\r\u2028\u2029")
_SHORTHANDS: dict[str, tuple[Ranges, Ranges]] = {  # in ASCII, by ECMA-262
    "d": (_DIGITS, _DIGITS),
    "w": (_WORD, _WORD),
    "s": (_SPACE, _ECMA_SPACE),
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


def _shorthand(name: str, mode: Mode) -> Ranges:
    """`d`, `w`, `s`, and their opposites `D`, `W`, `S`."""
    in_ascii, exact = _SHORTHANDS[name.lower()]
    if name.isupper():
        in_ascii = tuple(part for part in _others(in_ascii, 0x7F))
        exact = _others(exact)
    if mode == "exact":
        return exact
    return in_ascii if mode == "fewest" else _union([*in_ascii, *_ASCII_OTHERS])


# -- syntax ---------------------------------------------------------------------------------------


class _Chars(msgspec.Struct, frozen=True):
    """One character: of these ranges and shorthands, or another one."""

    ranges: Ranges
    shorthands: str = ""
    is_negated: bool = False

    def of(self, mode: Mode) -> Ranges:
        """The characters."""
        inner = _OPPOSITE[mode] if self.is_negated else mode
        parts = [part for name in self.shorthands for part in _shorthand(name, inner)]
        found = _union([*self.ranges, *parts])
        return _others(found) if self.is_negated else found


class _Dot(msgspec.Struct, frozen=True):
    """Any character but a line end."""

    def of(self, mode: Mode) -> Ranges:
        """The characters."""
        return _CHARACTERS if mode == "most" else _others(_LINE_ENDS)


class _Anchor(msgspec.Struct, frozen=True):
    """`^` or `$`."""

    is_end: bool


class _Boundary(msgspec.Struct, frozen=True):
    """`\\b`, or `\\B`, which is none."""

    is_negated: bool


class _Join(msgspec.Struct, frozen=True):
    """One after the other."""

    parts: tuple[_Syntax, ...]


class _Choice(msgspec.Struct, frozen=True):
    """One of several ways."""

    ways: tuple[_Syntax, ...]


class _Repeat(msgspec.Struct, frozen=True):
    """From `low` to `high` times; None for any number."""

    part: _Syntax
    low: int
    high: int | None


class _Look(msgspec.Struct, frozen=True):
    """A look-ahead."""

    part: _Syntax
    is_negated: bool


_Syntax = _Chars | _Dot | _Anchor | _Boundary | _Join | _Choice | _Repeat | _Look


class _Parser:
    """Reads one pattern; raises _Unknown for what is not read here (references, ...)."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0

    def parsed(self) -> _Syntax:
        """The complete pattern."""
        found = self._choice()
        if self._place < len(self._pattern):
            raise _Unknown
        return found

    def _peek(self, num: int = 1) -> str:
        return self._pattern[self._place : self._place + num]

    def _take(self, num: int = 1) -> str:
        taken = self._peek(num)
        if len(taken) < num:
            raise _Unknown
        self._place += num
        return taken

    def _choice(self) -> _Syntax:
        ways = [self._join()]
        while self._peek() == "|":
            self._take()
            ways.append(self._join())
        return ways[0] if len(ways) == 1 else _Choice(tuple(ways))

    def _join(self) -> _Syntax:
        parts: list[_Syntax] = []
        while self._peek() not in ("", "|", ")"):
            part = self._quantified(self._atom())
            if not (isinstance(part, _Anchor) and parts and parts[-1] == part):
                parts.append(part)
        return _Join(tuple(parts))

    def _quantified(self, part: _Syntax) -> _Syntax:
        low: int
        high: int | None
        match self._peek():
            case "*":
                low, high = 0, None
            case "+":
                low, high = 1, None
            case "?":
                low, high = 0, 1
            case "{":
                quantifier = _QUANTIFIER.match(self._pattern, self._place)
                if quantifier is None:
                    return part
                self._place += len(quantifier[0]) - 1
                low = int(quantifier[1])
                high = int(quantifier[3]) if quantifier[3] else None if quantifier[2] else low
                if (low if high is None else high) < low:
                    raise _Unknown
            case _:
                return part
        if isinstance(part, _Anchor | _Look | _Boundary):
            raise _Unknown
        self._take()
        if self._peek() == "?":  # a lazy one matches the same texts
            self._take()
        return _Repeat(part, low, high)

    def _atom(self) -> _Syntax:
        match self._take():
            case "^":
                return _Anchor(False)
            case "$":
                return _Anchor(True)
            case ".":
                return _Dot()
            case "(":
                return self._group()
            case "[":
                return self._class()
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise _Unknown
            case character:
                return _Chars(_of_text(character))

    def _group(self) -> _Syntax:
        look: bool | None = None
        if self._peek() == "?":
            match self._take(2):
                case "?:":
                    pass
                case "?!":
                    look = True
                case "?=":
                    look = False
                case _:
                    raise _Unknown
        inner = self._choice()
        if self._take() != ")":
            raise _Unknown
        return inner if look is None else _Look(inner, look)

    def _escape(self) -> _Chars | _Boundary:
        character = self._take()
        if character in "bB":
            return _Boundary(character == "B")
        if character in "dwsDWS":
            return _Chars((), character)
        return _Chars(_of_text(self._escaped(character)))

    def _escaped(self, character: str) -> str:
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "x" and self._peek() == "{":  # Rust's
            digits = self._pattern[self._place + 1 :].partition("}")[0]
            self._take(len(digits) + 2)
            if not re.fullmatch("[0-9A-Fa-f]{1,6}", digits) or int(digits, 16) > _LAST:
                raise _Unknown
            return chr(int(digits, 16))
        if character in "xu":
            digits = self._take(2 if character == "x" else 4)
            if not re.fullmatch("[0-9A-Fa-f]+", digits) or digits.upper().startswith(("D8", "DC")):
                raise _Unknown
            return chr(int(digits, 16))
        if character.isalnum():  # a reference, a boundary, a property of Unicode, ...
            raise _Unknown
        return character

    def _class(self) -> _Chars:
        is_negated = self._peek() == "^"
        if is_negated:
            self._take()
        ranges: list[tuple[int, int]] = []
        shorthands = ""
        while self._peek() != "]":
            first = self._class_character()
            if len(first) == 2:
                shorthands += first[1]
                continue
            last = first
            if self._peek() == "-" and self._peek(2)[1:] not in ("]", ""):
                self._take()
                last = self._class_character()
                if len(last) == 2:  # no range: the characters by themselves
                    shorthands += last[1]
                    ranges += [(ord("-"), ord("-"))]
                    last = first
            if last < first:
                raise _Unknown
            ranges.append((ord(first), ord(last)))
        self._take()
        return _Chars(_union(ranges), shorthands, is_negated)

    def _class_character(self) -> str:
        """A character of a class; a shorthand keeps its backslash."""
        character = self._take()
        if character != "\\":
            return character
        character = self._take()
        if character in "dwsDWS":
            return "\\" + character
        return "\b" if character == "b" else self._escaped(character)


def _has_look(syntax: _Syntax) -> bool:
    match syntax:
        case _Look():
            return True
        case _Join(parts) | _Choice(parts):
            return any(map(_has_look, parts))
        case _Repeat(part):
            return _has_look(part)
    return False


def _with_single_anchors(syntax: _Syntax) -> _Syntax:
    """The pattern without anchors that follow the same anchor and say nothing new: a mark of the
    framed text is read once. Raises _Unknown where a way through the pattern has more than one.
    """
    for is_end in (False, True):
        syntax = _without_repeated_anchors(syntax, is_end, is_there=False)
        if _num_anchors(syntax, is_end) > 1:
            raise _Unknown
    return syntax


def _without_repeated_anchors(syntax: _Syntax, is_end: bool, is_there: bool) -> _Syntax:
    """`is_there`: the same anchor is next to this part, before it for `^` and after it for `$`."""
    match syntax:
        case _Choice(ways):
            plain = [_without_repeated_anchors(way, is_end, is_there) for way in ways]
            return _Choice(tuple(plain))
        case _Repeat(part, low, 1):
            return _Repeat(_without_repeated_anchors(part, is_end, is_there), low, 1)
        case _Repeat(part, low, high) if low > 0 and is_there and _num_anchors(part, is_end):
            first = _without_repeated_anchors(part, is_end, is_there)
            rest = _Repeat(part, low - 1, None if high is None else high - 1)
            return _Join((rest, first) if is_end else (first, rest))
        case _Look(part, is_negated):
            inside = is_there and not is_end
            return _Look(_without_repeated_anchors(part, is_end, inside), is_negated)
        case _Join(parts):
            found: list[_Syntax] = []
            for part in reversed(parts) if is_end else parts:
                if part == _Anchor(is_end):
                    if not is_there:
                        found.append(part)
                    is_there = True
                    continue
                found.append(_without_repeated_anchors(part, is_end, is_there))
                is_there = is_there and isinstance(part, _Look | _Anchor)
            return _Join(tuple(reversed(found) if is_end else found))
    return syntax


def _num_anchors(syntax: _Syntax, is_end: bool) -> int:
    """How many of these anchors a way through the pattern may have at one place: those after a
    character match nothing, as they should.
    """
    match syntax:
        case _Anchor():
            return int(syntax.is_end is is_end)
        case _Choice(ways):
            return max(_num_anchors(way, is_end) for way in ways)
        case _Join(parts):
            num_anchors = 0
            for part in reversed(parts) if is_end else parts:
                num_anchors += _num_anchors(part, is_end)
                if _has_character(part):
                    break
            return num_anchors
        case _Repeat(part, _, high):
            is_once = high == 1 or _has_character(part)
            return _num_anchors(part, is_end) * (1 if is_once else 2)
        case _Look(part):
            inside = _num_anchors(part, is_end)
            return inside if not is_end or inside > 1 else 0
    return 0


def _has_character(syntax: _Syntax) -> bool:
    """Whether every way through the pattern has a character."""
    match syntax:
        case _Chars() | _Dot():
            return True
        case _Choice(ways):
            return all(map(_has_character, ways))
        case _Join(parts):
            return any(map(_has_character, parts))
        case _Repeat(part, low):
            return low > 0 and _has_character(part)
    return False


# -- word boundaries ------------------------------------------------------------------------------

# Beyond ASCII engines differ in what a letter of a word is, so no boundary is there.
_NO_WORD: Ranges = _others(_WORD, 0x7F)
_ANYTHING = _Repeat(_Chars(_CHARACTERS), 0, None)


def _texts_at_boundaries(syntax: _Syntax) -> Iterator[str]:
    """A way through a pattern without its boundaries, of complete texts. Raises _Unknown."""
    parts = [*syntax.parts] if isinstance(syntax, _Join) else [syntax]
    parts = parts[1:] if parts[:1] == [_Anchor(False)] else [_ANYTHING, *parts]
    parts = parts[:-1] if parts[-1:] == [_Anchor(True)] else [*parts, _ANYTHING]
    places = [place for place, part in enumerate(parts) if isinstance(part, _Boundary)]
    if len(places) > _MAX_BOUNDARIES:
        raise _Unknown
    starts, ends = [0, *(place + 1 for place in places)], [*places, len(parts)]
    pieces = [_Join(tuple(parts[a:b])) for a, b in zip(starts, ends, strict=True)]
    if any(map(_is_optional, pieces[1:-1])):
        raise _Unknown
    sides = []
    for place in places:
        first, second = _WORD, _NO_WORD
        if parts[place] == _Boundary(True):
            sides.append(((first, first), (second, second)))
        else:
            sides.append(((first, second), (second, first)))
    for chosen in itertools.product(*sides):
        found = []
        for number, piece in enumerate(pieces):
            bounded: _Syntax | None = piece
            is_outside = number in (0, len(pieces) - 1) and _is_optional(piece)
            if number > 0:
                after = chosen[number - 1][1]
                bounded = _beginning_in(piece, after)
                is_outside &= number < len(pieces) - 1 or after == _NO_WORD
            if number < len(chosen) and bounded is not None:
                before = chosen[number][0]
                bounded = _reversed(_beginning_in(_reversed(bounded), before))
                is_outside &= number > 0 or before == _NO_WORD
            if bounded is None and not is_outside:
                break
            text = "" if bounded is None else _written(bounded).in_brackets()
            found.append(f"(?:{text})?" if is_outside and text else text)
        else:
            yield "".join(found)


def _beginning_in(syntax: _Syntax, ranges: Ranges) -> _Syntax | None:
    """The texts of a piece that begin with one of these characters; None if there are none."""
    match syntax:
        case _Chars() | _Dot():
            others = _union([*_others(syntax.of("exact")), *_others(ranges)])
            return None if others == _CHARACTERS else _Chars(_others(others))
        case _Choice(ways):
            return _choice_of([_beginning_in(way, ranges) for way in ways])
        case _Join(parts):
            found = []
            for place, part in enumerate(parts):
                first = _beginning_in(part, ranges)
                rest = parts[place + 1 :]
                found.append(None if first is None else _Join((first, *rest)))
                if not _is_optional(part):
                    break
            return _choice_of(found)
        case _Repeat(part, low, high):
            first = None if high == 0 else _beginning_in(part, ranges)
            more = _Repeat(part, max(low - 1, 0), None if high is None else high - 1)
            return None if first is None else _Join((first, more))
    raise _Unknown


def _choice_of(ways: Iterable[_Syntax | None]) -> _Syntax | None:
    found = [way for way in ways if way is not None]
    return found[0] if len(found) == 1 else _Choice(tuple(found)) if found else None


def _reversed(syntax: _Syntax | None) -> Any:
    """The same texts backwards."""
    match syntax:
        case _Choice(ways):
            return _Choice(tuple(map(_reversed, ways)))
        case _Join(parts):
            return _Join(tuple(map(_reversed, reversed(parts))))
        case _Repeat(part, low, high):
            return _Repeat(_reversed(part), low, high)
    return syntax


def _is_optional(syntax: _Syntax) -> bool:
    """Whether the empty text is one of its texts."""
    match syntax:
        case _Choice(ways):
            return any(map(_is_optional, ways))
        case _Join(parts):
            return all(map(_is_optional, parts))
        case _Repeat(part, low):
            return low == 0 or _is_optional(part)
    return False


def _written(syntax: _Syntax) -> _Text:
    """A piece in Rust's syntax. Raises _Unknown for anchors, boundaries and look-aheads."""
    match syntax:
        case _Chars() | _Dot():
            return _Text.of_characters(syntax.of("exact"))
        case _Choice(ways):
            return _Text("|".join(_written(way).text for way in ways), is_choice=True)
        case _Join(parts):
            return _Text("".join(_written(part).in_brackets() for part in parts))
        case _Repeat(part, low, high):
            count = f"{{{low},{'' if high is None else high}}}"
            count = {"{0,}": "*", "{1,}": "+", "{0,1}": "?"}.get(count, count)
            return _Text(f"(?:{_written(part).text}){count}")
    raise _Unknown


# -- languages ------------------------------------------------------------------------------------


class _Languages:
    """Languages as numbers: equal ones that are made in the same way have the same number."""

    def __init__(self) -> None:
        self._nodes: list[tuple[object, ...]] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._has_empty: dict[int, bool] = {}
        self._derivatives: dict[tuple[int, int], int] = {}
        self._meanings: dict[int, int] = {}  # of the repetitions that look ahead
        self.nothing = self._node("chars", ())
        self.empty = self._node("empty")
        self.all = self.star(self.chars((*_CHARACTERS[:0], (0, _END))))

    @property
    def work(self) -> int:
        """How much was computed."""
        return len(self._nodes) + len(self._derivatives)

    def _node(self, *parts: object) -> int:
        known = self._numbers.get(parts)
        if known is not None:
            return known
        if len(self._nodes) >= _MAX_NODES:
            raise _Unknown
        self._nodes.append(parts)
        self._numbers[parts] = len(self._nodes) - 1
        return len(self._nodes) - 1

    def bounds(self) -> list[int]:
        """First characters of ranges on whose characters no language differs."""
        found = {0}
        for kind, *rest in self._nodes:
            if kind == "chars":
                ranges: Ranges = rest[0]  # type: ignore[assignment]
                for low, high in ranges:
                    found |= {low, high + 1}
        return sorted(bound for bound in found if bound <= _LAST)

    def chars(self, ranges: Ranges) -> int:
        """One of these characters."""
        return self._node("chars", ranges)

    def join(self, first: int, then: int) -> int:
        """One after the other."""
        if self.nothing in (first, then):
            return self.nothing
        if first == self.empty:
            return then
        if then == self.empty:
            return first
        kind, *rest = self._nodes[first]
        if kind == "join":
            start, end = rest
            return self.join(start, self.join(end, then))  # type: ignore[arg-type]
        if first == self.all and then == self.all:
            return self.all
        return self._node("join", first, then)

    def any_of(self, languages: Iterable[int]) -> int:
        """In at least one of them."""
        parts = self._flat("any", languages) - {self.nothing}
        if self.all in parts:
            return self.all
        if len(parts) < 2:
            return next(iter(parts), self.nothing)
        return self._node("any", *sorted(parts))

    def all_of(self, languages: Iterable[int]) -> int:
        """In each of them."""
        parts = self._flat("both", languages) - {self.all}
        if self.nothing in parts:
            return self.nothing
        if len(parts) < 2:
            return next(iter(parts), self.all)
        return self._node("both", *sorted(parts))

    def _flat(self, kind: str, languages: Iterable[int]) -> set[int]:
        found: set[int] = set()
        for language in languages:
            parts = self._nodes[language]
            found |= set(parts[1:]) if parts[0] == kind else {language}  # type: ignore[arg-type]
        return found

    def other(self, language: int) -> int:
        """All texts that are not in it."""
        if language == self.nothing:
            return self.all
        if language == self.all:
            return self.nothing
        kind, *rest = self._nodes[language]
        return rest[0] if kind == "not" else self._node("not", language)  # type: ignore[return-value]

    def star(self, language: int) -> int:
        """Any number of times."""
        if language in (self.nothing, self.empty):
            return self.empty
        return language if self._nodes[language][0] == "star" else self._node("star", language)

    def later(self) -> int:
        """A language whose meaning follows with `mean`; it may be part of it after a character."""
        return self._node("later", len(self._nodes))

    def mean(self, later: int, language: int) -> None:
        """Say what a later language is."""
        self._meanings[later] = language

    def has_empty(self, language: int) -> bool:
        """Whether the empty text is in it."""
        known = self._has_empty.get(language)
        if known is None:
            known = self._has_empty[language] = self._find_empty(language)
        return known

    def _find_empty(self, language: int) -> bool:
        kind, *rest = self._nodes[language]
        parts: list[int] = rest  # type: ignore[assignment]
        match kind:
            case "chars":
                return False
            case "empty" | "star":
                return True
            case "not":
                return not self.has_empty(parts[0])
            case "any":
                return any(map(self.has_empty, parts))
            case "later":
                return self.has_empty(self._meanings[language])
        return all(map(self.has_empty, parts))  # of a join, too

    def derivative(self, language: int, character: int) -> int:
        """What may follow `character`."""
        key = language, character
        known = self._derivatives.get(key)
        if known is None:
            known = self._derivatives[key] = self._find_derivative(language, character)
        return known

    def _find_derivative(self, language: int, character: int) -> int:
        kind, *rest = self._nodes[language]
        parts: list[int] = rest  # type: ignore[assignment]
        match kind:
            case "chars":
                ranges: Ranges = rest[0]  # type: ignore[assignment]
                is_in = any(low <= character <= high for low, high in ranges)
                return self.empty if is_in else self.nothing
            case "empty":
                return self.nothing
            case "star":
                return self.join(self.derivative(parts[0], character), language)
            case "not":
                return self.other(self.derivative(parts[0], character))
            case "any":
                return self.any_of([self.derivative(part, character) for part in parts])
            case "both":
                return self.all_of([self.derivative(part, character) for part in parts])
            case "later":
                return self.derivative(self._meanings[language], character)
        first, then = parts
        found = self.join(self.derivative(first, character), then)
        if not self.has_empty(first):
            return found
        return self.any_of([found, self.derivative(then, character)])

    def of_syntax(self, syntax: _Syntax, then: int, mode: Mode) -> int:
        """A piece of a pattern, followed by `then`."""
        match syntax:
            case _Chars() | _Dot():
                return self.join(self.chars(syntax.of(mode)), then)
            case _Anchor(is_end):
                if not is_end:
                    return self.join(self.chars(((_BEGIN, _BEGIN),)), then)
                then = self.join(self.chars(((_END, _END),)), then)
                line_end = self.join(self.chars(_of_text("\n")), then)
                return self.any_of([then, line_end]) if mode == "most" else then
            case _Join(parts):
                for part in reversed(parts):
                    then = self.of_syntax(part, then, mode)
                return then
            case _Choice(ways):
                return self.any_of([self.of_syntax(way, then, mode) for way in ways])
            case _Look(part, is_negated):
                inner = self.of_syntax(part, self.all, _OPPOSITE[mode] if is_negated else mode)
                return self.all_of([self.other(inner) if is_negated else inner, then])
            case _Repeat():
                return self._of_repeat(syntax, then, mode)
            case _Boundary():
                raise _Unknown

    def _of_repeat(self, repeat: _Repeat, then: int, mode: Mode) -> int:
        part, low, high = repeat.part, repeat.low, repeat.high
        if max(low, high or 0) > _MAX_UNROLLED:
            raise _Unknown
        if not _has_look(part):
            once = self.of_syntax(part, self.empty, mode)
            if high is None:
                then = self.join(self.star(once), then)
            for _ in range((high or low) - low):
                then = self.any_of([self.join(once, then), then])
            for _ in range(low):
                then = self.join(once, then)
            return then
        if high is None:
            if self.has_empty(self.of_syntax(part, self.empty, "most")):
                raise _Unknown
            again = self.later()
            self.mean(again, self.any_of([then, self.of_syntax(part, again, mode)]))
            then = again
        for _ in range((high or low) - low):
            then = self.any_of([self.of_syntax(part, then, mode), then])
        for _ in range(low):
            then = self.of_syntax(part, then, mode)
        return then


class _Automaton:
    """The automaton of the texts that match some patterns and do not match others."""

    def __init__(
        self, languages: _Languages, matched: Sequence[str], refused: Sequence[str], mode: Mode
    ) -> None:
        self._languages = languages
        framed = [(_BEGIN, _BEGIN), (0, _LAST), (_END, _END)]
        begin, character, end = (languages.chars((bounds,)) for bounds in framed)
        parts = [languages.join(begin, languages.join(languages.star(character), end))]
        for pattern in matched:
            parts.append(self._found(pattern, mode))
        for pattern in refused:
            parts.append(languages.other(self._found(pattern, _OPPOSITE[mode])))
        self._start = languages.derivative(languages.all_of(parts), _BEGIN)

    def _found(self, pattern: str, mode: Mode) -> int:
        """A framed text with a match in it."""
        languages = self._languages
        try:
            syntax = _with_single_anchors(_Parser(pattern).parsed())
            return languages.join(languages.all, languages.of_syntax(syntax, languages.all, mode))
        except RecursionError:
            raise _Unknown from None

    def pattern(self) -> str:
        """The regular expression; "" if no text is left. Raises _Unknown."""
        steps = self._steps()
        ends = {
            state
            for state in steps
            if self._languages.has_empty(self._languages.derivative(state, _END))
        }
        alive = _leading_to(ends, steps)
        if self._start not in alive:
            return ""
        ways: dict[int, dict[int, _Text]] = {
            state: {
                target: _Text.of_characters(ranges)
                for target, ranges in steps[state].items()
                if target in alive
            }
            for state in alive
        }
        for state in ends:
            ways[state][_DONE] = _EMPTY
        return _eliminated(self._start, ways)

    def _steps(self) -> dict[int, dict[int, Ranges]]:
        """By state, the characters that lead to each next one."""
        bounds = self._languages.bounds()
        spans = [
            (low, high - 1) for low, high in zip(bounds, [*bounds[1:], _LAST + 1], strict=True)
        ]
        steps: dict[int, dict[int, Ranges]] = {}
        pending = [self._start]
        while pending:
            state = pending.pop()
            if state in steps:
                continue
            if len(steps) >= _MAX_STATES:
                raise _Unknown
            found: dict[int, list[tuple[int, int]]] = {}
            for low, high in spans:
                target = self._languages.derivative(state, low)
                found.setdefault(target, []).append((low, high))
            found.pop(self._languages.nothing, None)
            steps[state] = {target: _union(ranges) for target, ranges in found.items()}
            pending += found
        return steps


def _leading_to(ends: set[int], steps: dict[int, dict[int, Ranges]]) -> set[int]:
    """The states from which an end can be reached."""
    before: dict[int, list[int]] = {}
    for state, targets in steps.items():
        for target in targets:
            before.setdefault(target, []).append(state)
    found, pending = set(ends), list(ends)
    while pending:
        for state in before.get(pending.pop(), ()):
            if state not in found:
                found.add(state)
                pending.append(state)
    return found


_DONE = -1  # the end of the text


class _Text(msgspec.Struct, frozen=True):
    """A piece of a regular expression. `is_choice`: its ways are not in brackets."""

    text: str
    is_choice: bool = False

    @classmethod
    def of_characters(cls, ranges: Ranges) -> _Text:
        """A class of characters."""
        if ranges == _CHARACTERS:
            return cls("[\\s\\S]")
        if ranges[-1][1] == _LAST:
            return cls(f"[^{_class_text(_others(ranges))}]")
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return cls(_character(ranges[0][0]))
        return cls(f"[{_class_text(ranges)}]")

    def or_(self, other: _Text) -> _Text:
        """This or the other one."""
        if self == other:
            return self
        if not self.text or not other.text:
            filled = self if self.text else other
            return _Text(f"(?:{filled.text})?")
        return _Text(f"{self.text}|{other.text}", is_choice=True)

    def then(self, other: _Text) -> _Text:
        """This, followed by the other one."""
        return _Text(self.in_brackets() + other.in_brackets())

    def in_brackets(self) -> str:
        """The text to join with others."""
        return f"(?:{self.text})" if self.is_choice else self.text

    def repeated(self) -> _Text:
        """Any number of times."""
        is_one = len(self.text) == 1 or (self.text.startswith("[") and self.text.count("[") == 1)
        is_one = is_one and self.text[-1:] in ("]", self.text)
        return _Text(f"{self.text}*" if is_one else f"(?:{self.text})*")


_EMPTY = _Text("")


def _eliminated(start: int, ways: dict[int, dict[int, _Text]]) -> str:
    """The expression that is left once all states but the first and the last are taken out."""
    before: dict[int, set[int]] = {state: set() for state in ways}
    for state, targets in ways.items():
        for target in targets:
            if target != _DONE:
                before[target].add(state)

    def weight(state: int) -> int:
        return (len(before[state] - {state}) - 1) * sum(
            len(text.text) + 1 for target, text in ways[state].items() if target != state
        )

    first = -2
    ways[first] = {start: _EMPTY}
    before[start].add(first)
    left = set(ways) - {first}
    size = 0
    while left:
        state = min(left, key=lambda one: (weight(one), one))
        left.discard(state)
        targets = ways.pop(state)
        loop = targets.pop(state, None)
        for source in before.pop(state) - {state}:
            way = ways[source].pop(state)
            if loop is not None:
                way = way.then(loop.repeated())
            for target, text in targets.items():
                joined = way.then(text)
                known = ways[source].get(target)
                ways[source][target] = joined if known is None else known.or_(joined)
                size = max(size, len(ways[source][target].text))
                if target != _DONE:
                    before[target].add(source)
        for target in targets:
            if target != _DONE:
                before[target].discard(state)
        if size > _MAX_LENGTH:
            raise _Unknown
    return f"^(?:{ways[first][_DONE].text})$"


def _class_text(ranges: Ranges) -> str:
    parts = []
    for low, high in ranges:
        parts.append(_character(low) if low == high else f"{_character(low)}-{_character(high)}")
    return "".join(parts)


def _character(number: int) -> str:
    character = chr(number)
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{number:x}}}"
