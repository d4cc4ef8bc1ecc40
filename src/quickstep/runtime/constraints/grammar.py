"""Which tokens a sequence's grammar allows next.

Owned by the sequence's `SamplingState`, and a function of the grammar and the output tokens alone:
the sequences beside it, chunking, preemption (the tokens are replayed) and overlap (tokens come in
their order) change nothing. The matcher is llguidance's; the builder of the runner says how one is
made, so nothing here compiles, and llguidance is loaded by the first grammar only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quickstep.errors import RequestError
from quickstep.runtime.constraints.closing import ClosingGuard, ClosingStart
from quickstep.runtime.sampling.logit_changes import bits_of_bytes, bits_of_ids
from quickstep.types import Admission, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarConstraint", "GrammarStart", "NewMatcher", "grammar_start"]

# A matcher of its own for one sequence, at the grammar's start, and how it is brought to its end.
# Raises RequestError.
NewMatcher = Callable[[Grammar], "tuple[LLMatcher, ClosingStart]"]

# Ends that are the grammar's own; any other one is a limit that was hit.
_COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")


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
        """Bit i % 64 of word i / 64: token i may come next. Sets `failure` at a matcher's limit."""
        if not self._is_complete:
            allowed = bits_of_bytes(self._matcher.compute_bitmask(), self._vocab_size)
            self._note_failure()
        if self._is_complete:
            allowed = bits_of_ids(self._end_ids, self._vocab_size)
        return allowed

    def record(self, token_id: int) -> None:
        """Take an output token that was allowed. After the end nothing changes any more.

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
        """Whether no text at all is complete."""
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
