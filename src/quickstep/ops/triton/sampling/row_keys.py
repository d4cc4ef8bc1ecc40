"""The keys of the sampling noise from seed and output position, on the device: those of
`runtime.sampling.noise.row_keys`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.triton.sampling.records import FIELDS, KEY_B, KEY_C

_BLOCK = 64

_WEYL = tl.constexpr(0x9E3779B97F4A7C15)
_POSITION_STEP = tl.constexpr(0xD1342543DE82EF95)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)


def row_keys_(rows: Tensor) -> None:
    """Replace the seed in KEY_B and the output position in KEY_C of rows [E, NUM_FIELDS], as in
    `SamplingRecords`, by the keys. Seeds are modulo 2**64.
    """
    num_rows = rows.shape[0]
    _row_keys_kernel[(triton.cdiv(num_rows, _BLOCK),)](rows, num_rows, BLOCK=_BLOCK, num_warps=1)


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 30)) * _MIX_A
    x = (x ^ (x >> 27)) * _MIX_B
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["num_rows"])
def _row_keys_kernel(rows, num_rows, BLOCK: tl.constexpr):
    """The keys of a block of rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    fields = rows + row * FIELDS
    seed = tl.load(fields + KEY_B, mask=mask, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(fields + KEY_C, mask=mask, other=0)
    step = (position + 1).to(tl.uint64, bitcast=True) * _POSITION_STEP
    key_b = _mixed(_mixed(seed + _WEYL) + step)
    key_c = _mixed(key_b + _WEYL)
    tl.store(fields + KEY_B, key_b.to(tl.int64, bitcast=True), mask=mask)
    tl.store(fields + KEY_C, key_c.to(tl.int64, bitcast=True), mask=mask)
