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
from quickstep.runtime.sampling.closing_search import (
    ClosingSearch,
    ClosingVocabulary,
    GrammarEnding,
)
from quickstep.runtime.sampling.logit_changes import bits_of_bytes, bits_of_ids
from quickstep.types import Admission, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

# A matcher of its own for one sequence, at the grammar's start, and how it is brought to its end.
# Raises RequestError.
NewMatcher = Callable[[Grammar], "tuple[LLMatcher, ClosingStart]"]

# Ends that are the grammar's own; any other one is a limit that was hit.
_COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")

# A quarter of the tokens that the ending does not need may be sampled without a check, but for a
# reserve.
_RESERVE = 32
_SPARE_PER_TOKEN = 4
_LEFT_PER_RETRY = 8  # after a check that found no end, an eighth of those left is not checked
_NEVER = -1  # tokens left
_FIRST_LEVELS = 8  # of brackets: the first one of each is measured
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
    ending: GrammarEnding | None


def start_ending(matcher: LLMatcher, vocabulary: ClosingVocabulary) -> GrammarEnding | None:
    """The ending from a grammar's start. Some milliseconds, at worst some hundred: not for a step,
    nor for a process that runs steps.
    """
    return ClosingSearch(matcher, vocabulary, _START_STATES).ending()


class _Levels:
    """The brackets that an output opens, and how many tokens each of them adds to its ending.

    A schema that contains itself has levels without end: each costs tokens to close, which can be
    more than those that open it. So the end is measured before the brackets that were opened since
    the last measure could take what is left. A comma counts as well: the next item can be a level.
    """

    def __init__(self) -> None:
        self._depth = self._deepest = 0
        self._is_text = self._is_escaped = False
        self._num_opened = self._num_commas = 0  # since the last measure
        self._measured_end = 0  # tokens of the ending there
        self._per_level = _SPARE_PER_TOKEN  # tokens, the most so far

    def read(self, path: str) -> None:
        """Follow an output token's text."""
        for character in path:
            if self._is_escaped:
                self._is_escaped = False
            elif character == '"':
                self._is_text = not self._is_text
            elif self._is_text:
                self._is_escaped = character == "\\"
            elif character in "{[":
                self._depth += 1
                self._num_opened += 1
            elif character in "}]":
                self._depth -= 1
            elif character == ",":
                self._num_commas += 1

    def measure(self, num_tokens: int) -> None:
        """Note how long the ending is now."""
        if self._num_opened or self._num_commas:
            per_level = -(-(num_tokens - self._measured_end) // max(self._num_opened, 1))
            self._per_level = max(per_level, self._per_level)
        self._deepest = max(self._depth, self._deepest)
        self._num_opened = self._num_commas = 0
        self._measured_end = num_tokens

    def may_take(self, path: str, num_left: int) -> bool:
        """Whether a token's text opens brackets that may need a good part of the tokens left."""
        if path.isalnum() or (self._is_text and '"' not in path):
            return False
        num_openers = path.count("{") + path.count("[")
        if num_openers and self._deepest < self._depth + num_openers <= _FIRST_LEVELS:
            return True
        num_new = num_openers + path.count(",")
        num_spare = num_left - self._measured_end - _RESERVE
        num_levels = self._num_opened + self._num_commas + num_new
        return num_new > 0 and num_levels * self._per_level > num_spare // _SPARE_PER_TOKEN


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
        self._ending: GrammarEnding | None = None  # known while tokens are scarce
        self._tried: tuple[int, GrammarEnding | None] | None = (
            None  # a token, and the ending after it
        )
        self._num_ends = 1  # the end token
        self._last: GrammarEnding | None = None  # that was found last
        self._here: tuple[GrammarEnding | None] | None = (
            None  # searched where a level may be opened
        )
        self._levels = _Levels()
        self._take(start.ending)

    def forced_token(self, token_id: int) -> int:
        """The sampled token, or the ending's next one if no end can be reached after it."""
        ending = self._ending_before(token_id)
        if ending is None or token_id in self._end_ids:
            return token_id
        after = self._after(token_id, ending)
        if after is not None and self._fits(after, self._num_left - 1):
            return token_id
        if ending.num_tokens:
            return ending.first_token
        return self._end_ids[0] if self._end_ids else token_id

    def record(self, token_id: int) -> None:
        """Take an output token that the grammar takes."""
        ending = self._ending_before(token_id)
        after = None if ending is None else self._after(token_id, ending)
        self._tried = self._here = None
        path = self._start.vocabulary.path_of(token_id)
        self._unread += self._start.vocabulary.byte_ids(path)
        self._levels.read(path)
        self._num_left -= 1
        if ending is not None:
            self._take(after)
        elif self._num_left <= self._next_check:
            self._take(self._searched(self._current()))

    def _ending_before(self, token_id: int) -> GrammarEnding | None:
        """The ending that a token is measured against: while tokens are scarce, and where a level
        is opened that may take what is left.
        """
        if self._ending is not None or self._next_check == _NEVER:
            return self._ending
        path = self._start.vocabulary.path_of(token_id)
        if not self._levels.may_take(path, self._num_left):
            return None
        if self._here is None:
            self._here = (self._searched(self._current()),)
        return self._here[0]

    def _take(self, ending: GrammarEnding | None) -> None:
        """Keep the ending while tokens are scarce; otherwise set when to check again."""
        num_left = self._num_left
        if ending is not None:
            self._last = ending
            self._levels.measure(ending.num_tokens)
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

    def _fits(self, ending: GrammarEnding, num_left: int) -> bool:
        return ending.num_tokens + self._num_ends <= num_left or not ending.path

    def _after(self, token_id: int, ending: GrammarEnding) -> GrammarEnding | None:
        """An ending after a token that is measured against the ending before it."""
        if self._tried is None or self._tried[0] != token_id:
            self._tried = (token_id, self._ending_after(token_id, ending))
        return self._tried[1]

    def _ending_after(self, token_id: int, ending: GrammarEnding) -> GrammarEnding | None:
        if ending.num_tokens and token_id == ending.first_token:
            return ending.after_first_token()
        vocabulary = self._start.vocabulary
        matcher = self._current().deep_copy()
        if not matcher.consume_tokens(vocabulary.byte_ids(vocabulary.path_of(token_id))):
            return None
        return self._searched(matcher)

    def _searched(self, matcher: LLMatcher) -> GrammarEnding | None:
        """An ending from a state; most often what is known leads there in a few bytes."""
        known = [ending for ending in (self._last, self._start.ending) if ending is not None]
        return ClosingSearch(matcher, self._start.vocabulary, _MAX_STATES, known).ending()

    def _current(self) -> LLMatcher:
        """The matcher over bytes, after all outputs."""
        if self._unread:
            if self._matcher is self._start.matcher:
                self._matcher = self._matcher.deep_copy()
            self._matcher.consume_tokens(self._unread)
            self._unread = []
        return self._matcher
