"""A short way to the end of a grammar.

llguidance says what may come next, not how far the end is, so `ClosingSearch` looks for it: a
shortest-first search over texts, on a copy of a matcher. It goes byte by byte, takes what is
forced at once, closes strings as soon as it may and tries few of the many characters inside one;
states that allow the same and are equally far count as one. Then the text is spelled in the fewest
tokens. What it finds is a way to the end, if not always the shortest.

The matcher is one over bytes (`byte_tokens`), whatever the model's vocabulary: a state then costs
the same for every model. A search that knows an ending from an earlier state looks only for a way
into it, which most often is a few bytes long.

Called when a grammar is compiled, for the ending from its start, and by `runtime.closing`. What a
search finds is a function of the matcher's tokens, the known endings and `max_states`.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["ClosingSearch", "ClosingVocabulary", "Ending", "byte_tokens"]

_LONGEST_PIECE = 32  # bytes of a token that an ending is spelled with
_MAX_BYTES = 16 * 1024  # of an ending
_MANY = 24  # bytes allowed: more of them only inside a string, or in free text
_FEW = 4  # markers of a format (allowed tokens that are no bytes), or signs in a pattern
_LONGEST_RUN = 64  # of one character, taken in one step
_QUOTE = ord('"')
_DIGITS = frozenset(b"0123456789")
_SAMPLES = b" a"  # stand for all characters where many are allowed
_EMPTY_VALUES = ('""', "{}", "[]")  # often one token
_CLOSERS = b'}],"'
_OPENERS, _SEPARATORS = frozenset("{["), frozenset(",:")
_BRACKETS = frozenset("}]")  # where one of these may follow, nothing leads to the end sooner
_STRUCTURE = frozenset('{}[],:"')
_LATE = 4  # tokens by which a path is too late, once another has begun the next member or item
_LONGER = 2  # steps that a path may take more, and yet be spelled in fewer tokens
_MARKER = 0xFF  # in forced bytes: a special token follows
_FIRST_MARKER = 256  # in a path, a special token is this plus its id
# Places of a known ending that are tried from one state, and from all states of a search.
_TRIED_PLACES = 24
_MAX_TRIED = 192
_NEAR = 64  # bytes at the beginning of a known ending among which any place is tried


def byte_tokens(tokens: Sequence[bytes], special_ids: Collection[int]) -> list[bytes]:
    """The vocabulary of a matcher over bytes: special tokens as they are, then the 256 bytes."""
    special = frozenset(special_ids)
    known = [text if token_id in special else b"" for token_id, text in enumerate(tokens)]
    padding = [b""] * (_first_byte_id(len(tokens)) - len(tokens))
    return [*known, *padding, *(bytes((byte,)) for byte in range(256))]


def _first_byte_id(vocab_size: int) -> int:
    """At a byte of a bit mask, so that the bytes' part of it is a slice."""
    return -(-vocab_size // 8) * 8


class Ending:
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

    def after_first_token(self) -> Ending:
        """What is left once the first token is written."""
        cell = self._cells[-1]
        assert cell is not None and cell[0], "a complete grammar has nothing to write"
        return self._last(len(self.path) - cell[2])

    def tokens(self) -> list[int]:
        """The tokens that spell the text."""
        spelled = []
        rest = self
        while rest.path:
            spelled.append(rest.first_token)
            rest = rest.after_first_token()
        return spelled

    def _last(self, num_items: int) -> Ending:
        return Ending(self.path[len(self.path) - num_items :], self._cells[: num_items + 1])


class ClosingVocabulary:
    """A vocabulary's ordinary tokens by their bytes; one per model, read only once built."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Collection[int]) -> None:
        self._tokens = tokens
        self._special_ids = frozenset(special_ids)
        self.first_byte_id = _first_byte_id(len(tokens))
        self._id_of_text: dict[str, int] = {}
        self._longest: dict[str, int] = {}  # piece with these first two bytes
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
        codes = map(ord, path)
        return [first + code if code < _FIRST_MARKER else code - _FIRST_MARKER for code in codes]

    def spell(self, path: str, before: Ending | None = None) -> Ending | None:
        """`path`, and the ending that it is written before, in the fewest tokens; None if there
        are none.
        """
        cells: list[tuple[int, int, int] | None] = [(0, -1, 0)]
        whole = path
        if before is not None:
            cells = before._cells.copy()
            whole += before.path
        size = len(whole)
        for start in range(len(path) - 1, -1, -1):
            cells.append(self._cell(whole, start, size, cells))
        return None if cells[-1] is None else Ending(whole, cells)

    def _cell(
        self, whole: str, start: int, size: int, cells: list[tuple[int, int, int] | None]
    ) -> tuple[int, int, int] | None:
        """The best first token at `start`: of equally good ones the longest."""
        code = ord(whole[start])
        if code >= _FIRST_MARKER:
            rest = cells[size - start - 1]
            return None if rest is None else (rest[0] + 1, code - _FIRST_MARKER, 1)
        ids = self._id_of_text
        longest = self._longest.get(whole[start : start + 2], 1)
        found: tuple[int, int, int] | None = None
        for end in range(min(size, start + longest), start, -1):
            rest = cells[size - end]
            if rest is None or (found is not None and rest[0] + 1 >= found[0]):
                continue
            token_id = ids.get(whole[start:end])
            if token_id is not None:
                found = (rest[0] + 1, token_id, end - start)
        return found

    def num_tokens(self, path: str) -> int | None:
        """How many tokens spell a path; None if none do."""
        if len(path) == 1:
            is_known = ord(path) >= _FIRST_MARKER or path in self._id_of_text
            return 1 if is_known else None
        spelled = self.spell(path)
        return None if spelled is None else spelled.num_tokens


class _Progress(NamedTuple):
    """How far a path has come, more or less (strings are not told apart): members and items begun,
    brackets open, bytes of the value at its end. Of two that are equally far and allow the same
    the shorter one is enough.
    """

    num_begun: int = 0
    is_open: str = ""
    size: int = 0

    def after(self, way: str) -> _Progress:
        num_begun, is_open, size = self
        for item in way:
            size = 0 if item in _STRUCTURE else size + 1
            if item in _OPENERS:
                is_open += item
            elif item in _BRACKETS:
                is_open = is_open[:-1]
            elif item in _SEPARATORS:
                num_begun += 1
        return _Progress(num_begun, is_open, size)


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

    def completes(self, more: str) -> bool:
        """Whether `more` completes the grammar from here."""
        num_more = self._advance(more)
        is_end = num_more == len(more) and bool(self.matcher.is_accepting())
        if num_more:
            self.matcher.rollback(num_more)
        return is_end

    def _advance(self, more: str) -> int:
        if not more:
            return 0
        taken: int = self.matcher.try_consume_tokens(self._vocabulary.byte_ids(more))
        return taken


class ClosingSearch:
    """One search from one state of a matcher over bytes, which it leaves as it is.

    `max_states` bounds the states that are looked at, some 20 microseconds each. With `known`
    endings, of earlier states of the same matcher, a way into one of them is enough.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: ClosingVocabulary,
        max_states: int,
        known: Sequence[Ending] = (),
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._max_states = max_states
        self._known = known
        self._num_tried = 0

    def ending(self) -> Ending | None:
        """What completes the grammar, empty where it is complete; None if nothing was found."""
        found = self._search(is_greedy=False) or self._search(is_greedy=True)
        return min(found, key=lambda ending: ending.num_tokens, default=None)

    def _search(self, is_greedy: bool) -> list[Ending]:
        """Ways to an end. Greedy: whatever leads on first, for a grammar with many ways."""
        walker = _Walker(self._matcher, self._vocabulary)
        found: list[Ending] = []
        found_cost = 0  # of the first
        waiting = [_State(0, 0, 0, "", _Progress())]
        seen: set[tuple[bytes, _Progress]] = set()
        first_cost: dict[int, int] = {}  # of the first path that began so many members and items
        number = 0
        for _ in range(self._max_states):
            if not waiting or (found and waiting[0].cost > found_cost + _LONGER):
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
            key = (mask, progress)
            first_cost.setdefault(progress.num_begun, state.cost)
            is_late = state.cost > first_cost.get(progress.num_begun + 1, state.cost) + _LATE
            if key in seen or (is_late and not is_greedy):
                continue
            seen.add(key)
            forced = matcher.compute_ff_bytes()
            allowed = self._allowed(mask)
            if self._known:
                joined = self._joined(walker, state.path, allowed, forced)
                if joined is not None:
                    return [joined]
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

    def _allowed(self, mask: bytes) -> list[int]:
        """The bytes that may come next, ascending."""
        start = self._vocabulary.first_byte_id // 8
        bits = np.frombuffer(mask, dtype=np.uint8)[start : start + 32]
        found: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        return found

    def _joined(
        self, walker: _Walker, path: str, allowed: Sequence[int], forced: bytes
    ) -> Ending | None:
        """The shortest ending by `path` and then the end of a known one."""
        found: list[Ending] = []
        for known in self._known:
            for place in _places(known.path, allowed, forced):
                if self._num_tried == _MAX_TRIED:
                    return None
                self._num_tried += 1
                if walker.completes(known.path[place:]):
                    end = known._last(len(known.path) - place)
                    joined = self._vocabulary.spell(path, end)
                    if joined is not None:
                        found.append(joined)
                        break
                if walker.is_lost:
                    return None
        return min(found, key=lambda ending: ending.num_tokens, default=None)

    def _ways(
        self, walker: _Walker, path: str, mask: bytes, allowed: Sequence[int], forced: bytes
    ) -> list[str]:
        """What to try next, the likeliest to end soon first."""
        if forced and _MARKER not in forced:
            return [forced.decode("latin-1")]
        if not allowed:
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            markers = np.flatnonzero(bits[: self._vocabulary.first_byte_id])[:_FEW].tolist()
            return [chr(_FIRST_MARKER + token_id) for token_id in markers]
        if len(allowed) > _MANY:
            if _QUOTE in allowed:
                return ['"']
            last = ord(path[-1]) if path else -1
            if last in allowed and last in _SAMPLES:
                signs = [way for way in _samples(allowed) if ord(way) not in _SAMPLES]
                return [self._longer_run(walker, path), *signs]
            return _samples(allowed)
        closing = [byte for byte in allowed if chr(byte) in _BRACKETS]
        if closing or ord(",") in allowed:
            return [chr(byte) for byte in closing or allowed if byte in _CLOSERS]
        digits = [byte for byte in allowed if byte in _DIGITS]
        others = [byte for byte in allowed if byte not in _DIGITS]
        if len(digits) > 3:
            digits = [digits[-1], digits[0]]
        empty = [pair for pair in _EMPTY_VALUES if ord(pair[0]) in others]
        return [*empty, *map(chr, others + digits)]

    def _longer_run(self, walker: _Walker, path: str) -> str:
        """A character again, in strides, since a long text has few tokens."""
        run_len = len(path) - len(path.rstrip(path[-1]))
        run = path[-1] * max(1, min(run_len // 4, _LONGEST_RUN))
        ids = self._vocabulary.byte_ids(run)
        fits = walker.matcher.validate_tokens(ids) == len(ids)
        return run if fits else path[-1]


def _samples(allowed: Sequence[int]) -> list[str]:
    """A few of many characters: of a pattern's, the signs, since one of them may be its end."""
    signs = [byte for byte in allowed if byte < 128 and not chr(byte).isalnum()]
    ends = [byte for byte in signs if byte not in _SAMPLES] if len(signs) <= _FEW else []
    return [chr(b) for b in [*_SAMPLES, *ends] if b in allowed] or [chr(allowed[0])]


def _places(known: str, allowed: Sequence[int], forced: bytes) -> Iterator[int]:
    """Where a known ending may go on from a state, those nearest to its end first."""
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
    follows = frozenset(map(chr, allowed))
    if len(allowed) > _MANY:  # inside a string most places would only be more of it
        follows = frozenset('"') if _QUOTE in allowed else follows
    tried = 0
    for place in places:
        is_at_start = place == 0 and ord(known[0]) in allowed
        if is_at_start or known[place] in follows:
            yield place
            tried += 1
            if tried == _TRIED_PLACES:
                return
