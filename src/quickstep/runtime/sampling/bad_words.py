"""Which tokens would complete a bad word (vLLM's meaning): a state of the last output tokens.

Owned by `SamplingState`. The words come as token sequences; the engine has made them from texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["BadWords"]


class BadWords:
    """The last token of a word is banned where the output so far ends in the tokens before it."""

    def __init__(
        self, words: Sequence[tuple[int, ...]], outputs: Sequence[int], vocab_size: int
    ) -> None:
        # what the model cannot write needs no ban
        known = [word for word in words if 0 <= min(word) <= max(word) < vocab_size]
        self._always = frozenset(word[-1] for word in known if len(word) == 1)
        self._longer = tuple(word for word in known if len(word) > 1)
        longest = max((len(word) - 1 for word in self._longer), default=0)
        self._tail: deque[int] = deque(outputs, maxlen=longest)

    def banned(self) -> npt.NDArray[np.int64]:
        """The tokens that would complete a word, each once."""
        tail = tuple(self._tail)
        banned = set(self._always)
        for word in self._longer:
            num_before = len(word) - 1
            if tail[-num_before:] == word[:-1]:
                banned.add(word[-1])
        return np.array(sorted(banned), dtype=np.int64)

    def record(self, token_id: int) -> None:
        """Take an output token."""
        self._tail.append(token_id)
