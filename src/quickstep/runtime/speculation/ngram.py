"""Prompt lookup: the tokens that followed the same n-gram earlier in the prompt or the output.

Of the sequence's last `max_n` tokens, then fewer down to `min_n`, the most recent earlier
occurrence decides (vLLM's method `ngram` takes the first one). An occurrence that overlaps the end
is continued with the draft itself, so a repeated phrase is drafted in full. Each sequence has its
own index, which is extended by a few dictionary entries per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quickstep.errors import ConfigError
from quickstep.runtime.speculation.proposer import DraftTask
from quickstep.types import Admission


class NgramProposer:
    """Looks up n-grams of `min_n` to `max_n` tokens. Raises ConfigError unless 1 <= min_n <= max_n.

    One `propose` indexes at most `max_indexed_per_call` tokens, so that a long prompt delays no
    step; what is not indexed yet is not found.
    """

    name = "ngram"
    needs_hidden = False

    def __init__(self, min_n: int = 2, max_n: int = 4, max_indexed_per_call: int = 4096) -> None:
        if not 1 <= min_n <= max_n:
            raise ConfigError(
                f"prompt_lookup_min is {min_n} and prompt_lookup_max is {max_n}; "
                "they must be at least 1, the first not larger than the second"
            )
        self._min_n = min_n
        self._max_n = max_n
        self._max_indexed = max_indexed_per_call
        self._slots: dict[int, _Ngrams] = {}

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        self._slots[slot] = _Ngrams(admission.token_ids, self._min_n, self._max_n)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        self._slots[slot].tokens.extend(token_ids)

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        """`Proposer.propose`."""
        drafts = []
        budget = self._max_indexed
        for task in tasks:
            ngrams = self._slots[task.slot]
            ngrams.tokens.extend(task.new_token_ids)
            budget -= ngrams.index(budget)
            drafts.append(ngrams.draft(task.num_drafts))
        return drafts

    def release(self, slot: int) -> None:
        """`Proposer.release`."""
        self._slots.pop(slot, None)


class _Ngrams:
    """The tokens of one sequence, and for each of their n-grams the end of its newest occurrence.

    The n-grams that end with the last token are not in the index: they are what is looked up.
    """

    def __init__(self, token_ids: Sequence[int], min_n: int, max_n: int) -> None:
        self.tokens = array("i", token_ids)
        self._lengths = range(min_n, max_n + 1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = min_n - 1

    def index(self, max_tokens: int) -> int:
        """Index up to `max_tokens` further tokens; returns how many."""
        tokens, ends, lengths = self.tokens, self._ends, self._lengths
        first = self._num_indexed + 1
        stop = max(first, min(len(tokens), first + max_tokens))
        for end in range(first, stop):
            for n in lengths:
                if n <= end:
                    ends[tuple(tokens[end - n : end])] = end
        self._num_indexed = stop - 1
        return stop - first

    def draft(self, num_drafts: int) -> tuple[int, ...]:
        """What followed the longest n-gram that was found; () if there is none."""
        tokens = self.tokens
        for n in reversed(self._lengths):
            end = self._ends.get(tuple(tokens[-n:])) if n < len(tokens) else None
            if end is not None:
                period = len(tokens) - end
                draft = list(tokens[end : end + num_drafts])
                while len(draft) < num_drafts:
                    draft.append(draft[-period])
                return tuple(draft)
        return ()
