"""Prompts to embeddings: one `Pool` per resident sequence gets the final hidden states row by row.

Owned by the sequence's slot. The mean adds in float64, token by token from the first one, so that
no bit depends on how the prompt was split into rows; after a preemption a sequence starts again
from its first token.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from quickstep.ops.tensors import AnyTensor, as_float64
from quickstep.types import Pooling

_TOKENS_PER_SLICE = 256


class Pool:
    """Pools the hidden states of one prompt."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._sum: npt.NDArray[np.float64] | None = None
        self.num_tokens = 0

    def add(self, hidden: AnyTensor) -> None:
        """Add the hidden states [T, H] of the next tokens of the prompt."""
        self.num_tokens += hidden.shape[0]
        if self.pooling is Pooling.LAST:
            self._sum = as_float64(hidden[-1])
            return
        if self.pooling is Pooling.CLS:
            if self._sum is None:
                self._sum = as_float64(hidden[0])
            return
        for start in range(0, hidden.shape[0], _TOKENS_PER_SLICE):
            values = as_float64(hidden[start : start + _TOKENS_PER_SLICE])
            if self._sum is not None:
                values = np.concatenate((self._sum[None], values))
            # accumulate, unlike sum, has one order of additions
            self._sum = np.add.accumulate(values, axis=0)[-1].copy()

    def embedding(self) -> tuple[float, ...] | None:
        """The pooled state scaled to length 1, as float32 values; None if it is not finite.

        The mean is not divided by the count: scaling to length 1 makes that unnecessary.
        """
        assert self._sum is not None, "a prompt has tokens"
        pooled = self._sum
        if not np.isfinite(pooled).all():
            return None
        largest = float(np.abs(pooled).max())
        if largest == 0.0:
            return tuple(0.0 for _ in range(pooled.shape[0]))
        pooled = pooled / largest
        length = math.sqrt(math.fsum((pooled * pooled).tolist()))
        return tuple(map(float, (pooled / length).astype(np.float32)))
