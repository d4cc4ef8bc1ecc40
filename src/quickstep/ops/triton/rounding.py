"""Rounding fp32 results to the dtype of an output, in kernels."""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "rounded"]

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """`value` (fp32) in DTYPE, to nearest even; the interpreter's own cast to bf16 truncates."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        nearest = tl.where(value == value, nearest, bits)
        value = nearest.to(tl.uint32).to(tl.float32, bitcast=True)
    return value.to(DTYPE)
