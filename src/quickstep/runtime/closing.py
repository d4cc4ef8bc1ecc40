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
_FEW = 4  # allowed tokens that are no bytes: markers of a format
_MAX_STATES = 400  # looked at by one search; a state takes some 20 microseconds
_QUOTE = ord('"')
_DIGITS = frozenset(b"0123456789")
_SAMPLES = b" a0A-"  # stand for all characters where many are allowed
_CLOSERS = b'}]"'
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

    def token_of_byte(self, byte: int) -> int:
        """The token that is this byte."""
        return int(self._id_of_byte[byte])

    def allowed_bytes(self, mask: npt.NDArray[np.uint8]) -> list[int]:
        """The bytes whose tokens stand in a matcher's bit mask, ascending."""
        ids = self._id_of_byte
        known = np.flatnonzero((ids >= 0) & (ids >> 3 < mask.shape[0]))
        bits = mask[ids[known] >> 3] >> (ids[known] & 7) & 1
        found: list[int] = known[bits == 1].tolist()
        return found


class _State(NamedTuple):
    """A place in the search; `path` holds bytes, and markers as 256 + token id."""

    order: tuple[int, ...]
    number: int
    path: Tokens
    matcher: LLMatcher


class ClosingSearch:
    """One search from one state of a matcher, which it leaves as it is."""

    def __init__(self, matcher: LLMatcher, vocabulary: ClosingVocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def ending(self) -> Tokens | None:
        """Tokens that complete the grammar, () where it is complete; None if none were found."""
        path = self._search(is_greedy=False)
        if path is None:
            path = self._search(is_greedy=True)
        return None if path is None else self._spelled(path)

    def _search(self, is_greedy: bool) -> Tokens | None:
        """The path to an end. Greedy: whatever leads on first, for a grammar with many ways."""
        waiting = [_State((0,), 0, (), self._matcher.deep_copy())]
        seen: set[tuple[object, ...]] = set()
        num_states = 1
        for _ in range(_MAX_STATES):
            if not waiting:
                return None
            state = heapq.heappop(waiting)
            matcher = state.matcher
            if matcher.is_error():
                continue
            if matcher.is_accepting() or matcher.is_stopped():
                return state.path
            mask = matcher.compute_bitmask()
            key = (mask, len(state.path), _depth(state.path))
            if key in seen:
                continue
            seen.add(key)
            for rank, way in enumerate(self._ways(matcher, mask)):
                path = state.path + way
                order = (-len(path), rank) if is_greedy else (len(path),)
                copy = matcher.deep_copy()
                if self._go(copy, way):
                    heapq.heappush(waiting, _State(order, num_states, path, copy))
                    num_states += 1
        return None

    def _ways(self, matcher: LLMatcher, mask: bytes) -> list[Tokens]:
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
            return [(byte,) for byte in _SAMPLES if byte in allowed] or [(allowed[0],)]
        digits = [byte for byte in allowed if byte in _DIGITS]
        others = [byte for byte in allowed if byte not in _DIGITS]
        others.sort(key=lambda byte: byte not in _CLOSERS)
        if len(digits) > 3:
            digits = [digits[0], digits[-1]]
        return [(byte,) for byte in others + digits]

    def _go(self, matcher: LLMatcher, way: Tokens) -> bool:
        """Take bytes or a marker; whether that worked."""
        if len(way) == 1:
            token_id = way[0] - 256 if way[0] > 255 else self._vocabulary.token_of_byte(way[0])
            return matcher.consume_token(token_id)
        ids = self._vocabulary.spell(bytes(way))
        return ids is not None and matcher.consume_tokens(list(ids))

    def _spelled(self, path: Tokens) -> Tokens | None:
        spelled: list[int] = []
        run: list[int] = []
        for item in (*path, None):
            if item is not None and item < 256:
                run.append(item)
                continue
            ids = self._vocabulary.spell(bytes(run))
            if ids is None:
                return None
            spelled += ids
            run = []
            if item is not None:
                spelled.append(item - 256)
        return tuple(spelled)


def _depth(path: Tokens) -> int:
    """Brackets that are open, more or less: those in strings count as well."""
    return sum((item in b"{[") - (item in b"}]") for item in path if item < 256)


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
        self._ending = ClosingSearch(self._matcher, self._vocabulary).ending()
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
        copy = self._matcher.deep_copy()
        if not copy.consume_token(token_id):
            return None
        return ClosingSearch(copy, self._vocabulary).ending()
