"""Whole steps on the native library: programs of recorded calls, draws and scores of tokens.

One per native op table (`OpTable.steps`), which `ops.native.backend` builds. Used by
`runtime.capture` and `runtime.sampling.native_sampler`; where it is None, steps run op by op and
draws in NumPy.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from quickstep.ops.native.library import raise_for_status
from quickstep.ops.native.packed import kernel_dtype
from quickstep.ops.native.program import Program
from quickstep.ops.native.sampling import RowDraws
from quickstep.ops.native.scores import TokenScores
from quickstep.ops.recording import Recording

if TYPE_CHECKING:
    from torch import Tensor

    from quickstep.ops.host_tensor import HostTensor

__all__ = ["NativeSteps"]


class NativeSteps:
    """Makes programs, draws and scores on one context; `owner` keeps that alive."""

    def __init__(self, library: ctypes.CDLL, context: int, owner: object) -> None:
        self._library = library
        self._context = context
        self._owner = owner

    def program(
        self, recording: Recording, capacities: tuple[int, int], memory: HostTensor, block_size: int
    ) -> Program:
        """The recording bound to `memory`, for steps of up to (tokens, emitting rows)."""
        return Program(
            self._library, self._context, self._owner, recording, capacities, memory, block_size
        )

    def draws(self, vocab_size: int) -> RowDraws:
        """Draws from rows of `vocab_size` logits."""
        return RowDraws(self._library, self._context, self._owner, vocab_size)

    def scores(self, vocab_size: int) -> TokenScores:
        """Scores of given tokens from rows of `vocab_size` logits."""
        return TokenScores(self._library, self._context, self._owner, vocab_size)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """A recorded sum by itself: a + b of one shape and dtype, contiguous."""
        out = a.new_empty(a.shape)
        addresses = (a.data_ptr(), b.data_ptr())
        add = self._library.qs_add
        status = add(self._context, kernel_dtype(a.dtype), *addresses, a.numel(), out.data_ptr())
        if status:
            raise_for_status(status, "add")
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """A recorded product with a number by itself."""
        out = x.new_empty(x.shape)
        scale = self._library.qs_scale
        status = scale(
            self._context, kernel_dtype(x.dtype), x.data_ptr(), x.numel(), factor, out.data_ptr()
        )
        if status:
            raise_for_status(status, "scale")
        return out
