"""exp and log whose bits are the same on every machine, and sums that no order can change.

NumPy's own differ in their last bits between versions and CPUs. These are IEEE additions, products
and quotients in float64, one NumPy call each, in the order of csrc/kernels/vecmath64.h; relative
errors are below 1e-12. Unnormalised probabilities are integers: `integer_probabilities`.

Called by `runtime.sampling.noise`, `runtime.sampling.filters` and `runtime.sampling.logprobs`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PROBABILITY_UNIT = 2.0**44  # of the largest token; 2**18 of them add up within 63 bits
_LEAST = -32.0  # exp(-32) * 2**44 is below 1/2
_CHUNK = 4096  # whose intermediate values stay in the nearest cache

_LOG2_E = 1.4426950408889634
# ln 2 in two parts: the first has 32 significant bits, so that n * _LN2_HIGH is exact.
_LN2_HIGH = 0.6931471803691238
_LN2_LOW = 1.9082149292705877e-10
_EXP_TERMS = (
    2.505210838544172e-08,
    2.755731922398589e-07,
    2.7557319223985893e-06,
    2.48015873015873e-05,
    0.0001984126984126984,
    0.001388888888888889,
    0.008333333333333333,
    0.041666666666666664,
    0.16666666666666666,
    0.5,
    1.0,
    1.0,
)  # 1 / k!, k = 11 to 0
_LOG_TERMS = tuple(1.0 / (2 * k + 1) for k in range(11, 0, -1))  # of artanh(s) / s, in s * s
_ROOT_HALF_BITS = np.uint64(0x3FE6A09E667F3BCD)
_MANTISSA = np.uint64(2**52 - 1)


def _polynomial(x: Floats, terms: tuple[float, ...]) -> Floats:
    """Horner's scheme, highest power first."""
    value = np.full_like(x, terms[0])
    for term in terms[1:]:
        value *= x
        value += term
    return value


def exp_nonpositive(x: Floats) -> Floats:
    """exp(x) for x <= 0; below -708 it stays at exp(-708), about 3e-308."""
    x = np.maximum(x, -708.0)
    n = np.rint(x * _LOG2_E)
    rest = (x - n * _LN2_HIGH) - n * _LN2_LOW
    value = _polynomial(rest, _EXP_TERMS)
    value *= ((n.astype(np.int64) + 1023) << 52).view(np.float64)
    return value


def log(x: Floats) -> Floats:
    """The natural logarithm of normal x > 0; near x = 1 the relative error stays small too.

    x = 2**k m with sqrt(1/2) <= m < sqrt(2); log m = 2 artanh((m - 1) / (m + 1)), by its series.
    """
    above = x.view(np.uint64) - _ROOT_HALF_BITS
    n = (above.view(np.int64) >> 52).astype(np.float64)
    m = ((above & _MANTISSA) + _ROOT_HALF_BITS).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    twice = s + s
    low = twice * (z * _polynomial(z, _LOG_TERMS)) + n * _LN2_LOW
    return n * _LN2_HIGH + (twice + low)


def integer_probabilities(values: Floats) -> npt.NDArray[np.int64]:
    """round(exp(value) * PROBABILITY_UNIT) of values [n] whose largest is 0: exact in any sum."""
    found = np.zeros(values.shape[0], dtype=np.int64)
    for start in range(0, values.shape[0], _CHUNK):
        part = values[start : start + _CHUNK]
        if part.max() > _LEAST:
            found[start : start + _CHUNK] = np.rint(exp_nonpositive(part) * PROBABILITY_UNIT)
    return found
