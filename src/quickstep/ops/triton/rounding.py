"""Rounding in kernels as IEEE arithmetic and the reference round; quantizing activations."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

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


@triton.jit
def rounded_to_float8(value):
    """`value` (fp32, at most 448 or NaN) in e4m3, half to even, held in fp32.

    Launched as for `rounded_to_integer`. Not a cast: only some GPUs have one, and it may saturate.
    """
    bits = value.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    exponent = tl.maximum(exponent, 121)  # of 2**-6: below it, all have its 2**-9 between them
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    steps_per_one = ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    nearest = rounded_to_integer(tl.abs(value) * steps_per_one) * step
    # the sign of a zero as well
    signed = nearest.to(tl.int32, bitcast=True) | (bits & -2147483648)
    return tl.where(value != value, value, signed.to(tl.float32, bitcast=True))


@triton.jit
def float8_bits(value):
    """The byte of a number of e4m3 that is held in fp32, uint8."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.abs(value)
    normal = ((bits & 0x7FFFFFFF) >> 20) - 960
    # 2**-9 is the least number above 0; NaN has no integer
    small = (tl.where(magnitude < 0.015625, magnitude, 0.0) * 512.0).to(tl.int32)
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(value != value, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float8_value(bits):
    """The number of e4m3 whose byte is `bits` (uint8), in fp32."""
    wide = bits.to(tl.int32)
    # one exponent bit more, and as many bits after it: fp16 of a 256th
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.uint16)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


def quantize_groups(
    x: Tensor, group_size: int, dtype: torch.dtype, kernel: triton.JITFunction
) -> tuple[Tensor, Tensor]:
    """X [T, C], T above 0, -> quantized values [T, C] in `dtype` and scales [T, groups] fp32, by a
    kernel that has a program for each token and group.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_tokens, num_inputs = x.shape
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(
        (num_tokens, num_inputs // group_size), dtype=torch.float32, device=x.device
    )
    kernel[tuple(scales.shape)](
        x,
        values,
        scales,
        num_inputs,
        x.stride(0),
        GROUP=group_size,
        BLOCK=triton.next_power_of_2(group_size),
        enable_fp_fusion=False,
    )
    return values, scales
