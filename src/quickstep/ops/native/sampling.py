"""Sampling of tokens on the native library: one call for all rows of a step.

`runtime/sampling/sampler.py` is the definition; the library computes the same bits
(csrc/kernels/sampler.cpp). Made by `ops.native.steps`, used by `runtime.sampling.native_sampler`.
"""

from __future__ import annotations

import ctypes

from quickstep.ops.dtypes import UINT8
from quickstep.ops.host_tensor import HostTensor
from quickstep.ops.native.library import raise_for_status
from quickstep.ops.native.step_abi import SampleCall

__all__ = ["RowSampler"]


class RowSampler:
    """Owns the calls' memory. Not for two threads at a time."""

    def __init__(self, library: ctypes.CDLL, context: int, owner: object, vocab_size: int) -> None:
        self._sample_rows = library.qs_sample_rows
        self._scratch_bytes = library.qs_sample_scratch_bytes
        self._context = context
        self._owner = owner
        self._vocab_size = vocab_size
        self._scratch = HostTensor.empty((0,), UINT8)
        self._calls = (SampleCall * 0)()
        self._calls_address = 0

    def calls(self, num_rows: int) -> ctypes.Array[SampleCall]:
        """At least `num_rows` calls to fill; what they held before is still in them."""
        if len(self._calls) < num_rows:
            self._calls = (SampleCall * max(num_rows, 2 * len(self._calls)))()
            self._calls_address = ctypes.addressof(self._calls)
            nbytes = self._scratch_bytes(self._context, self._vocab_size, len(self._calls))
            self._scratch = HostTensor.empty((nbytes,), UINT8)
        return self._calls

    def run(self, num_rows: int) -> None:
        """Sample a token for each of the first rows; the calls hold the results."""
        status = self._sample_rows(
            self._context,
            self._calls_address,
            num_rows,
            self._vocab_size,
            self._scratch.data_ptr(),
        )
        if status:
            raise_for_status(status, "sampling tokens")
