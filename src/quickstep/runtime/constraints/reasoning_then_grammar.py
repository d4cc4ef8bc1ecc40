"""A grammar that begins behind the reasoning, which is free.

    BEFORE   the grammar, or the opening tag          a model need not reason
    INSIDE   anything but an end token                near the limit: only the closing tag
             (an answer that may be empty needs neither)
    GAP      ends of lines, or the grammar            as models write them behind the tag
    BEHIND   the grammar

It answers what `GrammarConstraint` answers, and is like it a function of the grammar, the output
tokens and the limit. The reasoning is closed in time for the grammar's shortest end. Owned by the
sequence's `SamplingState`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quickstep.runtime.constraints.grammar import GrammarConstraint, GrammarStart
from quickstep.runtime.constraints.reasoning import EMPTY_LINES, Place, ReasoningTracker
from quickstep.runtime.sampling.logit_changes import bits_of_ids
from quickstep.sampling_params import ReasoningTokens

__all__ = ["ReasonedGrammar"]


class ReasonedGrammar:
    """One sequence's. `max_tokens` bounds its output, the end token counts; None for no limit."""

    def __init__(self, start: GrammarStart, tags: ReasoningTokens, max_tokens: int | None) -> None:
        self._start = start
        self._num_left = max_tokens
        self._reasoning = ReasoningTracker(tags)
        # None inside the reasoning, and where only the opening tag can follow
        self._grammar: GrammarConstraint | None = None
        self._num_to_end: int | None = None  # tokens from the closing tag to the grammar's end
        if self._reasoning.place is Place.BEFORE:
            self._grammar = start.constraint(max_tokens)
        else:
            self._measure()
        self.failure = ""

    def allowed_bits(self) -> npt.NDArray[np.uint64]:
        """Bit i % 64 of word i / 64: token i may come next. Sets `failure` at a matcher's limit."""
        reasoning, vocab_size = self._reasoning, self._start.vocab_size
        if reasoning.place is Place.INSIDE:
            if self._must_close:
                only = np.array([reasoning.closing_token], dtype=np.int64)
                return bits_of_ids(only, vocab_size)
            free = bits_of_ids(np.arange(vocab_size), vocab_size)
            banned = reasoning.overshooting_ids()
            if not self._start.may_be_empty:
                banned = np.concatenate([self._start.end_ids, banned])
            return free & ~bits_of_ids(banned, vocab_size)
        if reasoning.place is Place.BEHIND:
            return self._of_grammar()
        also = reasoning.opening_ids()
        if reasoning.place is Place.GAP:
            also = reasoning.empty_line_ids()
        return self._of_grammar() | bits_of_ids(also[also < vocab_size], vocab_size)

    def record(self, token_id: int) -> None:
        """Take an output token that was allowed."""
        before = self._reasoning.place
        is_layout = before is Place.GAP and token_id in self._reasoning.empty_line_ids()
        self._reasoning.record(token_id)
        place = self._reasoning.place
        if self._num_left is not None:
            self._num_left -= 1
        if place is Place.INSIDE:
            self._grammar = None
            if before is Place.BEFORE:
                self._measure()
        elif before in (Place.BEFORE, Place.INSIDE) and self._reasoning.has_begun:
            # the guard does not count the tokens that ends of lines may take
            layout = EMPTY_LINES if place is Place.GAP else 0
            left = None if self._num_left is None else max(0, self._num_left - layout)
            self._grammar = self._start.constraint(left)
        elif is_layout:
            return
        elif self._grammar is not None:
            self._grammar.record(token_id)
            if place is Place.BEFORE and self._grammar.failure:
                self._grammar = None
            else:
                self.failure = self._grammar.failure
        elif place is Place.BEHIND:
            self.failure = f"neither the grammar nor the reasoning takes token {token_id}"

    def forced_token(self, token_id: int) -> int:
        """The sampled token, or one that leads to the end if the limit would cut the output."""
        return token_id if self._grammar is None else self._grammar.forced_token(token_id)

    @property
    def _must_close(self) -> bool:
        """Whether the closing tag and the grammar's shortest end take all tokens that are left."""
        if self._num_left is None or self._num_to_end is None:
            return False
        return self._num_left <= self._reasoning.num_to_close + self._num_to_end

    def _measure(self) -> None:
        """Find out how many tokens the end takes from the closing tag on: the grammar's shortest
        text, the end token, and what ends of lines may take.
        """
        if self._num_left is None or self._start.may_be_empty:
            return
        num_tokens = self._start.num_to_end
        if num_tokens is not None:
            self._num_to_end = num_tokens + 1 + EMPTY_LINES

    def _of_grammar(self) -> npt.NDArray[np.uint64]:
        if self._grammar is None:
            return bits_of_ids(np.empty(0, dtype=np.int64), self._start.vocab_size)
        allowed = self._grammar.allowed_bits()
        self.failure = self._grammar.failure
        return allowed
