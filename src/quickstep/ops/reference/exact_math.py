"""Arithmetic in fp64 whose bits depend on nothing but the operands: functions and sums.

exp, tanh, sigmoid, Phi and 1/sqrt are made of IEEE additions, products and quotients. torch's own
depend on an element's place: measured on 2.13, fp32 `silu` and `sigmoid` differ for 4 % of elements
between a single element and a vector, `gelu` for 16-20 %, bf16 `rsqrt` for 26 %, and fp64 `sqrt` is
not correctly rounded. One IEEE operation per tensor call has one result. Relative errors are below
1e-12, far below the rounding to fp32 that follows.

Sums are of numbers of which no addition rounds. fp64 holds integers up to 2**53. Round both factors
of a product to multiples of a power of two, `sum_bits(length)` bits below the largest element of
their row, and every product and every partial sum of `length` products is such an integer: any
library, tile, thread count or machine has the same bits (the splitting of Ozaki et al., 2012,
with one slice). Per row and element the price is 2**-21 to 2**-24 of the largest. Fixed tiles of
the library's own product do not have this property: measured on torch 2.13, fp32, tiles of 16 rows,
MKL's path for Intel AVX-512 splits K over threads (2048 x 1000, 8192 x 512, nearly every element),
its AVX2 path does even for K chunks of 256; plain `linear` also changes bits between 1, 2-3 and
>= 4 rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOG2_E = 1.4426950408889634
# ln 2 in two parts: the first has 32 significant bits, so that n * _LN2_HIGH is exact.
_LN2_HIGH = 0.6931471803691238
_LN2_LOW = 1.9082149292705877e-10
_EXP_TERMS = tuple(1.0 / math.factorial(k) for k in range(11, -1, -1))
_EXP_FLOOR = -708.0  # below it fp64 leaves its normal range

# exp(z^2) erfc(z) / t with t = 1 / (1 + z / 2), 0 <= z <= 7: a Chebyshev fit, error 2.1e-13.
_ERFC_TERMS = (
    0.0013567270440186722,
    -0.034341615659152794,
    0.2615097011581861,
    -1.0342192973769362,
    2.5176227335973236,
    -4.0367619308393135,
    4.355002409336524,
    -3.17301946879776,
    1.6479763524563658,
    -0.7358278313221862,
    0.19767933844799143,
    0.03942312048860043,
    0.18327207180150082,
    0.2460916222296414,
    0.2821426930187099,
    0.2820933744163905,
)


def _polynomial(x: Tensor, terms: tuple[float, ...]) -> Tensor:
    """Horner's scheme, highest power first."""
    value = torch.full_like(x, terms[0])
    for term in terms[1:]:
        value.mul_(x).add_(term)
    return value


def exp_nonpositive(x: Tensor) -> Tensor:
    """exp(x) for x <= 0 (fp64); below -708 it stays at exp(-708), about 3e-308."""
    x = x.clamp(min=_EXP_FLOOR)
    n = (x * _LOG2_E).round_()
    rest = x.sub_(n * _LN2_HIGH).sub_(n * _LN2_LOW)
    value = _polynomial(rest, _EXP_TERMS)
    two_to_n = ((n.nan_to_num_(0.0).to(torch.int64) + 1023) << 52).view(torch.float64)
    return value.mul_(two_to_n)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) (fp64)."""
    tail = exp_nonpositive(-x.abs())
    return torch.where(x < 0, tail, 1.0) / (tail + 1.0)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent (fp64)."""
    tail = exp_nonpositive(x.abs() * -2.0)
    return torch.copysign((1.0 - tail) / (tail + 1.0), x)


def normal_cdf(x: Tensor) -> Tensor:
    """Phi(x), the normal distribution function, (1 + erf(x / sqrt 2)) / 2 (fp64).

    Beyond |x| = 9.9 (z = 7) it stays at Phi(-9.9) = 2e-23 from 0 or 1.
    """
    z = (x.abs() * math.sqrt(0.5)).clamp(max=7.0)
    t = 1.0 / (z * 0.5 + 1.0)
    tail = _polynomial(t, _ERFC_TERMS) * t * exp_nonpositive(-(z * z)) * 0.5
    return torch.where(x < 0, tail, 1.0 - tail)


def reciprocal_sqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x) for x > 0 (fp64): a first guess from the exponent bits, then Newton's steps."""
    root = (0x5FE6EB50C7B537A9 - (x.view(torch.int64) >> 1)).view(torch.float64)
    half = x * 0.5
    for _ in range(5):
        root = root * (1.5 - half * root * root)
    return root


_FP64_MANTISSA_BITS = 53
_EXPONENT_MASK = 0x7FF0000000000000


def sum_bits(length: int) -> int:
    """Bits that each factor may have so that `length` products add up exactly in fp64."""
    return (_FP64_MANTISSA_BITS - (length - 1).bit_length()) // 2


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two not above x >= 0 (fp64); 0 stays 0, inf and NaN become inf."""
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
