"""Sums whose bits cannot depend on their order, because no addition in them rounds.

fp64 holds integers up to 2**53. Round both factors of a product to multiples of a power of two,
`sum_bits(length)` bits below the largest element of their row, and every product and every
partial sum of `length` products is such an integer: any library, tile, thread count or machine
gives the same bits (the splitting of Ozaki et al., 2012, with one slice).

Why not fixed tiles of the library's own product: measured on torch 2.13, fp32, tiles of 16 rows.
MKL's path for AMD gave equal bits at 1 and 2 threads; its path for Intel AVX-512 did not (K is
split over threads: 2048 x 1000, 8192 x 512 and others, nearly every element), its AVX2 path not
even for K chunks of 256. Plain `linear` also changes bits between 1, 2-3 and >= 4 rows.
The sums here gave one and the same bits on all of these paths, ATen's three vector widths too.
Per row and element the price is some bits under the largest one: 2**-21 to 2**-24 of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["power_of_two", "round_rows", "round_to_multiple", "sum_bits"]

_FP64_MANTISSA_BITS = 53
_EXPONENT_MASK = 0x7FF0000000000000


def sum_bits(length: int) -> int:
    """Bits that each factor may have so that `length` products add up exactly in fp64."""
    return (_FP64_MANTISSA_BITS - (length - 1).bit_length()) // 2


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two not above x >= 0 (fp64); 0 stays 0, inf and NaN give inf."""
    return (x.view(torch.int64) & _EXPONENT_MASK).view(torch.float64)


def round_to_multiple(x: Tensor, quantum: Tensor | float) -> Tensor:
    """Each |x| < 2**51 * quantum rounded to a multiple of the power of two `quantum` (fp64)."""
    shift = quantum * (1.5 * 2**52)
    return (x + shift).sub_(shift)


def round_rows(x: Tensor, bits: int) -> Tensor:
    """Each row (last axis) rounded to integers of at most 2**bits times a quantum of the row.

    fp64 in and out. A row with inf or NaN becomes NaN, and no other row notices.
    """
    quantum = power_of_two(x.abs().amax(-1, keepdim=True)) * 2.0 ** (1 - bits)
    return round_to_multiple(x, quantum)
