"""How earlier tokens change the logits of the next one: penalties, DRY and bad words.

Each class holds the state of one sequence, is a function of its prompt and output tokens only, and
reads only the logits that it changes. Owned by `SamplingState`, which records every output token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from quickstep.types import SamplingParams

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_MIN_SIZE = 64

# No logit outweighs it, and it is finite: a row where every token is penalised is still sampled
# from.
_LARGEST_PENALTY = 1e30
_MAX_COMPARISONS_PER_TOKEN = 8  # more cost as much as the loop of the Z-algorithm
_NO_PLACES = np.empty(0, dtype=np.int64)
_NO_PENALTIES = np.empty(0, dtype=np.int64), np.empty(0)


class Penalties:
    """Repetition, presence and frequency penalties.

    The list of tokens that they change grows by at most one entry per token; no other logits are
    read.
    """

    def __init__(
        self, sampling: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
    ) -> None:
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        seen = (*prompt, *outputs) if self._repetition != 1.0 else outputs
        token_ids = list(dict.fromkeys(seen))
        self._places = {token_id: place for place, token_id in enumerate(token_ids)}
        self._size = len(token_ids)
        self._ids = np.zeros(max(_MIN_SIZE, 2 * self._size), dtype=np.int64)
        self._ids[: self._size] = token_ids
        self._counts = np.zeros_like(self._ids)
        np.add.at(self._counts, [self._places[token_id] for token_id in outputs], 1)

    @property
    def token_ids(self) -> Ids:
        """The tokens that have penalties, each once."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Ids:
        """How often the sequence has generated each of `token_ids` [n]."""
        return self._counts[: self._size]

    def lowered(self, scores: Floats) -> Floats:
        """The logits [n] of `token_ids` [n] after the penalties."""
        if self._repetition != 1.0:
            with np.errstate(over="ignore"):  # a huge penalty sends a score to -inf: it is banned
                scores = np.where(scores < 0, scores * self._repetition, scores / self._repetition)
        if self._presence != 0.0 or self._frequency != 0.0:
            counts = self._counts[: self._size]
            amounts = self._presence + self._frequency * counts
            scores = scores - np.where(counts > 0, amounts, 0.0)
        return scores

    def record(self, token_id: int) -> None:
        """Count an output token."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._size
            if place == self._ids.shape[0]:
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1


class BadWords:
    """Which tokens would complete a bad word (vLLM's definition).

    The last token of a word is banned where the output so far ends in the tokens before it. Words
    are token sequences, which the engine has made from texts.
    """

    def __init__(
        self, words: Sequence[tuple[int, ...]], outputs: Sequence[int], vocab_size: int
    ) -> None:
        # tokens outside the vocabulary need no ban
        known = [word for word in words if 0 <= min(word) <= max(word) < vocab_size]
        self._always = frozenset(word[-1] for word in known if len(word) == 1)
        self._longer = tuple(word for word in known if len(word) > 1)
        longest = max((len(word) - 1 for word in self._longer), default=0)
        self._tail: deque[int] = deque(outputs, maxlen=longest)

    def banned(self) -> npt.NDArray[np.int64]:
        """The ids [n] of tokens that would complete a word, each once, ascending."""
        tail = tuple(self._tail)
        banned = set(self._always)
        for word in self._longer:
            num_before = len(word) - 1
            if tail[-num_before:] == word[:-1]:
                banned.add(word[-1])
        return np.array(sorted(banned), dtype=np.int64)

    def record(self, token_id: int) -> None:
        """Append an output token."""
        self._tail.append(token_id)


class DryPenalty:
    """DRY: a penalty on the token that would extend a repetition (llama.cpp's definition).

    After n tokens, let L(j) be how many tokens ending at an earlier position j equal the last ones
    of the text, as far as the last `dry_range` tokens reach and no further back than the last
    breaker. The token after j would make that repetition longer: with L(j) >= allowed_length it
    loses multiplier * base ** (L(j) - allowed_length), for the longest L(j) among its places.
    Prompt and output count.

    L grows with the text: the new L(j) is the old L(j - 1) + 1 where token j is the new token, else
    0. So a token costs one pass over the range, and an admission a few, at worst the Z-algorithm.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        breakers: Sequence[tuple[int, ...]],
        token_ids: Sequence[int],
        vocab_size: int,
        breaker_flags: bytes = b"",
    ) -> None:
        self._multiplier = sampling.dry_multiplier
        self._base = sampling.dry_base
        self._allowed_length = sampling.dry_allowed_length
        self._range = sampling.dry_range
        self._breaks = np.zeros(vocab_size, dtype=np.bool_)
        flags = np.frombuffer(breaker_flags, dtype=np.bool_)[:vocab_size]
        self._breaks[: flags.size] = flags
        single = [ids[0] for ids in breakers if len(ids) == 1]
        self._breaks[[token_id for token_id in single if token_id < vocab_size]] = True
        self._long_breakers = [np.array(ids) for ids in breakers if len(ids) > 1]
        self._num_tokens = num_tokens = len(token_ids)
        self._tokens = np.zeros(2 * num_tokens + 64, dtype=np.int64)
        self._tokens[:num_tokens] = token_ids
        # [j] = L(j) without the bounds of range and breakers, for j < num_tokens - 1
        self._lengths = np.zeros(2 * num_tokens + 64, dtype=np.int64)
        self._lengths[: max(0, num_tokens - 1)] = _suffix_matches(self._tokens[:num_tokens])
        self._run_len = self._count_run()

    def penalties(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The ids [n] of tokens that would continue a repetition, each once, and what the logit of
        each loses [n].
        """
        num_tokens, start = self._num_tokens, self._start
        if self._run_len < self._allowed_length or num_tokens - start < 2:
            return _NO_PENALTIES
        # a repetition begins inside the range, too
        lengths = np.minimum(
            self._lengths[start : num_tokens - 1], np.arange(1, num_tokens - start)
        )
        np.minimum(lengths, self._run_len, out=lengths)
        places = np.flatnonzero(lengths >= self._allowed_length)
        if not places.size:
            return _NO_PENALTIES
        token_ids, which = np.unique(self._tokens[start + 1 + places], return_inverse=True)
        longest = np.zeros(token_ids.shape[0], dtype=np.float64)
        np.maximum.at(longest, which, lengths[places])
        with np.errstate(over="ignore"):
            amounts = self._multiplier * self._base ** (longest - self._allowed_length)
        return token_ids, np.minimum(amounts, _LARGEST_PENALTY)

    def record(self, token_id: int) -> None:
        """Append the next token."""
        num_tokens = self._num_tokens
        if num_tokens == self._tokens.shape[0]:
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
        start = self._start
        same = self._tokens[start:num_tokens] == token_id
        grown = np.ones(num_tokens - start, dtype=np.int64)
        grown[1:] += self._lengths[start : max(start, num_tokens - 1)]
        self._lengths[start:num_tokens] = grown * same
        self._tokens[num_tokens] = token_id
        self._num_tokens += 1
        self._run_len = 0 if self._breaks_at(num_tokens) else self._run_len + 1

    @property
    def _start(self) -> int:
        """The first position in the range."""
        return max(0, self._num_tokens - self._range) if self._range else 0

    def _count_run(self) -> int:
        """How many tokens follow the last breaker."""
        num_tokens = self._num_tokens
        tokens = self._tokens[:num_tokens]
        breaks = self._breaks[tokens]
        for ids in self._long_breakers:
            size = len(ids)
            if size <= num_tokens:
                ends = breaks[size - 1 :]
                ends |= (sliding_window_view(tokens, size) == ids).all(axis=1)
        places = np.flatnonzero(breaks)
        return int(num_tokens - 1 - places[-1]) if places.size else num_tokens

    def _breaks_at(self, place: int) -> bool:
        """Whether a breaker ends at this position."""
        if self._breaks[self._tokens[place]]:
            return True
        end = place + 1
        return any(
            len(ids) <= end and bool((self._tokens[end - len(ids) : end] == ids).all())
            for ids in self._long_breakers
        )


def _suffix_matches(tokens: Ids) -> Ids:
    """[j] = how many tokens ending at j equal those that end the text; for all but the last j.

    Positions where one more token matches are compared together, as long as they are few: in
    ordinary text a repetition is rare and has few tokens.
    """
    size = tokens.shape[0]
    lengths = np.zeros(max(0, size - 1), dtype=np.int64)
    places = np.flatnonzero(tokens[:-1] == tokens[-1]) if size else _NO_PLACES
    num_comparisons, length = 0, 0
    while places.size:
        length += 1
        lengths[places] = length
        places = places[places >= length]
        num_comparisons += places.size
        if (
            num_comparisons > _MAX_COMPARISONS_PER_TOKEN * size
        ):  # a text that repeats itself throughout
            return np.array(_prefix_matches(tokens[::-1].tolist())[:0:-1], dtype=np.int64)
        places = places[tokens[places - length] == tokens[size - 1 - length]]
    return lengths


def _prefix_matches(token_ids: Sequence[int]) -> list[int]:
    """[k] = how many tokens from k on equal those from 0 on: the Z-algorithm, in linear time."""
    size = len(token_ids)
    matches = [size] * min(size, 1) + [0] * (size - 1)
    left = right = 0
    for place in range(1, size):
        length = min(right - place, matches[place - left]) if place < right else 0
        while place + length < size and token_ids[length] == token_ids[place + length]:
            length += 1
        matches[place] = length
        if place + length > right:
            left, right = place, place + length
    return matches
