"""Scores of given tokens on the native library: one call for many rows of logits.

`runtime.sampling.logprobs` defines a score; the library computes the same bits
(csrc/kernels/token_score.h). Made by `ops.native_steps`, used by `runtime.sampling.logprobs`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.ops.dtypes import UINT8
from quickstep.ops.host_tensor import AnyTensor, HostTensor
from quickstep.ops.native.library import raise_for_status
from quickstep.ops.native.step_abi import ScoresCall

__all__ = ["ScoredTokens", "TokenScores"]


class ScoredTokens(msgspec.Struct, frozen=True):
    """By position T: `ranks` is negative where the logits have no finite maximum, and the other
    results hold anything there.
    """

    ranks: npt.NDArray[np.int64]  # [T]
    total_probabilities: npt.NDArray[np.int64]  # [T], sums of round(exp(logit - peak) * 2^44)
    peaks: npt.NDArray[np.float32]  # [T]
    chosen: npt.NDArray[np.float32]  # [T], the tokens' logits
    top_ids: npt.NDArray[np.int64]  # [T, num_top]
    top_logits: npt.NDArray[np.float32]  # [T, num_top]


class TokenScores:
    """Owns the scratch, as much as the threads use at once. Not for two threads at a time."""

    def __init__(self, library: ctypes.CDLL, context: int, owner: object, vocab_size: int) -> None:
        self._score_tokens = library.qs_score_tokens
        self._scratch_bytes = library.qs_sample_scratch_bytes
        self._context = context
        self._owner = owner
        self._vocab_size = vocab_size
        self._scratch = HostTensor.empty((0,), UINT8)

    def score(self, logits: AnyTensor, token_ids: Sequence[int], num_top: int) -> ScoredTokens:
        """`logits` [T, V] fp32, contiguous; `token_ids` [T]; `num_top` at most V."""
        count = len(token_ids)
        assert logits.shape == (count, self._vocab_size), "a row of logits for each token"
        assert logits.is_contiguous(), "rows stand one after another"
        nbytes = self._scratch_bytes(self._context, self._vocab_size, count)
        if self._scratch.nbytes < nbytes:
            self._scratch = HostTensor.empty((nbytes,), UINT8)
        ids = np.array(token_ids, dtype=np.int64)
        found = ScoredTokens(
            ranks=np.empty(count, dtype=np.int64),
            total_probabilities=np.empty(count, dtype=np.int64),
            peaks=np.empty(count, dtype=np.float32),
            chosen=np.empty(count, dtype=np.float32),
            top_ids=np.empty((count, num_top), dtype=np.int64),
            top_logits=np.empty((count, num_top), dtype=np.float32),
        )
        call = ScoresCall(
            logits=logits.data_ptr(),
            token_ids=ids.ctypes.data,
            num_positions=count,
            vocab_size=self._vocab_size,
            num_top=num_top,
            ranks=found.ranks.ctypes.data,
            total_probabilities=found.total_probabilities.ctypes.data,
            peaks=found.peaks.ctypes.data,
            chosen=found.chosen.ctypes.data,
            top_ids=found.top_ids.ctypes.data,
            top_logits=found.top_logits.ctypes.data,
        )
        address = ctypes.addressof(call)
        status = self._score_tokens(self._context, address, self._scratch.data_ptr())
        if status:
            raise_for_status(status, "scoring tokens")
        return found
