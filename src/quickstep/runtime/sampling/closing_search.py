"""A short way to the end of a grammar.

llguidance says what may come next, not how far the end is, so `ClosingSearch` looks for it: a
shortest-first search over texts, on a copy of a matcher. It goes byte by byte, takes what is
forced at once, closes strings as soon as it may and tries few of the many characters inside one;
states that allow the same and are equally far count as one, but for the character that a string
ends with. Then the text is spelled in the fewest tokens. What it finds is a way to the end, if not
always the shortest.

The matcher is one over bytes (`byte_tokens`), whatever the model's vocabulary: a state then costs
the same for every model. A search that knows an ending from an earlier state looks only for a way
into it, which most often is a few bytes long.

Called when a grammar is compiled, for the ending from its start, and by
`runtime.sampling.grammar`. What a search finds is a function of the matcher's tokens, the known
endings and `max_states`.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

_LONGEST_PIECE = 32  # bytes of a token that an ending is spelled with
_MAX_BYTES = 16 * 1024  # of an ending
_MANY = 24  # bytes allowed: more of them only inside a string, or in free text
_FEW = 4  # markers of a format (allowed tokens that are no bytes), or signs in a pattern
_LONGEST_RUN = 64  # of one character, taken in one step
_QUOTE = ord('"')
_COMMA = ord(",")
_SAMPLES = b" a"  # samples of all characters where many are allowed
_EMPTY_VALUES = ('""', "{}", "[]")  # often one token
_OPENERS, _SEPARATORS = frozenset("{["), frozenset(",:")
_AFTER_VALUE = frozenset("}],")
_BRACKETS = frozenset("}]")  # where one of these may follow, nothing leads to the end sooner
_STRUCTURE = frozenset('{}[],:"')
_LATE = 4  # tokens by which a path is too late, once another has begun the next member or item
_LONGER = 2  # steps that a path may take more, and yet be spelled in fewer tokens
_MARKER = 0xFF  # in forced bytes: a special token follows
_SPECIAL = re.compile(r"\xff\[([0-9]+)\]")
_FIRST_MARKER = 256  # in a path, a special token is this plus its id
_TRIED_PLACES = 24  # of a known ending, from one state
_TRIED_BYTES = 2048  # of known endings, from all states of a search
_TRIED_IN_PIECES = 8192  # bytes of known endings, for an ending of pieces
_MAX_PIECES = 96  # of an ending
_NEAR = 64  # bytes at the beginning of a known ending among which any place is tried
_FIRST_LOOK = 8  # bytes by which most wrong places show
_MAX_WALKED = 128 * 1024  # bytes of all paths of a search; those that find an end take 16,000
_KEPT_COUNTS = 4096  # of tokens for pieces of text


def _bits(texts: Iterable[int]) -> int:
    """A set of bytes as the bits of a number."""
    return sum(1 << byte for byte in texts)


_SIGN_BITS = _bits(byte for byte in range(128) if not chr(byte).isalnum())
_DIGIT_BITS = _bits(b"0123456789")
_BRACKET_BITS = _bits(b"}]")
_CLOSER_BITS = _bits(b'}],"')


def byte_tokens(tokens: Sequence[bytes], special_ids: Collection[int]) -> list[bytes]:
    """The vocabulary of a matcher over bytes: special tokens as they are, then the 256 bytes."""
    special = frozenset(special_ids)
    known = [text if token_id in special else b"" for token_id, text in enumerate(tokens)]
    padding = [b""] * (_first_byte_id(len(tokens)) - len(tokens))
    return [*known, *padding, *(bytes((byte,)) for byte in range(256))]


def _first_byte_id(vocab_size: int) -> int:
    """At a byte of a bit mask, so that the bytes' part of it is a slice."""
    return -(-vocab_size // 8) * 8


class GrammarEnding:
    """A text that completes a grammar, spelled in the fewest tokens.

    `path` holds bytes as the characters up to 255 and special tokens as 256 + their id. `_cells[n]`
    says of the last n items: how many tokens spell them, the first one, and how long that is; None
    where no tokens do. So a part at the end, or a longer text with this end, is spelled at once.
    """

    __slots__ = ("_cells", "path")

    def __init__(self, path: str, cells: list[tuple[int, int, int] | None]) -> None:
        self.path = path
        self._cells = cells

    @property
    def num_tokens(self) -> int:
        """How many tokens spell the text."""
        cell = self._cells[-1]
        assert cell is not None, "an ending can be spelled"
        return cell[0]

    @property
    def first_token(self) -> int:
        """The first of them."""
        cell = self._cells[-1]
        assert cell is not None and cell[0], "a complete grammar has nothing to write"
        return cell[1]

    def after_first_token(self) -> GrammarEnding:
        """What is left once the first token is written."""
        cell = self._cells[-1]
        assert cell is not None and cell[0], "a complete grammar has nothing to write"
        return self.last(len(self.path) - cell[2])

    def tokens(self) -> list[int]:
        """The tokens that spell the text."""
        spelled = []
        rest = self
        while rest.path:
            spelled.append(rest.first_token)
            rest = rest.after_first_token()
        return spelled

    def last(self, num_items: int) -> GrammarEnding:
        """The end of it."""
        return GrammarEnding(self.path[len(self.path) - num_items :], self._cells[: num_items + 1])


class ClosingVocabulary:
    """A vocabulary's ordinary tokens by their bytes; one per model, for any thread.

    `end_id` is an end token, one of the special ones.
    """

    def __init__(self, tokens: Sequence[bytes], special_ids: Collection[int], end_id: int) -> None:
        self.end_id = end_id
        self._tokens = tokens
        self._special_ids = frozenset(special_ids)
        self.first_byte_id = _first_byte_id(len(tokens))
        self._id_of_text: dict[str, int] = {}
        self._longest: dict[str, int] = {}  # piece with these first two bytes
        self._counts: dict[str, int | None] = {}  # results of `num_tokens`
        for token_id, token in enumerate(tokens):
            if 0 < len(token) <= _LONGEST_PIECE and token_id not in self._special_ids:
                text = token.decode("latin-1")
                self._id_of_text.setdefault(text, token_id)
                begin = text[:2]
                self._longest[begin] = max(self._longest.get(begin, 0), len(text))

    def path_of(self, token_id: int) -> str:
        """What a token adds to a path."""
        if token_id in self._special_ids:
            return chr(_FIRST_MARKER + token_id)
        return self._tokens[token_id].decode("latin-1")

    def byte_ids(self, path: str) -> list[int]:
        """A path as tokens of the matcher over bytes."""
        first = self.first_byte_id
        if path.isascii():  # most are, and long; what loops over them is ten times slower
            bytes_of_path = np.frombuffer(path.encode(), dtype=np.uint8)
            ids: list[int] = (bytes_of_path + np.int64(first)).tolist()
            return ids
        codes = map(ord, path)
        return [first + code if code < _FIRST_MARKER else code - _FIRST_MARKER for code in codes]

    def spell(self, path: str, before: GrammarEnding | None = None) -> GrammarEnding | None:
        """`path`, and the ending that it is written before, in the fewest tokens; None if there
        are none.
        """
        cells: list[tuple[int, int, int] | None] = [(0, -1, 0)]
        text = path
        if before is not None:
            cells = before._cells.copy()
            text += before.path
        size = len(text)
        for start in range(len(path) - 1, -1, -1):
            cells.append(self._cell(text, start, size, cells))
        return None if cells[-1] is None else GrammarEnding(text, cells)

    def _cell(
        self, text: str, start: int, size: int, cells: list[tuple[int, int, int] | None]
    ) -> tuple[int, int, int] | None:
        """The best first token at `start`: of equally good ones the longest."""
        code = ord(text[start])
        if code >= _FIRST_MARKER:
            rest = cells[size - start - 1]
            return None if rest is None else (rest[0] + 1, code - _FIRST_MARKER, 1)
        ids = self._id_of_text
        longest = self._longest.get(text[start : start + 2], 1)
        found: tuple[int, int, int] | None = None
        for end in range(min(size, start + longest), start, -1):
            rest = cells[size - end]
            if rest is None or (found is not None and rest[0] + 1 >= found[0]):
                continue
            token_id = ids.get(text[start:end])
            if token_id is not None:
                found = (rest[0] + 1, token_id, end - start)
        return found

    def num_tokens(self, path: str) -> int | None:
        """How many tokens spell a path; None if none do."""
        if len(path) == 1:
            is_known = ord(path) >= _FIRST_MARKER or path in self._id_of_text
            return 1 if is_known else None
        if path in self._counts:
            return self._counts[path]
        spelled = self.spell(path)
        count = None if spelled is None else spelled.num_tokens
        if len(self._counts) >= _KEPT_COUNTS:
            self._counts = {}
        self._counts[path] = count
        return count


class _Progress(NamedTuple):
    """How far a path has come, more or less (strings are not distinguished): of each open level the
    members and items begun, the brackets open, the bytes of the value at its end. Of two that are
    equally far and allow the same the shorter one is enough.
    """

    num_begun: tuple[int, ...] = (0,)
    is_open: str = ""
    size: int = 0

    def after(self, way: str) -> _Progress:
        num_begun, is_open, size = self
        for item in way:
            size = 0 if item in _STRUCTURE else size + 1
            if item in _OPENERS:
                is_open += item
                num_begun = (*num_begun, 0)
            elif item in _BRACKETS:
                is_open = is_open[:-1]
                num_begun = num_begun[:-1] or (0,)
            elif item in _SEPARATORS:
                num_begun = (*num_begun[:-1], num_begun[-1] + 1)
        return _Progress(num_begun, is_open, size)


class _FirstCosts:
    """What it cost the first path to begin so many members and items of a level."""

    def __init__(self) -> None:
        self._costs: dict[tuple[int, ...], int] = {}

    def add(self, num_begun: tuple[int, ...], cost: int) -> None:
        """Note a path, which has begun what its outer levels have begun as well."""
        for depth in range(1, len(num_begun) + 1):
            self._costs.setdefault(num_begun[:depth], cost)

    def is_late(self, num_begun: tuple[int, ...], cost: int, late: int) -> bool:
        """Whether another path was further on some level, for `late` tokens less."""
        costs = self._costs
        return any(
            costs.get((*num_begun[:depth], num_begun[depth] + 1), cost) + late < cost
            for depth in range(len(num_begun))
        )


class _State(NamedTuple):
    """A place in the search. `cost` counts the tokens of the steps to it."""

    order: int
    number: int
    cost: int
    path: str
    progress: _Progress


class _Walker:
    """A copy of a matcher that moves from path to path; `is_lost` once a limit stopped it."""

    def __init__(self, matcher: LLMatcher, vocabulary: ClosingVocabulary) -> None:
        self.matcher = matcher.deep_copy()
        self._vocabulary = vocabulary
        self._path = ""
        self.num_walked = 0  # bytes, each some 700 nanoseconds

    @property
    def is_lost(self) -> bool:
        return self.matcher.is_error()

    def go(self, path: str) -> bool:
        """Be where `path` leads; False if it leads nowhere."""
        known = self._path
        shared = 0
        if path.startswith(known):
            shared = len(known)
        else:
            shortest = min(len(path), len(known))
            shared = next((n for n in range(shortest) if path[n] != known[n]), shortest)
            self.matcher.rollback(len(known) - shared)
        num_more = self._advance(path[shared:])
        self._path = path[: shared + num_more]
        return len(self._path) == len(path)

    def completes(self, ids: list[int]) -> tuple[bool, int]:
        """Whether these tokens complete the grammar from here, and how many of them fit.

        Nothing moves, which costs a fifth of moving and coming back; an end token fits where the
        grammar is complete.
        """
        first = ids[:_FIRST_LOOK]
        num_fitting: int = self.matcher.validate_tokens(first)
        if num_fitting < len(first):
            return False, num_fitting
        num_fitting = self.matcher.validate_tokens([*ids, self._vocabulary.end_id])
        return num_fitting > len(ids), min(num_fitting, len(ids))

    def num_fitting(self, ids: list[int]) -> int:
        """How many of these tokens the grammar takes from here; nothing moves."""
        num_fitting: int = self.matcher.validate_tokens(ids[:_FIRST_LOOK])
        if num_fitting == _FIRST_LOOK:
            num_fitting = self.matcher.validate_tokens(ids)
        return num_fitting

    def _advance(self, more: str) -> int:
        if not more:
            return 0
        self.num_walked += len(more)
        taken: int = self.matcher.try_consume_tokens(self._vocabulary.byte_ids(more))
        return taken


class ClosingSearch:
    """One search from one state of a matcher over bytes, which it leaves as it is.

    `max_states` bounds the states that are looked at, some 30 microseconds each. With `known`
    endings, of earlier states of the same matcher, a way into one of them is enough.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: ClosingVocabulary,
        max_states: int,
        known: Sequence[GrammarEnding] = (),
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._max_states = max_states
        self._known = [(ending, vocabulary.byte_ids(ending.path)) for ending in known]
        self._num_tried = 0

    def ending(self) -> GrammarEnding | None:
        """What completes the grammar, empty where it is complete; None if nothing was found."""
        found = self._search(_LATE)
        if not found and self._known:
            return self._pieced()
        if not found:
            found = self._search(0) or self._search(0, is_greedy=True)
        return min(found, key=lambda ending: ending.num_tokens, default=None)

    def _pieced(self) -> GrammarEnding | None:
        """An ending of pieces of known ones: a schema that contains itself repeats them, level by
        level, so that a state many levels deep has an end that no search would reach.
        """
        walker = _Walker(self._matcher, self._vocabulary)
        path = ""
        self._num_tried = 0
        for _ in range(_MAX_PIECES):
            if not walker.go(path) or len(path) > _MAX_BYTES:
                return None
            matcher = walker.matcher
            if matcher.is_accepting() or matcher.is_stopped():
                return None if matcher.is_error() else self._vocabulary.spell(path)
            mask = matcher.compute_bitmask()
            forced = matcher.compute_ff_bytes()
            allowed = self._allowed(mask)
            piece, is_end = self._piece(walker, allowed, forced)
            if not is_end and (not piece or _ends_value(allowed)):
                ways = self._ways(walker, path, mask, allowed, forced)
                piece = ways[0] if ways else ""
            if not piece or walker.is_lost or self._num_tried >= _TRIED_IN_PIECES:
                return None
            path += piece
        return None

    def _piece(self, walker: _Walker, allowed: int, forced: bytes) -> tuple[str, bool]:
        """The longest end of a known ending that fits here, else the longest part, and whether it
        is an end.
        """
        longest, has_end = "", False
        for known, ids in self._known:
            for place in _places(known.path, allowed, forced):
                if self._num_tried >= _TRIED_IN_PIECES:
                    return longest, has_end
                if _ends_value(allowed) and known.path[place] not in _AFTER_VALUE:
                    continue  # more of a value that is complete
                num_fitting = walker.num_fitting(ids[place:])
                self._num_tried += 1 + num_fitting
                is_end = num_fitting == len(ids) - place
                if (is_end, num_fitting) > (has_end, len(longest)):
                    longest, has_end = known.path[place : place + num_fitting], is_end
        return longest, has_end

    def _search(self, late: int, is_greedy: bool = False) -> list[GrammarEnding]:
        """Paths to an end. A path that is `late` tokens longer than another to the same place is
        dropped: the smaller `late` is, the sooner a grammar with many paths is searched. Greedy:
        follow the first path that continues.
        """
        walker = _Walker(self._matcher, self._vocabulary)
        found: list[GrammarEnding] = []
        found_cost = 0  # of the first
        waiting = [_State(0, 0, 0, "", _Progress())]
        seen: set[tuple[bytes, _Progress, str]] = set()
        first_costs = _FirstCosts()
        number = 0
        for _ in range(self._max_states):
            if not waiting or (found and waiting[0].cost > found_cost + _LONGER):
                break
            if walker.num_walked > _MAX_WALKED:
                break
            state = heapq.heappop(waiting)
            if not walker.go(state.path):
                if walker.is_lost:
                    break
                continue
            matcher, progress = walker.matcher, state.progress
            if matcher.is_accepting() or matcher.is_stopped():
                if matcher.is_error():
                    break
                ending = self._vocabulary.spell(state.path)
                if ending is not None:
                    found_cost = found_cost if found else state.cost
                    found.append(ending)
                if is_greedy or not state.path:
                    break
                continue
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                break
            allowed = self._allowed(mask)
            key = (mask, progress, _sample_at_end(state.path, allowed))
            first_costs.add(progress.num_begun, state.cost)
            is_late = first_costs.is_late(progress.num_begun, state.cost, late)
            if key in seen or (is_late and not is_greedy):
                continue
            seen.add(key)
            forced = matcher.compute_ff_bytes()
            if self._known:
                joined = self._joined(walker, state.path, allowed, forced)
                if joined is not None:
                    return [joined]
                if self._num_tried >= _TRIED_BYTES:
                    break
            ways = self._ways(walker, state.path, mask, allowed, forced)
            for way in reversed(ways) if is_greedy else ways:
                fits = len(state.path) + len(way) <= _MAX_BYTES
                num_tokens = self._vocabulary.num_tokens(way) if fits else None
                if num_tokens is None:
                    continue
                cost = state.cost + num_tokens
                number += 1
                order = -number if is_greedy else cost
                after = progress.after(way)
                heapq.heappush(waiting, _State(order, number, cost, state.path + way, after))
        return found

    def _allowed(self, mask: bytes) -> int:
        """The bytes that may come next, as bits."""
        start = self._vocabulary.first_byte_id // 8
        return int.from_bytes(mask[start : start + 32], "little")

    def _joined(
        self, walker: _Walker, path: str, allowed: int, forced: bytes
    ) -> GrammarEnding | None:
        """An ending by `path` and then the end of a known one, as short as it has."""
        for known, ids in self._known:
            for place in _places(known.path, allowed, forced):
                if self._num_tried >= _TRIED_BYTES:
                    return None
                is_end, num_fitting = walker.completes(ids[place:])
                self._num_tried += 1 + num_fitting
                if walker.is_lost:
                    return None
                if is_end:
                    end = known.last(len(known.path) - place)
                    joined = self._vocabulary.spell(path, end)
                    if joined is not None:
                        return joined
        return None

    def _ways(
        self, walker: _Walker, path: str, mask: bytes, allowed: int, forced: bytes
    ) -> list[str]:
        """What to try next, the likeliest to end soon first."""
        way = _path_of(forced)
        if way and chr(_MARKER) not in way:
            return [way]
        if not allowed:
            return self._markers(mask)
        if allowed.bit_count() > _MANY:
            markers = self._markers(mask)
            if markers:  # a marker ends free text, which else only continues
                return [*markers, *_samples(allowed)]
            if allowed >> _QUOTE & 1:
                return ['"']
            last = ord(path[-1]) if path else 0
            if last in _SAMPLES and allowed >> last & 1:
                signs = [way for way in _samples(allowed) if ord(way) not in _SAMPLES]
                return [self._longer_run(walker, path), *signs]
            return _samples(allowed)
        closing = allowed & _BRACKET_BITS
        if closing or allowed >> _COMMA & 1:
            return _characters(closing or allowed & _CLOSER_BITS)
        digits = _characters(allowed & _DIGIT_BITS)
        if len(digits) > 3:
            digits = [digits[-1], digits[0]]
        empty = [pair for pair in _EMPTY_VALUES if allowed >> ord(pair[0]) & 1]
        return [*empty, *_characters(allowed & ~_DIGIT_BITS), *digits]

    def _markers(self, mask: bytes) -> list[str]:
        """A few of the special tokens that may come next."""
        num_bytes = self._vocabulary.first_byte_id // 8
        if not any(mask[:num_bytes]):
            return []
        bits = np.unpackbits(
            np.frombuffer(mask, dtype=np.uint8, count=num_bytes), bitorder="little"
        )
        markers = np.flatnonzero(bits)[:_FEW].tolist()
        return [chr(_FIRST_MARKER + token_id) for token_id in markers]

    def _longer_run(self, walker: _Walker, path: str) -> str:
        """A character again, in strides, since a long text has few tokens."""
        run_len = len(path) - len(path.rstrip(path[-1]))
        run = path[-1] * max(1, min(run_len // 4, _LONGEST_RUN))
        ids = self._vocabulary.byte_ids(run)
        fits = walker.matcher.validate_tokens(ids) == len(ids)
        return run if fits else path[-1]


def _path_of(forced: bytes) -> str:
    """Forced bytes as a path: a special token is a marker and its id in brackets."""
    return _SPECIAL.sub(lambda found: chr(_FIRST_MARKER + int(found[1])), forced.decode("latin-1"))


def _ends_value(allowed: int) -> bool:
    """Whether a value of JSON may end here, which is not a string."""
    is_few = allowed.bit_count() <= _MANY
    return is_few and bool(allowed & (_BRACKET_BITS | 1 << _COMMA))


def _characters(allowed: int) -> list[str]:
    """A set of bytes, ascending."""
    found: list[str] = []
    while allowed:
        found.append(chr((allowed & -allowed).bit_length() - 1))
        allowed &= allowed - 1
    return found


def _samples(allowed: int) -> list[str]:
    """A few of many characters: of a pattern's, the signs, since one of them may be its end."""
    signs = _characters(allowed & _SIGN_BITS)
    ends = [sign for sign in signs if ord(sign) not in _SAMPLES] if len(signs) <= _FEW else []
    found = [chr(byte) for byte in _SAMPLES if allowed >> byte & 1]
    return [*found, *ends] or _characters(allowed)[:1]


def _sample_at_end(path: str, allowed: int) -> str:
    """The sample that a string ends with which may not end yet: a pattern may need one of them
    somewhere, and allow the same before and after it.
    """
    is_open = allowed.bit_count() > _MANY and not allowed >> _QUOTE & 1
    return path[-1] if is_open and path and ord(path[-1]) in _SAMPLES else ""


def _places(known: str, allowed: int, forced: bytes) -> Iterator[int]:
    """Where a known ending may continue from a state, those nearest to its end first."""
    if forced:
        if _MARKER in forced:
            return
        text = forced.decode("latin-1")
        place = known.rfind(text)
        for _ in range(_TRIED_PLACES):
            if place < 0:
                return
            yield place
            place = known.rfind(text, 0, place + len(text) - 1)
        return
    num_closers = len(known) - len(known.rstrip("}]"))
    near = min(_NEAR, len(known) - num_closers)
    first = max(len(known) - _TRIED_PLACES // 2, len(known) - num_closers, near)
    places = [*range(len(known) - 1, first - 1, -1), *range(near - 1, -1, -1)]
    # inside a string most places would only be more of it
    is_text = allowed.bit_count() > _MANY and allowed >> _QUOTE & 1
    tried = 0
    for place in places:
        follows = ord(known[place])
        if follows >= _FIRST_MARKER or not allowed >> follows & 1:
            continue
        if is_text and follows != _QUOTE and place:
            continue
        yield place
        tried += 1
        if tried == _TRIED_PLACES:
            return
