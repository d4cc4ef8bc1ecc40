"""Rounding in kernels as IEEE arithmetic and the reference round."""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "rounded", "rounded_quotient", "rounded_to_integer"]

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2**23: a sum with it has no fraction


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """`value` (fp32) in DTYPE, to nearest even; the interpreter's own cast to bf16 truncates."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        nearest = tl.where(value == value, nearest, bits)
        value = nearest.to(tl.uint32).to(tl.float32, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def rounded_quotient(a, b):
    """A / b in fp32 to nearest even, one of them a tensor; the / of a GPU is only near that."""
    zero = (a + b) * 0.0
    return tl.div_rn(zero + a, zero + b)


@triton.jit
def rounded_to_integer(value):
    """`value` (fp32, below 2**22) to an integer in fp32, half to even.

    Only in kernels launched with `enable_fp_fusion=False`: a fused multiply-add would round once.
    """
    return (value + _HALF_EVEN) - _HALF_EVEN
