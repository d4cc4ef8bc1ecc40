"""The token with the largest logit of each row, on the device: greedy sampling of a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # logits of a program: one row of 128,256 has 32 programs


@triton.jit
def _tiles_kernel(logits, tile_values, tile_ids, vocab_size, row_stride, TILE: tl.constexpr):
    """The largest logit of a tile and its token, the lowest of several; NaN is infinite."""
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = logits + tl.program_id(0).to(tl.int64) * row_stride
    value = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
    value = tl.where(value == value, value, float("inf"))
    highest, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(tile_values + place, highest)
    tl.store(tile_ids + place, tl.program_id(1) * TILE + index)


@triton.jit
def _rows_kernel(
    tile_values,
    tile_ids,
    slots,
    last_tokens,
    out,
    num_tiles,
    BLOCK: tl.constexpr,
):
    """The largest of a row's tiles, the first of several."""
    row = tl.program_id(0)
    tiles = tl.arange(0, BLOCK)
    value = tl.load(
        tile_values + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf")
    )
    highest, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    token_id = tl.load(tile_ids + row * num_tiles + index).to(tl.int64)
    tl.store(last_tokens + tl.load(slots + row), token_id)
    tl.store(out + row, tl.where((highest - highest) == 0.0, token_id, -1))


def argmax_(logits: Tensor, slots: Tensor, last_tokens: Tensor, out: Tensor) -> Tensor:
    """The argmax [E] of logits [E, V] fp32, rows contiguous, in `out` [E] int64: -1 where the
    largest is not finite. Ties go to the lowest token. It becomes the entry of `last_tokens` at
    the row's slot [E] int64.
    """
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, _TILE)
    tile_values = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    tile_ids = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    _tiles_kernel[(num_rows, num_tiles)](
        logits,
        tile_values,
        tile_ids,
        vocab_size,
        logits.stride(0),
        TILE=_TILE,
    )
    _rows_kernel[(num_rows,)](
        tile_values,
        tile_ids,
        slots,
        last_tokens,
        out,
        num_tiles,
        BLOCK=triton.next_power_of_2(num_tiles),
    )
    return out
