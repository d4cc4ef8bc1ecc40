"""The rule that keeps the end of a grammar within a sequence's limit of tokens.

While many more tokens remain than the end takes, `ClosingGuard` looks now and then how far it is;
when they get scarce, at every token: a sampled token from which no end can be reached any more
gives way to the next one of the known ending. The ending from the grammar's start comes with the
compiled grammar; later ones are found by a search whose work per token is bounded
(`runtime.constraints.closing_search`).

All of it is a function of the grammar, the output tokens and the limit: `forced_token` answers and
changes nothing, `record` alone moves on, so replaying the outputs ends in the same state. Owned by
`GrammarConstraint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from quickstep.runtime.constraints.closing_search import ClosingSearch, ClosingVocabulary, Ending

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["ClosingGuard", "ClosingStart", "start_ending"]

# Of the room beyond the ending, a quarter may be sampled without a look; the last of it never.
_KEPT_ROOM = 32
_ROOM_PER_TOKEN = 4
_LEFT_PER_RETRY = 2  # after a look that found no end, half of what is left goes without one
_NEVER = -1  # tokens left
_START_STATES = 1024  # looked at when a grammar is compiled
_MAX_STATES = 48  # looked at for one token


class ClosingStart(msgspec.Struct, frozen=True):
    """What a compiled grammar has for each of its sequences; shared, never changed.

    Attributes:
        matcher: Over bytes, at the grammar's start.
        vocabulary: What endings are spelled with.
        ending: From the start; None if none was found.
    """

    matcher: LLMatcher
    vocabulary: ClosingVocabulary
    ending: Ending | None


def start_ending(matcher: LLMatcher, vocabulary: ClosingVocabulary) -> Ending | None:
    """The ending from a grammar's start. Some milliseconds, at worst some hundred: not for a step,
    nor for a process that runs steps.
    """
    return ClosingSearch(matcher, vocabulary, _START_STATES).ending()


class ClosingGuard:
    """Keeps an end in reach of one sequence. `max_tokens` bounds its output, the end token counts.

    `end_ids` are the tokens that may follow a complete grammar.
    """

    def __init__(self, start: ClosingStart, max_tokens: int, end_ids: Sequence[int]) -> None:
        self._start = start
        self._end_ids = end_ids
        self._matcher = start.matcher  # over bytes; copied before it moves
        self._unread: list[int] = []  # outputs that it has not taken yet, as its tokens
        self._num_left = max_tokens
        self._next_look = max_tokens  # the tokens left at which to look again
        self._ending: Ending | None = None  # known while tokens are scarce
        self._tried: tuple[int, Ending | None] | None = None  # a token, and the ending behind it
        self._num_ends = 1  # the end token
        self._take(start.ending)

    def forced_token(self, token_id: int) -> int:
        """The sampled token, or the ending's next one if the end is out of reach behind it."""
        ending = self._ending
        if ending is None or token_id in self._end_ids:
            return token_id
        after = self._after(token_id)
        if after is not None and self._fits(after, self._num_left - 1):
            return token_id
        if ending.num_tokens:
            return ending.first_token
        return self._end_ids[0] if self._end_ids else token_id

    def record(self, token_id: int) -> None:
        """Take an output token that the grammar takes."""
        ending = self._ending
        after = None if ending is None else self._after(token_id)
        self._tried = None
        self._unread += self._start.vocabulary.byte_ids(self._start.vocabulary.path_of(token_id))
        self._num_left -= 1
        if ending is not None:
            self._take(after)
        elif self._num_left <= self._next_look:
            self._take(self._searched(self._current()))

    def _take(self, ending: Ending | None) -> None:
        """Keep the ending while tokens are scarce; else, or without one, say when to look again."""
        num_left = self._num_left
        if ending is None:
            self._ending = None
            self._next_look = num_left - max(1, num_left // _LEFT_PER_RETRY)
            return
        if ending.num_tokens > num_left:  # further on it is no nearer
            self._ending = None
            self._next_look = _NEVER
            return
        if not self._fits(ending, num_left):
            self._num_ends = 0  # it just fits without the end token
        room = num_left - ending.num_tokens - _KEPT_ROOM
        is_roomy = room >= _ROOM_PER_TOKEN
        self._ending = None if is_roomy else ending
        if is_roomy:
            self._next_look = num_left - room // _ROOM_PER_TOKEN

    def _fits(self, ending: Ending, num_left: int) -> bool:
        return ending.num_tokens + self._num_ends <= num_left or not ending.path

    def _after(self, token_id: int) -> Ending | None:
        """An ending behind a token; while tokens are scarce."""
        if self._tried is None or self._tried[0] != token_id:
            self._tried = (token_id, self._ending_after(token_id))
        return self._tried[1]

    def _ending_after(self, token_id: int) -> Ending | None:
        ending = self._ending
        assert ending is not None, "an ending is known"
        if ending.num_tokens and token_id == ending.first_token:
            return ending.after_first_token()
        vocabulary = self._start.vocabulary
        matcher = self._current().deep_copy()
        if not matcher.consume_tokens(vocabulary.byte_ids(vocabulary.path_of(token_id))):
            return None
        return self._searched(matcher)

    def _searched(self, matcher: LLMatcher) -> Ending | None:
        """An ending from a state; most often what is known leads there in a few bytes."""
        known = [ending for ending in (self._ending, self._start.ending) if ending is not None]
        return ClosingSearch(matcher, self._start.vocabulary, _MAX_STATES, known).ending()

    def _current(self) -> LLMatcher:
        """The matcher over bytes, after all outputs."""
        if self._unread:
            if self._matcher is self._start.matcher:
                self._matcher = self._matcher.deep_copy()
            self._matcher.consume_tokens(self._unread)
            self._unread = []
        return self._matcher
