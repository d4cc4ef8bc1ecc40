"""exp, log and the sampling noise in kernels, with the bits of `runtime.sampling.exact_math` and
`runtime.sampling.noise`.

IEEE additions, products and quotients in fp64 and integers in 64 bits, in the order of those
modules and of csrc/kernels/vecmath64.h. Only for kernels that are launched with
`enable_fp_fusion=False`: a fused multiply-add would round once. `tests/triton/test_triton_sampling`
compares the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ROUND_MAGIC = tl.constexpr(1.5 * 2.0**52)  # a sum with it has no fraction, below 2**51
_PROBABILITY_UNIT = tl.constexpr(2.0**44)
_ROOT_HALF_BITS = tl.constexpr(0x3FE6A09E667F3BCD)
_MANTISSA = tl.constexpr(2**52 - 1)
_WEYL = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)
_HALF_ULP = tl.constexpr(2.0**-52)


@triton.jit
def exp_nonpositive(x):
    """exp(x) of fp64 x <= 0; below -708 it stays at exp(-708)."""
    x = tl.where(x < -708.0, -708.0, x)
    n = (x * 1.4426950408889634 + _ROUND_MAGIC) - _ROUND_MAGIC
    rest = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10
    value = rest * 2.505210838544172e-08 + 2.755731922398589e-07
    value = value * rest + 2.7557319223985893e-06
    value = value * rest + 2.48015873015873e-05
    value = value * rest + 0.0001984126984126984
    value = value * rest + 0.001388888888888889
    value = value * rest + 0.008333333333333333
    value = value * rest + 0.041666666666666664
    value = value * rest + 0.16666666666666666
    value = value * rest + 0.5
    value = value * rest + 1.0
    value = value * rest + 1.0
    return value * ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def log(x):
    """The natural logarithm of normal fp64 x > 0."""
    above = x.to(tl.int64, bitcast=True) - _ROOT_HALF_BITS
    n = (above >> 52).to(tl.float64)
    m = ((above & _MANTISSA) + _ROOT_HALF_BITS).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    value = z * 0.043478260869565216 + 0.047619047619047616
    value = value * z + 0.05263157894736842
    value = value * z + 0.058823529411764705
    value = value * z + 0.06666666666666667
    value = value * z + 0.07692307692307693
    value = value * z + 0.09090909090909091
    value = value * z + 0.1111111111111111
    value = value * z + 0.14285714285714285
    value = value * z + 0.2
    value = value * z + 0.3333333333333333
    twice = s + s
    low = twice * (z * value) + n * 1.9082149292705877e-10
    return n * 0.6931471803691238 + (twice + low)


@triton.jit
def rounded_int64(x):
    """The integer next to fp64 x, half to even, for |x| < 2**51."""
    return ((x + _ROUND_MAGIC) - _ROUND_MAGIC).to(tl.int64)


@triton.jit
def integer_probability(value):
    """round(exp(value) * 2**44) of fp64 values <= 0."""
    return rounded_int64(exp_nonpositive(value) * _PROBABILITY_UNIT)


@triton.jit
def noise_bits(key_b, key_c, token_ids):
    """The 52 bits of noise of int64 token ids; the keys are int64 with the bits of `row_keys`."""
    key_b = key_b.to(tl.uint64, bitcast=True)
    key_c = key_c.to(tl.uint64, bitcast=True)
    x = (token_ids + 1).to(tl.uint64, bitcast=True) * _WEYL + key_b
    x = x ^ (x >> 30)
    x = x * _MIX_A
    x = x ^ (x >> 27)
    x = x ^ key_c
    x = x * _MIX_B
    x = x ^ (x >> 31)
    return (x >> 12).to(tl.int64, bitcast=True)


@triton.jit
def gumbel(bits):
    """The standard Gumbel value of 52-bit integers, in fp64."""
    v = (bits.to(tl.float64) + 0.5) * _HALF_ULP
    return -log(-log(1.0 - v))
