"""Repetition, presence and frequency penalties of one sequence, over the tokens they touch.

A list of touched tokens grows by at most one entry a token, so sampling looks at no others. Owned
by `SamplingState`; a function of the prompt and the output tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quickstep.types import SamplingParams

__all__ = ["Penalties"]

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_MIN_SIZE = 64


class Penalties:
    """Which tokens were seen, and how often each is in the output."""

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
        """The tokens that `lowered` is about; each once."""
        return self._ids[: self._size]

    def lowered(self, scores: Floats) -> Floats:
        """The logits of `token_ids` after the penalties."""
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
