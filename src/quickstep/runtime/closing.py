"""A short way to the end of a grammar, and the rule that keeps one open within the token limit.

llguidance says what may come next, not how far the end is, so `ClosingSearch` looks for it: a
shortest-first search over texts, on copies of the matcher. It goes byte by byte, takes what is
forced at once, closes strings as soon as it may and tries few of the many characters inside one;
states that allow the same and are equally far count as one. Then the text is spelled in the fewest
tokens. What it finds is a way to the end, if not always the shortest.

`ClosingGuard` uses it. While many more tokens remain than the end takes, it looks now and then;
when they get scarce, at every token: a drawn token from which no end can be reached any more gives
way to the next one of the known ending. All of it is a function of the grammar, the output tokens
and the limit. Owned by `GrammarConstraint`.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["ClosingGuard", "ClosingVocabulary"]

Tokens = tuple[int, ...]

_LONGEST_PIECE = 32  # bytes of a token that an ending is spelled with
_MANY = 24  # bytes allowed: more of them only inside a string, or in free text
_FEW = 4  # markers of a format (allowed tokens that are no bytes), or signs in a pattern
_LONGEST_RUN = 64  # of one character, taken in one step
_MAX_STATES = 256  # looked at by one search; a state takes some 50 microseconds
_QUOTE = ord('"')
_DIGITS = frozenset(b"0123456789")
_SAMPLES = b" a"  # stand for all characters where many are allowed
_EMPTY_VALUES = (b'""', b"{}", b"[]")  # often one token
_CLOSERS = b'}],"'
_OPENERS, _SEPARATORS = frozenset(b"{["), frozenset(b",:")
_BRACKETS = frozenset(b"}]")  # where one of these may stand, nothing leads to the end sooner
_STRUCTURE = frozenset(b'{}[],:"')
_LATE = 4  # tokens by which a path is too late, once another has begun the next member or item
_LONGER = 2  # steps that a path may take more, and yet be spelled in fewer tokens
_MARKER = 0xFF  # in forced bytes: a special token follows

# Of the room beyond the ending, a quarter may be drawn without a look; the last of it never.
_KEPT_ROOM = 32
_ROOM_PER_TOKEN = 4


class ClosingVocabulary:
    """A vocabulary's ordinary tokens by their bytes; one per model, read only once built."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Collection[int]) -> None:
        self._id_of_bytes: dict[bytes, int] = {}
        for token_id, text in enumerate(tokens):
            if 0 < len(text) <= _LONGEST_PIECE and token_id not in special_ids:
                self._id_of_bytes.setdefault(text, token_id)
        self._id_of_byte: npt.NDArray[np.int64] = np.array(
            [self._id_of_bytes.get(bytes((byte,)), -1) for byte in range(256)]
        )

    def spell(self, text: bytes) -> Tokens | None:
        """The fewest tokens that make `text`; None if there are none."""
        ids, size = self._id_of_bytes, len(text)
        # [place] = (tokens from there to the end, the first of them, where the second begins)
        best: list[tuple[int, int, int] | None] = [None] * size + [(0, 0, size)]
        for start in range(size - 1, -1, -1):
            for end in range(min(size, start + _LONGEST_PIECE), start, -1):
                rest, token_id = best[end], ids.get(text[start:end])
                if rest is None or token_id is None:
                    continue
                known = best[start]
                if known is None or rest[0] + 1 < known[0]:
                    best[start] = (rest[0] + 1, token_id, end)
        spelled: list[int] = []
        place = 0
        while place < size:
            step = best[place]
            if step is None:
                return None
            spelled.append(step[1])
            place = step[2]
        return tuple(spelled)

    def of_byte(self, byte: int) -> Tokens | None:
        """The token that is this byte, if there is one."""
        token_id = int(self._id_of_byte[byte])
        return None if token_id < 0 else (token_id,)

    def allowed_bytes(self, mask: npt.NDArray[np.uint8]) -> list[int]:
        """The bytes whose tokens stand in a matcher's bit mask, ascending."""
        ids = self._id_of_byte
        known = np.flatnonzero((ids >= 0) & (ids >> 3 < mask.shape[0]))
        bits = mask[ids[known] >> 3] >> (ids[known] & 7) & 1
        found: list[int] = known[bits == 1].tolist()
        return found


class _State(NamedTuple):
    """A place in the search, behind the tokens `step` from the place that `before` stands at.

    `path` holds bytes, and markers as 256 + token id; `cost` counts the tokens of its steps.
    """

    order: int
    number: int
    cost: int
    path: Tokens
    step: Tokens
    before: LLMatcher


class ClosingSearch:
    """One search from one state of a matcher, which it leaves as it is.

    `max_tokens` bounds an ending that is of any use.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: ClosingVocabulary, max_tokens: int) -> None:
        self._matcher = matcher
        self._max_bytes = _LONGEST_PIECE * max_tokens
        self._vocabulary = vocabulary

    def ending(self) -> Tokens | None:
        """Tokens that complete the grammar, () where it is complete; None if none were found."""
        paths = self._search(is_greedy=False) or self._search(is_greedy=True)
        endings = [found for path in paths if (found := self._spelled(path)) is not None]
        return min(endings, key=len, default=None)

    def _search(self, is_greedy: bool) -> list[Tokens]:
        """Paths to an end. Greedy: whatever leads on first, for a grammar with many ways."""
        found: list[_State] = []
        waiting = [_State(0, 0, 0, (), (), self._matcher)]
        seen: set[tuple[object, ...]] = set()
        first_cost: dict[int, int] = {}  # of the first path that began so many members and items
        number = 0
        for _ in range(_MAX_STATES):
            if not waiting or (found and waiting[0].cost > found[0].cost + _LONGER):
                break
            state = heapq.heappop(waiting)
            matcher = state.before.deep_copy()
            if not matcher.consume_tokens(list(state.step)):
                continue
            if matcher.is_accepting() or matcher.is_stopped():
                found.append(state)
                if is_greedy or not state.path:
                    break
                continue
            mask = matcher.compute_bitmask()
            progress = _progress(state.path)
            key, num_begun = (mask, *progress), progress[0]
            first_cost.setdefault(num_begun, state.cost)
            is_late = state.cost > first_cost.get(num_begun + 1, state.cost) + _LATE
            if key in seen or matcher.is_error() or (is_late and not is_greedy):
                continue
            seen.add(key)
            ways = self._ways(matcher, mask, state.path)
            for way in reversed(ways) if is_greedy else ways:
                fits = len(state.path) + len(way) <= self._max_bytes
                step = self._spelled(way) if fits else None
                if step is None:
                    continue
                cost = state.cost + len(step)
                number += 1
                order = -number if is_greedy else cost
                path = state.path + way
                heapq.heappush(waiting, _State(order, number, cost, path, step, matcher))
        return [state.path for state in found]

    def _ways(self, matcher: LLMatcher, mask: bytes, path: Tokens) -> list[Tokens]:
        """What to try next, the likeliest to end soon first."""
        forced = matcher.compute_ff_bytes()
        if forced and _MARKER not in forced:
            return [tuple(forced)]
        bits = np.frombuffer(mask, dtype=np.uint8)
        allowed = self._vocabulary.allowed_bytes(bits)
        if not allowed:
            markers = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            return [(256 + token_id,) for token_id in markers[:_FEW]]
        if len(allowed) > _MANY:
            if _QUOTE in allowed:
                return [(_QUOTE,)]
            if path and path[-1] in allowed and path[-1] in _SAMPLES:
                signs = [way for way in _samples(allowed) if way[0] not in _SAMPLES]
                return [self._longer_run(matcher, path), *signs]
            return _samples(allowed)
        closing = [byte for byte in allowed if byte in _BRACKETS]
        if closing or ord(",") in allowed:
            return [(byte,) for byte in closing or allowed if byte in _CLOSERS]
        digits = [byte for byte in allowed if byte in _DIGITS]
        others = [byte for byte in allowed if byte not in _DIGITS]
        if len(digits) > 3:
            digits = [digits[-1], digits[0]]
        empty = [tuple(pair) for pair in _EMPTY_VALUES if pair[0] in others]
        return [*empty, *((byte,) for byte in others + digits)]

    def _longer_run(self, matcher: LLMatcher, path: Tokens) -> Tokens:
        """A character again, in strides, since a long text has few tokens."""
        run_len = next((n for n, item in enumerate(reversed(path)) if item != path[-1]), len(path))
        run = path[-1:] * max(1, min(run_len // 4, _LONGEST_RUN))
        step = self._spelled(run)
        fits = step is not None and matcher.validate_tokens(list(step)) == len(step)
        return run if fits else path[-1:]

    def _spelled(self, path: Tokens) -> Tokens | None:
        """The fewest tokens for the bytes of a path, its markers as they are; None without any."""
        if len(path) == 1:
            return (path[0] - 256,) if path[0] > 255 else self._vocabulary.of_byte(path[0])
        spelled: list[int] = []
        start = 0
        for place, item in enumerate((*path, 256)):
            if item < 256:
                continue
            ids = self._vocabulary.spell(bytes(path[start:place]))
            if ids is None:
                return None
            spelled += ids
            start = place + 1
            if place < len(path):
                spelled.append(item - 256)
        return tuple(spelled)


def _samples(allowed: Sequence[int]) -> list[Tokens]:
    """A few of many characters: of a pattern's, the signs, since one of them may be its end."""
    signs = [byte for byte in allowed if byte < 128 and not chr(byte).isalnum()]
    ends = [byte for byte in signs if byte not in _SAMPLES] if len(signs) <= _FEW else []
    return [(b,) for b in [*_SAMPLES, *ends] if b in allowed] or [(allowed[0],)]


def _progress(path: Tokens) -> tuple[int, bytes, int]:
    """How far a path has come, more or less (strings are not told apart): members and items begun,
    brackets open, bytes of the value at its end. Of two that are equally far and allow the same
    the shorter one is enough.
    """
    num_begun, size = 0, 0
    is_open = bytearray()
    for item in path:
        size = 0 if item in _STRUCTURE else size + 1
        if item in _OPENERS:
            is_open.append(item)
        elif item in _BRACKETS:
            del is_open[-1:]
        elif item in _SEPARATORS:
            num_begun += 1
    return num_begun, bytes(is_open), size


class ClosingGuard:
    """Keeps an end in reach of one sequence. `max_tokens` bounds its output, the end token counts.

    `matcher` is the sequence's own, which the constraint moves on before it calls `record`.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: ClosingVocabulary, max_tokens: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_left = max_tokens
        self._next_look = max_tokens  # the tokens left at which to look again
        self._ending: Tokens | None = None  # known while tokens are scarce
        self._drawn: tuple[int, Tokens | None] | None = None  # a token, and the ending behind it
        self._has_given_up = False
        self._num_ends = 1  # the end token
        self._look()

    def steered(self, token_id: int) -> int:
        """The drawn token, or the ending's next one if the end would be out of reach behind it."""
        if not self._ending or token_id == self._ending[0]:
            return token_id
        behind = self._behind(token_id)
        if behind is not None and self._fits(behind, self._num_left - 1):
            self._drawn = (token_id, behind)
            return token_id
        return self._ending[0]

    def record(self, token_id: int) -> None:
        """Take an output token, which the matcher has taken already."""
        self._num_left -= 1
        ending, drawn = self._ending, self._drawn
        self._drawn = None
        if self._has_given_up:
            return
        if ending is None:
            if self._num_left <= self._next_look:
                self._look()
            return
        if ending and token_id == ending[0]:
            self._ending = ending[1:]
        elif drawn is not None and drawn[0] == token_id:
            self._ending = drawn[1]
        else:
            self._look()
            return
        self._relax()

    def _look(self) -> None:
        """Search from here; give up if the end is out of reach."""
        self._ending = ClosingSearch(self._matcher, self._vocabulary, self._num_left).ending()
        if self._ending is None or len(self._ending) > self._num_left:
            self._ending = None
            self._has_given_up = True
            return
        if not self._fits(self._ending, self._num_left):
            self._num_ends = 0  # it just fits without the end token
        self._relax()

    def _relax(self) -> None:
        """Forget the ending while there is more than enough room."""
        assert self._ending is not None, "an ending is known"
        room = self._num_left - len(self._ending) - _KEPT_ROOM
        if room >= _ROOM_PER_TOKEN:
            self._next_look = self._num_left - room // _ROOM_PER_TOKEN
            self._ending = None

    def _fits(self, ending: Tokens, num_left: int) -> bool:
        return len(ending) + self._num_ends <= num_left or not ending

    def _behind(self, token_id: int) -> Tokens | None:
        """An ending behind a token: inside a string, most often the one that is known already."""
        copy = self._matcher.deep_copy()
        if not copy.consume_token(token_id):
            return None
        num_left = self._num_left - 1
        if self._ending and self._fits(self._ending, num_left):
            trial = copy.deep_copy()
            if trial.consume_tokens(list(self._ending)) and trial.is_accepting():
                return self._ending
        return ClosingSearch(copy, self._vocabulary, num_left).ending()
