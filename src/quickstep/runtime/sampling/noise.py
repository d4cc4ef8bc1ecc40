"""Counter-based sampling noise: a pure function of (seed, output position, token id).

There is no generator state, so a sampled token does not depend on the batch, on the steps before
it, or on the order in which rows are sampled, and a preempted or speculated position gets the same
token again.

The definition, in unsigned 64-bit integers that wrap (`>>` is logical), for any implementation:

    mix(x):  x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9
             x ^= x >> 27;  x *= 0x94D049BB133111EB
             x ^= x >> 31                                              (SplitMix64's finaliser)
    key_a    = mix(seed + 0x9E3779B97F4A7C15)                          seed modulo 2**64
    key_b    = mix(key_a + (position + 1) * 0xD1342543DE82EF95)
    key_c    = mix(key_b + 0x9E3779B97F4A7C15)
    x        = key_b + (token_id + 1) * 0x9E3779B97F4A7C15
    x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27;  x ^= key_c;  x *= 0x94D049BB133111EB
    bits     = (x ^ (x >> 31)) >> 12                                   52 bits

    v        = (bits + 0.5) * 2**-52                                   exact in float64, in (0, 1)
    gumbel   = -log(-log(1 - v))                 1 - v is exact, log as in
    `runtime.sampling.exact_math`

Every step is an integer or IEEE operation, so native code computes the same bits on every machine
(csrc/kernels/sampler.cpp). `key_c` enters between the rounds, so that two rows never see shifted
copies of one stream. `v` is small where the noise is large: its resolution is finest where a winner
is decided.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quickstep.runtime.sampling.exact_math import log

Ids = npt.NDArray[np.int64]

_MASK = 2**64 - 1
_CHANCE_ID = 2**40
_WEYL = 0x9E3779B97F4A7C15
_POSITION_STEP = 0xD1342543DE82EF95
_MARGIN = 1e-6
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB


def row_keys(seed: int, position: int) -> tuple[int, int]:
    """(key_b, key_c) of the definition."""
    x, keys = seed, []
    for added in (_WEYL, (position + 1) * _POSITION_STEP, _WEYL):
        x = (x + added) & _MASK
        x = ((x ^ (x >> 30)) * _MIX_A) & _MASK
        x = ((x ^ (x >> 27)) * _MIX_B) & _MASK
        x ^= x >> 31
        keys.append(x)
    return keys[1], keys[2]


def noise_bits(seed: int, position: int, token_ids: Ids) -> npt.NDArray[np.uint64]:
    """`bits` of the definition for each of the token ids [n]: 52-bit integers [n]."""
    key_b, key_c = row_keys(seed, position)
    x = token_ids.astype(np.uint64)
    x *= np.uint64(_WEYL)
    x += np.uint64((key_b + _WEYL) & _MASK)
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(_MIX_A)
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x ^= np.uint64(key_c)
    x *= np.uint64(_MIX_B)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    x >>= np.uint64(12)
    return x


def gumbel_of_bits(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """The standard Gumbel values [n] of 52-bit integers [n]; a smaller integer has a larger one."""
    v = bits.astype(np.float64)
    v += 0.5
    v *= 2.0**-52
    return -log(-log(1.0 - v))


def gumbel_argmax(values: npt.NDArray[np.float64], bits: npt.NDArray[np.uint64]) -> int:
    """np.argmax(values + gumbel_of_bits(bits)) of two arrays [n], with few exact logarithms.

    NumPy's are right to far better than the margin, and what is within it of the best is computed
    exactly.
    """
    v = bits.astype(np.float64)
    v += 0.5
    v *= -(2.0**-52)
    np.log1p(v, out=v)
    np.negative(v, out=v)
    np.log(v, out=v)
    nearly = np.subtract(values, v, out=v)
    contenders = np.flatnonzero(nearly >= nearly.max() - _MARGIN)
    if contenders.shape[0] == 1:
        return int(contenders[0])
    exact = values[contenders] + gumbel_of_bits(bits[contenders])
    return int(contenders[np.argmax(exact)])


def gumbel(seed: int, position: int, token_ids: Ids) -> npt.NDArray[np.float64]:
    """The noise [n] that an output position adds to the scaled logits of token ids [n]."""
    return gumbel_of_bits(noise_bits(seed, position, token_ids))


def chance(seed: int, position: int) -> float:
    """A uniform number in (0, 1) that belongs to an output position."""
    [bits] = noise_bits(seed, position, np.array([_CHANCE_ID])).tolist()
    return float((bits + 0.5) * 2.0**-52)
