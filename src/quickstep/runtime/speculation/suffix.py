"""Suffix decoding: the continuations of the text's longest repeated suffixes, with their counts.

For a text, all earlier occurrences of its last tokens are the candidates. The draft starts with the
token that most of them continue with; those that agree remain the candidates for the next token,
as in a walk down a suffix tree. The estimated probability of a draft token is the product of these
shares, and the draft ends where it is too small. Longer matches have fewer candidates: the match
length with the highest sum of probabilities decides (SuffixDecoding, arXiv:2411.04975).

Candidates come from the sequence itself and from outputs that ended recently, of the same tenant,
cache salt and adapter; nothing passes between others. `ops.native.suffix` holds the texts and
searches them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from quickstep.errors import ConfigError
from quickstep.ops.native.suffix import NativeText, SuffixDrafts, SuffixTask
from quickstep.runtime.speculation.proposer import DraftTask
from quickstep.types import Admission

SharingKey = tuple[str, str, str]


class SuffixProposer:
    """Drafts from repeated suffixes.

    Args:
        max_tree_depth: Longest match that is distinguished from longer ones, in tokens.
        max_spec_factor: A draft is at most so many times as long as the match.
        min_token_prob: Least estimated probability of a draft token.
        max_cached_tokens: Tokens of recent outputs that are kept, over all tenants; 0 for none.
        max_indexed_per_call: Tokens that one `propose` indexes at most, so that a long prompt
            delays no step; what is not indexed yet is not found.

    Raises ConfigError for a value outside its range, and without the native library.
    """

    name = "suffix"
    needs_hidden = False

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_cached_tokens: int = 100_000,
        max_indexed_per_call: int = 32768,
    ) -> None:
        if max_tree_depth < 2:
            raise ConfigError(f"suffix_decoding_max_tree_depth is {max_tree_depth}, at least 2")
        if not max_spec_factor > 0.0:
            raise ConfigError(f"suffix_decoding_max_spec_factor is {max_spec_factor}, not above 0")
        if not 0.0 <= min_token_prob <= 1.0:
            raise ConfigError(f"suffix_decoding_min_token_prob is {min_token_prob}, not 0 to 1")
        if max_cached_tokens < 0:
            raise ConfigError(f"the suffix cache has {max_cached_tokens} tokens, less than 0")
        self._drafts = SuffixDrafts(
            max_tree_depth, max_spec_factor, min_token_prob, max_indexed_per_call
        )
        self._recent = RecentOutputs(max_cached_tokens, self._drafts.text)
        self._slots: dict[int, _SlotText] = {}

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        self.release(slot)
        text = self._drafts.text()
        text.append(admission.token_ids)
        self._slots[slot] = _SlotText(text, admission)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        self._slots[slot].text.append(token_ids)

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        """`Proposer.propose`."""
        searches = []
        for task in tasks:
            own = self._slots[task.slot]
            recent = self._recent.of(own.sharing_key)
            searches.append(SuffixTask(own.text, recent, task.new_token_ids, task.num_drafts))
        return self._drafts.propose(searches)

    def release(self, slot: int) -> None:
        """`Proposer.release`. The output is kept for the other sequences of its tenant."""
        left = self._slots.pop(slot, None)
        if left is not None:
            self._recent.add(left.sharing_key, left.text, left.num_known)


class _SlotText:
    """The text of a slot's sequence. The first `num_known` tokens were there at its admission."""

    def __init__(self, text: NativeText, admission: Admission) -> None:
        self.text = text
        self.num_known = len(admission.token_ids)
        self.sharing_key = (admission.tenant, admission.cache_salt, admission.adapter)


class RecentOutputs:
    """Outputs that ended recently, apart for each sharing key: (tenant, cache salt, adapter).

    Holds at most `max_tokens` tokens and separators. Each key may use an eighth of them: its oldest
    outputs leave first, and the least recently used keys, so that no tenant displaces all others.
    """

    def __init__(self, max_tokens: int, new_text: Callable[[], NativeText]) -> None:
        self._max_tokens = max_tokens
        self._new_text = new_text
        self._texts: OrderedDict[SharingKey, NativeText] = OrderedDict()
        self.num_tokens = 0

    def of(self, key: SharingKey) -> NativeText | None:
        """The outputs of a key; None where there are none."""
        text = self._texts.get(key)
        if text is not None:
            self._texts.move_to_end(key)
        return text

    def add(self, key: SharingKey, output: NativeText, first: int) -> None:
        """Add an output, the tokens from number `first` on. Of a longer one than fits, the end is
        kept.
        """
        limit = self._max_tokens // 8
        first = max(first, len(output) - limit + 1)
        num_added = len(output) - first + 1  # with a separator
        if limit < 2 or num_added < 2:
            return
        text = self.of(key) or self._new_text()
        self.num_tokens -= len(text)
        excess = len(text) + num_added - limit
        if excess > 0:  # drops more than it must, because all that remains is indexed again
            kept = self._new_text()
            kept.append_end(text, min(len(text), max(excess, limit // 4)))
            text = kept
        self._texts[key] = text
        text.append_end(output, first)
        text.append_separator()
        self.num_tokens += len(text)
        while self.num_tokens > self._max_tokens:
            _, dropped = self._texts.popitem(last=False)
            self.num_tokens -= len(dropped)
