"""Draws of tokens on the native library: one call for all rows of a step.

What a draw is, `runtime/sampling/sampler.py` defines; the library computes the same bits
(csrc/kernels/ draw.cpp). Made by `ops.native.steps`, used by `runtime.sampling.native_sampler`.
"""

from __future__ import annotations

import ctypes

from quickstep.ops.dtypes import UINT8
from quickstep.ops.host_tensor import HostTensor
from quickstep.ops.native.library import raise_for_status
from quickstep.ops.native.step_abi import DrawCall

__all__ = ["RowDraws"]


class RowDraws:
    """Owns the calls' memory. Not for two threads at a time."""

    def __init__(self, library: ctypes.CDLL, context: int, owner: object, vocab_size: int) -> None:
        self._draw_rows = library.qs_draw_rows
        self._scratch_bytes = library.qs_draw_scratch_bytes
        self._context = context
        self._owner = owner
        self._vocab_size = vocab_size
        self._scratch = HostTensor.empty((0,), UINT8)
        self._calls = (DrawCall * 0)()
        self._calls_address = 0

    def calls(self, num_rows: int) -> ctypes.Array[DrawCall]:
        """At least `num_rows` calls to fill; what they held before is still in them."""
        if len(self._calls) < num_rows:
            self._calls = (DrawCall * max(num_rows, 2 * len(self._calls)))()
            self._calls_address = ctypes.addressof(self._calls)
            nbytes = self._scratch_bytes(self._context, self._vocab_size, len(self._calls))
            self._scratch = HostTensor.empty((nbytes,), UINT8)
        return self._calls

    def run(self, num_rows: int) -> None:
        """Draw for the first rows; their results stand in the calls."""
        status = self._draw_rows(
            self._context,
            self._calls_address,
            num_rows,
            self._vocab_size,
            self._scratch.data_ptr(),
        )
        if status:
            raise_for_status(status, "drawing tokens")
