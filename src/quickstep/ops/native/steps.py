"""Complete steps on the native library: programs of recorded calls, sampling and token scores.

One `NativeSteps` per native op table (`OpTable.steps`), made by `ops.native.backend`, used by
`runtime.steps.captured`, `runtime.sampling.native_sampler` and `runtime.sampling.prompt_scores`.
Where it is None, steps run op by op and tokens are sampled in NumPy. `runtime/sampling/sampler.py`
and `runtime/sampling/logprobs.py` define the results; the library computes the same bits
(csrc/kernels/sampler.cpp, csrc/kernels/token_score.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.ops.native.library import SampleCall, ScoresCall, raise_for_status
from quickstep.ops.native.packed import kernel_dtype
from quickstep.ops.native.program import Program, Recording
from quickstep.ops.native.ranks import NativeRanks, RankMemory
from quickstep.ops.tensors import UINT8, AnyTensor, HostTensor

if TYPE_CHECKING:
    from torch import Tensor


class NativeSteps:
    """Makes programs, samplers and scorers on one context; `owner` keeps that alive."""

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

    def ranks(self, memory: RankMemory, rank: int) -> NativeRanks:
        """Join the ranks that share `memory`."""
        return NativeRanks(self._library, self._context, self._owner, memory, rank)

    def sampler(self, vocab_size: int) -> RowSampler:
        """Samples from rows of `vocab_size` logits."""
        return RowSampler(self._library, self._context, self._owner, vocab_size)

    def scores(self, vocab_size: int) -> TokenScores:
        """Computes scores of prompt tokens from rows of `vocab_size` logits."""
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
        self._calls_address = self._scratch_address = 0

    def calls(self, num_rows: int) -> ctypes.Array[SampleCall]:
        """At least `num_rows` calls to fill; what they held before is still in them."""
        if len(self._calls) < num_rows:
            self._calls = (SampleCall * max(num_rows, 2 * len(self._calls)))()
            self._calls_address = ctypes.addressof(self._calls)
            nbytes = self._scratch_bytes(self._context, self._vocab_size, len(self._calls))
            self._scratch = HostTensor.empty((nbytes,), UINT8)
            self._scratch_address = self._scratch.data_ptr()
        return self._calls

    def run(self, num_rows: int) -> None:
        """Sample a token for each of the first rows; the calls hold the results."""
        status = self._sample_rows(
            self._context,
            self._calls_address,
            num_rows,
            self._vocab_size,
            self._scratch_address,
        )
        if status:
            raise_for_status(status, "sampling tokens")


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
        assert logits.is_contiguous(), "rows follow one another without gaps"
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
