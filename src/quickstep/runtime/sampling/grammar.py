"""Which tokens a sequence's grammar allows next, and how its end is kept within the token limit.

A `GrammarConstraint` is owned by the sequence's `SamplingState`. It is a function of the grammar,
the output tokens and the limit alone: other sequences, chunking, preemption (the tokens are
replayed) and overlap (tokens come in their order) change nothing. The matcher is llguidance's. The
caller of the runner says how one is made: this module does not compile grammars, and llguidance is
loaded by the first grammar only.

A `ClosingGuard` keeps the end in reach. While many more tokens remain than the end takes, it checks
the distance now and then; when they become scarce, at every token: a sampled token from which no
end can be reached is replaced by the next one of the known ending. The ending from the grammar's
start comes with the compiled grammar; later ones are found by a search whose work per token is
bounded (`runtime.sampling.closing_search`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.errors import RequestError
from quickstep.runtime.sampling.closing_search import ClosingSearch, ClosingVocabulary, Ending
from quickstep.runtime.sampling.logit_changes import bits_of_bytes, bits_of_ids
from quickstep.types import Admission, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = [
    "ClosingGuard",
    "ClosingStart",
    "GrammarConstraint",
    "GrammarStart",
    "NewMatcher",
    "grammar_start",
    "start_ending",
]

# A matcher of its own for one sequence, at the grammar's start, and how it is brought to its end.
# Raises RequestError.
NewMatcher = Callable[[Grammar], "tuple[LLMatcher, ClosingStart]"]

# Ends that are the grammar's own; any other one is a limit that was hit.
_COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")

# A quarter of the tokens that the ending does not need may be sampled without a check, but for a
# reserve.
_RESERVE = 32
_SPARE_PER_TOKEN = 4
_LEFT_PER_RETRY = 2  # after a check that found no end, half of the tokens left are not checked
_NEVER = -1  # tokens left
_START_STATES = 1024  # looked at when a grammar is compiled
_MAX_STATES = 48  # looked at for one token


class GrammarConstraint:
    """A grammar's state after the output so far. `end_ids` are what may follow its end.

    `guard` keeps the end in reach; None where the output has no limit.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end_ids: npt.NDArray[np.int64],
        vocab_size: int,
        guard: ClosingGuard | None = None,
    ) -> None:
        self._matcher = matcher
        self._guard = guard
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self.failure = ""

    def allowed_bits(self) -> npt.NDArray[np.uint64]:
        """The mask of tokens that may come next, as in `LogitChanges.allowed`.

        Sets `failure` at a matcher's limit.
        """
        if not self._is_complete:
            allowed = bits_of_bytes(self._matcher.compute_bitmask(), self._vocab_size)
            self._note_failure()
        if self._is_complete:
            allowed = bits_of_ids(self._end_ids, self._vocab_size)
        return allowed

    def record(self, token_id: int) -> None:
        """Consume an output token that was allowed. After the end nothing changes any more.

        A row that was planned before the end was known runs after it; its token is dropped.
        """
        if self._is_complete or self.failure:
            return
        if not self._matcher.consume_token(token_id):
            self._note_failure()
            self.failure = self.failure or f"the grammar does not take token {token_id}"
        elif self._guard is not None and not self._is_complete:
            self._guard.record(token_id)

    def forced_token(self, token_id: int) -> int:
        """The sampled token, or one that leads to the end if the limit would cut the output."""
        if self._guard is None or self._is_complete or self.failure:
            return token_id
        return self._guard.forced_token(token_id)

    def next_tokens(self) -> tuple[int, ...]:
        """The tokens that must come next, as far as they are known: keys, punctuation."""
        if self._is_complete or self.failure:
            return ()
        return tuple(self._matcher.compute_ff_tokens())

    @property
    def _is_complete(self) -> bool:
        matcher = self._matcher
        return matcher.is_stopped() and matcher.stop_reason() in _COMPLETE and not self.failure

    def _note_failure(self) -> None:
        matcher = self._matcher
        if matcher.is_error():
            self.failure = f"the grammar cannot be followed: {_first_line(matcher.get_error())}"
        elif matcher.is_stopped() and matcher.stop_reason() not in _COMPLETE:
            self.failure = f"the grammar cannot be followed: {matcher.stop_reason()}"


class GrammarStart:
    """What a sequence's constraint starts with: a matcher that stays at the grammar's start."""

    def __init__(
        self,
        matcher: LLMatcher,
        closing: ClosingStart,
        end_ids: npt.NDArray[np.int64],
        vocab_size: int,
    ) -> None:
        self._matcher = matcher
        self._closing = closing
        self.end_ids = end_ids
        self.vocab_size = vocab_size

    @property
    def may_be_empty(self) -> bool:
        """Whether the empty text is complete."""
        return bool(self._matcher.is_accepting())

    @property
    def num_to_end(self) -> int | None:
        """The tokens of the shortest text that is known; None without any."""
        ending = self._closing.ending
        return None if ending is None else ending.num_tokens

    def constraint(self, max_tokens: int | None) -> GrammarConstraint:
        """A constraint that begins here, with so many tokens left."""
        guard = None
        if max_tokens is not None:
            guard = ClosingGuard(self._closing, max_tokens, self.end_ids.tolist())
        return GrammarConstraint(self._matcher.deep_copy(), self.end_ids, self.vocab_size, guard)


def grammar_start(
    admission: Admission, vocab_size: int, new_matcher: NewMatcher | None
) -> GrammarStart | None:
    """What the sequence's grammar starts with; None without a grammar.

    Raises:
        RequestError: The grammar is not one, or nothing here can compile it.
    """
    grammar = admission.sampling.grammar
    if grammar is None:
        return None
    if new_matcher is None:
        raise RequestError("grammar is not supported by this engine", param="grammar")
    ends = sorted(i for i in admission.eos_token_ids if 0 <= i < vocab_size)
    matcher, closing = new_matcher(grammar)
    return GrammarStart(matcher, closing, np.array(ends, dtype=np.int64), vocab_size)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


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
        self._unread: list[int] = []  # outputs that it has not consumed yet, as its tokens
        self._num_left = max_tokens
        self._next_check = max_tokens  # the tokens left at which to check again
        self._ending: Ending | None = None  # known while tokens are scarce
        self._tried: tuple[int, Ending | None] | None = None  # a token, and the ending after it
        self._num_ends = 1  # the end token
        self._take(start.ending)

    def forced_token(self, token_id: int) -> int:
        """The sampled token, or the ending's next one if no end can be reached after it."""
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
        elif self._num_left <= self._next_check:
            self._take(self._searched(self._current()))

    def _take(self, ending: Ending | None) -> None:
        """Keep the ending while tokens are scarce; otherwise set when to check again."""
        num_left = self._num_left
        if ending is None:
            self._ending = None
            self._next_check = num_left - max(1, num_left // _LEFT_PER_RETRY)
            return
        if ending.num_tokens > num_left:  # it will not come nearer
            self._ending = None
            self._next_check = _NEVER
            return
        if not self._fits(ending, num_left):
            self._num_ends = 0  # it just fits without the end token
        num_spare = num_left - ending.num_tokens - _RESERVE
        is_scarce = num_spare < _SPARE_PER_TOKEN
        self._ending = ending if is_scarce else None
        if not is_scarce:
            self._next_check = num_left - num_spare // _SPARE_PER_TOKEN

    def _fits(self, ending: Ending, num_left: int) -> bool:
        return ending.num_tokens + self._num_ends <= num_left or not ending.path

    def _after(self, token_id: int) -> Ending | None:
        """An ending after a token; only while tokens are scarce."""
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
