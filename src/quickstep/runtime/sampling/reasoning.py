"""Reasoning at the beginning of an output: where it ends, its budget, and a grammar after it.

The reasoning is between two tags, opened by the output or by the prompt, as the parser of
`text.tool_calls.formats` reads it from the text. The tags are searched for in the tokens' bytes,
since a tag shares tokens with its neighbours in many ways. Everything here is a function of the
output tokens (and of the grammar and the limit). Owned by the sequence's `SamplingState`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from quickstep.runtime.sampling.grammar import GrammarConstraint, GrammarStart
from quickstep.runtime.sampling.logit_changes import bits_of_ids
from quickstep.sampling_params import ReasoningTokens

_SPACE = b" \t\n\r"
_NEW_LINES = (b"\n", b"\n\n")
_EMPTY_LINES = 2  # line breaks that are allowed between the closing tag and the answer


class ReasoningPlace(enum.Enum):
    """Where the next token is. GAP: only line breaks have followed the closing tag."""

    BEFORE = "before"
    INSIDE = "inside"
    GAP = "gap"
    AFTER = "after"


class ReasoningTracker:
    """Follows the output tokens of one sequence."""

    def __init__(self, tags: ReasoningTokens, outputs: Sequence[int] = ()) -> None:
        self._tags = tags
        self.place = ReasoningPlace.INSIDE if tags.starts_open else ReasoningPlace.BEFORE
        self.has_begun = tags.starts_open  # whether there is any reasoning
        self.num_inside = 0  # tokens since the opening tag
        self._num_lines = _EMPTY_LINES
        self.num_matched = 0  # bytes of the tag that is looked for, at the end of the text
        self._last: list[int] = []  # the last tokens inside, as many as the closing tag has
        for token_id in outputs:
            self.record(token_id)

    @property
    def closing_token(self) -> int:
        """The next token of the closing tag, of which the output may have written some."""
        return self.closing_rest[0]

    @property
    def closing_rest(self) -> tuple[int, ...]:
        """The tokens of the closing tag that are not written yet, at least one."""
        closing = self._tags.closing_ids
        written = max(
            n for n in range(len(closing)) if self._last[len(self._last) - n :] == [*closing[:n]]
        )
        return tuple(closing[written:])

    @property
    def num_to_close(self) -> int:
        """Tokens that the closing tag takes, from its beginning."""
        return len(self._tags.closing_ids)

    def record(self, token_id: int) -> None:
        """Take an output token."""
        if self.place is ReasoningPlace.AFTER:
            return
        text = self._tags.pieces.get(token_id)
        if self.place is ReasoningPlace.GAP:
            self._num_lines -= len(text) if text in _NEW_LINES else _EMPTY_LINES
            if self._num_lines <= 0:
                self.place = ReasoningPlace.AFTER
        elif self.place is ReasoningPlace.BEFORE:
            self._seek_opening(text)
        else:
            self.num_inside += 1
            self._last = [*self._last, token_id][-len(self._tags.closing_ids) :]
            self._seek_closing(text)

    def opening_ids(self) -> npt.NDArray[np.int64]:
        """Ids [n] of tokens that begin or continue the opening tag."""
        rest = self._tags.opening[self.num_matched :]
        pieces = self._tags.pieces.items()
        return _ids(token_id for token_id, text in pieces if rest.startswith(text))

    def overshooting_ids(self) -> npt.NDArray[np.int64]:
        """Ids [n] of tokens with text after the closing tag, which no grammar could check."""
        closing = self._tags.closing
        begun = closing[: self.num_matched]
        return _ids(
            token_id
            for token_id, text in self._tags.pieces.items()
            if (begun + text).partition(closing)[2].strip(_SPACE)
        )

    def empty_line_ids(self) -> npt.NDArray[np.int64]:
        """Ids [n] of tokens allowed between the closing tag and the answer: line breaks only."""
        lines = _NEW_LINES[: self._num_lines]
        pieces = self._tags.pieces.items()
        return _ids(token_id for token_id, text in pieces if text in lines)

    def _seek_opening(self, text: bytes | None) -> None:
        opening = self._tags.opening
        if text is None:
            self.place = ReasoningPlace.AFTER
            return
        seen = opening[: self.num_matched] + text
        if not self.num_matched:
            seen = seen.lstrip(_SPACE)
        if seen.startswith(opening):
            self.place = ReasoningPlace.INSIDE
            self.has_begun = True
            self.num_matched = 0
            self._seek_closing(seen[len(opening) :])
        elif opening.startswith(seen):
            self.num_matched = len(seen)
        else:
            self.place = ReasoningPlace.AFTER

    def _seek_closing(self, text: bytes | None) -> None:
        if text is None:
            self.num_matched = 0
            return
        closing = self._tags.closing
        seen = closing[: self.num_matched] + text
        if closing in seen:
            is_at_end = seen.endswith(closing)
            self.place = ReasoningPlace.GAP if is_at_end else ReasoningPlace.AFTER
            return
        longest = min(len(seen), len(closing) - 1)
        self.num_matched = next(n for n in range(longest, -1, -1) if seen.endswith(closing[:n]))


class ThinkingBudget:
    """Ends the reasoning once it has had its tokens: a message, if there is one, and the closing
    tag are written, token by token.
    """

    def __init__(self, budget: int, tags: ReasoningTokens, outputs: Sequence[int]) -> None:
        self._budget = budget
        self._tags = tags
        self._message = tags.message_ids
        self._reasoning = ReasoningTracker(tags)
        for token_id in outputs:
            self.record(token_id)

    @property
    def forced_token(self) -> int | None:
        """The only token that may follow; None while there is budget, or nothing to close."""
        return next(iter(self.next_tokens()), None)

    def next_tokens(self) -> tuple[int, ...]:
        """The tokens that must come next: the rest of the message and of the closing tag."""
        reasoning = self._reasoning
        if reasoning.place is not ReasoningPlace.INSIDE or reasoning.num_inside < self._budget:
            return ()
        if not self._message:
            return reasoning.closing_rest
        # the tag follows in full, also a message that ends with what it begins with
        forced = (*self._message, *self._tags.closing_ids)
        return forced[reasoning.num_inside - self._budget :] or reasoning.closing_rest

    def record(self, token_id: int) -> None:
        """Take an output token."""
        reasoning = self._reasoning
        reasoning.record(token_id)
        is_used_up = (
            reasoning.place is ReasoningPlace.INSIDE and reasoning.num_inside == self._budget
        )
        if is_used_up and reasoning.closing_rest != self._tags.closing_ids:
            self._message = ()  # the model closes the reasoning by itself


class ReasonedGrammar:
    """A grammar that begins after the reasoning, which is free.

        BEFORE   the grammar, or the opening tag       a model need not reason
        INSIDE   anything but an end token             near the limit: only the closing tag
                 (an answer that may be empty needs neither)
        GAP      line breaks, or the grammar         as models write them after the tag
        AFTER    the grammar

    It has the interface of `GrammarConstraint`. The reasoning is closed in time for the grammar's
    shortest end. `max_tokens` bounds the output, the end token counts; None for no limit.
    """

    def __init__(self, start: GrammarStart, tags: ReasoningTokens, max_tokens: int | None) -> None:
        self._start = start
        self._num_left = max_tokens
        self._reasoning = ReasoningTracker(tags)
        # None inside the reasoning, and where only the opening tag can follow
        self._grammar: GrammarConstraint | None = None
        self._num_to_end: int | None = None  # tokens from the closing tag to the grammar's end
        # masks inside the reasoning, by the bytes of the closing tag that are written
        self._inside: dict[int, npt.NDArray[np.uint64]] = {}
        if self._reasoning.place is ReasoningPlace.BEFORE:
            self._grammar = start.constraint(max_tokens)
        else:
            self._measure()
        self.failure = ""

    def allowed_bits(self) -> npt.NDArray[np.uint64]:
        """The mask of tokens that may come next, as in `LogitChanges.allowed`.

        Sets `failure` at a matcher's limit.
        """
        reasoning, vocab_size = self._reasoning, self._start.vocab_size
        if reasoning.place is ReasoningPlace.INSIDE:
            if self.must_close:
                only = np.array([reasoning.closing_token], dtype=np.int64)
                return bits_of_ids(only, vocab_size)
            return self._inside_bits()
        if reasoning.place is ReasoningPlace.AFTER:
            return self._of_grammar()
        also = reasoning.opening_ids()
        if reasoning.place is ReasoningPlace.GAP:
            also = reasoning.empty_line_ids()
        return self._of_grammar() | bits_of_ids(also[also < vocab_size], vocab_size)

    def record(self, token_id: int) -> None:
        """Take an output token that was allowed."""
        before = self._reasoning.place
        is_layout = before is ReasoningPlace.GAP and token_id in self._reasoning.empty_line_ids()
        self._reasoning.record(token_id)
        place = self._reasoning.place
        if self._num_left is not None:
            self._num_left -= 1
        if place is ReasoningPlace.INSIDE:
            self._grammar = None
            if before is ReasoningPlace.BEFORE:
                self._measure()
        elif before in (ReasoningPlace.BEFORE, ReasoningPlace.INSIDE) and self._reasoning.has_begun:
            # the guard does not count the tokens that line breaks may take
            layout = _EMPTY_LINES if place is ReasoningPlace.GAP else 0
            left = None if self._num_left is None else max(0, self._num_left - layout)
            self._grammar = self._start.constraint(left)
        elif is_layout:
            return
        elif self._grammar is not None:
            self._grammar.record(token_id)
            if place is ReasoningPlace.BEFORE and self._grammar.failure:
                self._grammar = None
            else:
                self.failure = self._grammar.failure
        elif place is ReasoningPlace.AFTER:
            self.failure = f"neither the grammar nor the reasoning takes token {token_id}"

    def forced_token(self, token_id: int) -> int:
        """The sampled token, or one that leads to the end if the limit would cut the output."""
        return token_id if self._grammar is None else self._grammar.forced_token(token_id)

    def next_tokens(self) -> tuple[int, ...]:
        """The tokens that must come next, as far as they are known."""
        if self._reasoning.place is ReasoningPlace.INSIDE:
            return self._reasoning.closing_rest if self.must_close else ()
        if self._reasoning.place is not ReasoningPlace.AFTER or self._grammar is None:
            return ()
        return self._grammar.next_tokens()

    @property
    def must_close(self) -> bool:
        """Whether the reasoning has to be closed: the closing tag and the grammar's shortest end
        take all tokens that are left.
        """
        if self._reasoning.place is not ReasoningPlace.INSIDE:
            return False
        if self._num_left is None or self._num_to_end is None:
            return False
        return self._num_left <= self._reasoning.num_to_close + self._num_to_end

    def _measure(self) -> None:
        """Find out how many tokens the end takes from the closing tag on: the grammar's shortest
        text, the end token, and what line breaks may take.
        """
        if self._num_left is None or self._start.may_be_empty:
            return
        num_tokens = self._start.num_to_end
        if num_tokens is not None:
            self._num_to_end = num_tokens + 1 + _EMPTY_LINES

    def _inside_bits(self) -> npt.NDArray[np.uint64]:
        """The mask inside the reasoning. It is read-only: a mask of all tokens takes too long to
        build for each of them.
        """
        num_matched = self._reasoning.num_matched
        bits = self._inside.get(num_matched)
        if bits is None:
            vocab_size = self._start.vocab_size
            banned = self._reasoning.overshooting_ids()
            if not self._start.may_be_empty:
                banned = np.concatenate([self._start.end_ids, banned])
            free = bits_of_ids(np.arange(vocab_size), vocab_size)
            bits = free & ~bits_of_ids(banned, vocab_size)
            bits.flags.writeable = False
            self._inside[num_matched] = bits
        return bits

    def _of_grammar(self) -> npt.NDArray[np.uint64]:
        if self._grammar is None:
            return bits_of_ids(np.empty(0, dtype=np.int64), self._start.vocab_size)
        allowed = self._grammar.allowed_bits()
        self.failure = self._grammar.failure
        return allowed


def _ids(token_ids: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(sorted(token_ids), dtype=np.int64)
