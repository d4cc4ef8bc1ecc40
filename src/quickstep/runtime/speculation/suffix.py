"""Suffix decoding: the continuations of the text's longest repeated suffixes, with their counts.

For a text, all earlier occurrences of its last tokens are the candidates. The draft starts with the
token that most of them continue with; those that agree remain the candidates for the next token,
as in a walk down a suffix tree. The estimated probability of a draft token is the product of these
shares, and the draft ends where it is too small. Longer matches have fewer candidates: the match
length with the highest sum of probabilities decides (SuffixDecoding, arXiv:2411.04975).

Candidates come from the sequence itself and from outputs that ended recently, of the same tenant,
cache salt and adapter; nothing passes between others. A text is an array with a chain of earlier
occurrences of each n-gram, as in LZ77: about 8 bytes per token and a dictionary entry per distinct
n-gram, where a suffix tree of Python objects takes many times as much.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from quickstep.errors import ConfigError
from quickstep.runtime.speculation.proposer import DraftTask
from quickstep.types import Admission

__all__ = ["OccurrenceIndex", "RecentOutputs", "SuffixProposer"]

_KEY_LEN = 2  # tokens of an indexed n-gram, the shortest match
_MAX_CANDIDATES = 32  # occurrences that are compared, the newest
_NO_POSITION = -1
_SEPARATOR = -1  # between outputs; no token id

SharingKey = tuple[str, str, str]


class SuffixProposer:
    """Drafts from repeated suffixes.

    Args:
        max_tree_depth: Longest match that is told apart from longer ones, in tokens.
        max_spec_factor: A draft is at most so many times as long as the match.
        min_token_prob: Least estimated probability of a draft token.
        max_cached_tokens: Tokens of recent outputs that are kept, over all tenants; 0 for none.
        max_indexed_per_call: Tokens that one `propose` indexes at most, so that a long prompt
            delays no step; what is not indexed yet is not found.

    Raises ConfigError for a value outside its range.
    """

    name = "suffix"
    needs_hidden = False

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_cached_tokens: int = 100_000,
        max_indexed_per_call: int = 4096,
    ) -> None:
        if max_tree_depth < 2:
            raise ConfigError(f"suffix_decoding_max_tree_depth is {max_tree_depth}, at least 2")
        if not max_spec_factor > 0.0:
            raise ConfigError(f"suffix_decoding_max_spec_factor is {max_spec_factor}, not above 0")
        if not 0.0 <= min_token_prob <= 1.0:
            raise ConfigError(f"suffix_decoding_min_token_prob is {min_token_prob}, not 0 to 1")
        if max_cached_tokens < 0:
            raise ConfigError(f"the suffix cache has {max_cached_tokens} tokens, less than 0")
        self._max_match = max_tree_depth
        self._max_spec_factor = max_spec_factor
        self._min_prob = min_token_prob
        self._max_indexed = max_indexed_per_call
        self._recent = RecentOutputs(max_cached_tokens)
        self._slots: dict[int, _SlotText] = {}

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        self.release(slot)
        self._slots[slot] = _SlotText(admission)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        self._slots[slot].text.tokens.extend(token_ids)

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        """`Proposer.propose`."""
        drafts = []
        budget = self._max_indexed
        for task in tasks:
            own = self._slots[task.slot]
            own.text.tokens.extend(task.new_token_ids)
            recent = self._recent.of(own.sharing_key)
            for text in (own.text, recent):
                if text is not None:
                    budget -= text.index(budget)
            drafts.append(self._draft(own.text, recent, task.num_drafts))
        return drafts

    def release(self, slot: int) -> None:
        """`Proposer.release`. The output is kept for the other sequences of its tenant."""
        left = self._slots.pop(slot, None)
        if left is not None:
            self._recent.add(left.sharing_key, left.text.tokens[left.num_known :])

    def _draft(
        self, own: OccurrenceIndex, recent: OccurrenceIndex | None, num_drafts: int
    ) -> tuple[int, ...]:
        suffix = own.tokens[-self._max_match :]
        best: tuple[int, ...] = ()
        best_score = 0.0
        for text in (own, recent):
            if text is None or best_score >= num_drafts:
                continue
            matches = text.matches(suffix, is_own=text is own)
            for match_len in sorted(set(matches.values()), reverse=True):
                longest = min(num_drafts, int(match_len * self._max_spec_factor))
                if longest <= best_score:
                    break  # a shorter match has a shorter draft
                ends = [end for end, length in matches.items() if length >= match_len]
                draft, score = text.continuation(ends, longest, self._min_prob)
                if score > best_score:
                    best, best_score = draft, score
        return best


class _SlotText:
    """The text of a slot's sequence. The first `num_known` tokens were there at its admission."""

    def __init__(self, admission: Admission) -> None:
        self.text = OccurrenceIndex(admission.token_ids)
        self.num_known = len(admission.token_ids)
        self.sharing_key = (admission.tenant, admission.cache_salt, admission.adapter)


class RecentOutputs:
    """Outputs that ended recently, apart for each sharing key: (tenant, cache salt, adapter).

    Holds at most `max_tokens` tokens and separators. Each key may use an eighth of them: its oldest
    outputs leave first, and the least recently used keys, so that no tenant displaces all others.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._texts: OrderedDict[SharingKey, OccurrenceIndex] = OrderedDict()
        self.num_tokens = 0

    def of(self, key: SharingKey) -> OccurrenceIndex | None:
        """The outputs of a key; None where there are none."""
        text = self._texts.get(key)
        if text is not None:
            self._texts.move_to_end(key)
        return text

    def add(self, key: SharingKey, token_ids: Sequence[int]) -> None:
        """Add an output. Of a longer one than fits, the end is kept."""
        limit = self._max_tokens // 8
        if limit < 2 or not token_ids:
            return
        text = self._texts.setdefault(key, OccurrenceIndex(()))
        self._texts.move_to_end(key)
        added = [*token_ids[max(0, len(token_ids) - limit + 1) :], _SEPARATOR]
        self.num_tokens -= len(text.tokens)
        excess = len(text.tokens) + len(added) - limit
        if excess > 0:  # drops more than it must, because all that remains is indexed again
            text = self._texts[key] = OccurrenceIndex(text.tokens[max(excess, limit // 4) :])
        text.tokens.extend(added)
        self.num_tokens += len(text.tokens)
        while self.num_tokens > self._max_tokens:
            _, dropped = self._texts.popitem(last=False)
            self.num_tokens -= len(dropped.tokens)


class OccurrenceIndex:
    """A growing text, and where each pair of tokens occurs in it.

    `tokens` may be extended at any time; `index` must follow before new occurrences are found. A
    position `end` is an occurrence's exclusive end, the index of the token that followed it.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.tokens = array("i", token_ids)
        # The newest end of each pair, and for each end the one before it of the same pair.
        self._newest: dict[tuple[int, int], int] = {}
        self._earlier = array("i", [_NO_POSITION] * _KEY_LEN)

    def index(self, max_tokens: int) -> int:
        """Index up to `max_tokens` further tokens; returns how many."""
        tokens, newest, earlier = self.tokens, self._newest, self._earlier
        first = len(earlier)
        stop = max(first, min(len(tokens) + 1, first + max_tokens))
        for end in range(first, stop):
            key = (tokens[end - 2], tokens[end - 1])
            earlier.append(newest.get(key, _NO_POSITION))
            newest[key] = end
        return stop - first

    def matches(self, suffix: array[int], is_own: bool) -> dict[int, int]:
        """The ends of the newest occurrences of the suffix's last tokens, each with the number of
        tokens that agree, at least two. `is_own`: the suffix is the end of this text.
        """
        tokens, earlier = self.tokens, self._earlier
        if len(suffix) < _KEY_LEN:
            return {}
        end = self._newest.get((suffix[-2], suffix[-1]), _NO_POSITION)
        if is_own and end == len(tokens):
            end = earlier[end]
        found: dict[int, int] = {}
        while end != _NO_POSITION and len(found) < _MAX_CANDIDATES:
            longest = min(len(suffix), end)
            if tokens[end - longest : end] == suffix[-longest:]:
                length = longest
            else:
                length = _KEY_LEN
                while tokens[end - length - 1] == suffix[-length - 1]:
                    length += 1
            found[end] = length
            end = earlier[end]
        return found

    def continuation(
        self, ends: Sequence[int], num_tokens: int, min_prob: float
    ) -> tuple[tuple[int, ...], float]:
        """The most frequent continuation of some ends, newest first, and the sum of the estimated
        probabilities of its tokens. Of equally frequent tokens, the newest is taken.
        """
        tokens, size = self.tokens, len(self.tokens)
        draft: list[int] = []
        score, probability = 0.0, 1.0
        while len(draft) < num_tokens:
            depth = len(draft)
            counts: dict[int, int] = {}
            following = []
            for end in ends:
                at = end + depth
                # An occurrence that overlaps the end of the text continues with the draft.
                token_id = tokens[at] if at < size else draft[at - size]
                counts[token_id] = counts.get(token_id, 0) + 1
                following.append(token_id)
            best = max(counts, key=counts.__getitem__)
            probability *= counts[best] / len(ends)
            if best == _SEPARATOR or probability < min_prob:
                break
            draft.append(best)
            score += probability
            if len(counts) > 1:
                ends = [
                    end for end, token_id in zip(ends, following, strict=True) if token_id == best
                ]
        return tuple(draft), score
