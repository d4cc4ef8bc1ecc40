"""What the log-probabilities of tokens are computed from, on the device: of sampled tokens and of
those of a prompt. `runtime.sampling.logprobs` is the definition, to the bit: the sum is one of
integers, and equal logits rank by token id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.triton.sampling.exact_math import integer_probability

NUM_SCORES = 4  # before the most likely tokens
_TILE = 1024


def token_scores(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Logits [T, V] fp32 and a token id [T] int64 for each row -> [T, 4 + 2 * num_top] int64.

    A row holds the token's rank, or -1 where the logits have no finite maximum; the sum of the
    integer probabilities; the bits of the largest logit and of the token's in fp64; then the ids of
    the `num_top` most likely tokens and the bits of their logits in fp64. For a negative token id
    the result is any. Does not wait for the device.
    """
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    num_rows, vocab_size = logits.shape
    grid = (num_rows, triton.cdiv(vocab_size, _TILE))
    peaks = logits.amax(dim=1)
    known = token_ids.clamp(min=0)
    partial = torch.empty(*grid, 2, dtype=torch.int64, device=logits.device)
    _score_kernel[grid](
        logits,
        peaks,
        known,
        partial,
        vocab_size,
        logits.stride(0),
        TILE=_TILE,
        enable_fp_fusion=False,
    )
    sums = partial.sum(dim=1)
    ranks = torch.where(torch.isfinite(peaks), sums[:, 0] + 1, -1)
    chosen = logits.gather(1, known[:, None])
    top_ids = _most_likely(logits, num_top)
    values = torch.cat((peaks[:, None], chosen, logits.gather(1, top_ids)), dim=1)
    bits = values.double().view(torch.int64)
    scores = torch.stack((ranks, sums[:, 1]), dim=1)
    return torch.cat((scores, bits[:, :2], top_ids, bits[:, 2:]), dim=1)


def _most_likely(logits: Tensor, num_top: int) -> Tensor:
    """The ids [T, num_top] of the largest logits [T, V], of equal ones the lowest first.

    No two keys are equal: the upper half of one orders the logits, the lower half the ids.
    """
    if num_top == 0:
        return torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # -0.0 equals 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.topk((order << 32) - ids, num_top, dim=1).indices


@triton.jit
def _score_kernel(logits, peaks, token_ids, partial, vocab_size, logits_stride, TILE: tl.constexpr):
    """How many tokens of a tile come before the row's, and the sum of its probabilities."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    source = logits + row * logits_stride
    token_id = tl.load(token_ids + row)
    chosen = tl.load(source + token_id)
    x = tl.load(source + ids, mask=inside, other=-float("inf"))
    is_before = (x > chosen) | ((x == chosen) & (ids < token_id))
    # what has no finite maximum has no probabilities either
    value = x.to(tl.float64) - tl.load(peaks + row).to(tl.float64)
    value = tl.where(inside & (value <= 0.0), value, -float("inf"))
    target = partial + (row * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(target, tl.sum((is_before & inside).to(tl.int64), 0))
    tl.store(target + 1, tl.sum(integer_probability(value), 0))
