"""Batch-invariant product of activations with int8 and int4 weights, and rows of such weights.

The arithmetic is the reference's (`ops.reference.linear`): activations are quantized to int8 per
token and group, the sums of a group are integers, and so exact in any order. Groups are added in
ascending order in fp32, by one program, without fused multiply-adds: the bits of a token do not
depend on the shape of a tile, which may therefore follow the number of tokens.

    packed   [N, C] int8: quants - 2**(bits - 1); or
             [N, C / 2] uint8: byte i has the quantized values of input 2i (low half) and 2i + 1
    zeros    [N, G] float32, less 2**(bits - 1); None where that is 0
"""

from __future__ import annotations

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.reference.linear import shared_groups
from quickstep.ops.table import SUB_BLOCK_INPUTS, LinearWeight, QuantizedWeight
from quickstep.ops.tensors import AnyTensor, to_torch
from quickstep.ops.triton.float8_linear import pack_float8
from quickstep.ops.triton.rounding import (
    quantize_groups,
    rounded,
    rounded_quotient,
    rounded_to_integer,
)
from quickstep.ops.triton.tiles import Tile, tile_of

__all__ = [
    "PackedWeight",
    "block_k",
    "pack_quantized",
    "quantize_tokens",
    "quantized_linear",
    "quantized_rows",
    "quantized_tile",
]

_LEAST_BLOCK_K = 32  # of int8 matrix instructions
_ROW_BLOCK = 1024
_TINY = tl.constexpr(1e-30)  # the reference's: such a group counts as zero
_SUB_BLOCK = tl.constexpr(SUB_BLOCK_INPUTS)


class PackedWeight(msgspec.Struct, frozen=True):
    """A `QuantizedWeight` [N, C] as the kernels read it; the module's docstring has the layout.

    Groups of `shared_groups` neighbours use one scale of the activations.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    sub_scales: Tensor | None
    group_size: int
    shared_groups: int
    is_int4: bool


def pack_quantized(weight: QuantizedWeight, bias: AnyTensor | None) -> LinearWeight:
    """A weight [N, C], bias [N] or None, in the kernels' layout, on the device of the weight."""
    if weight.is_float8:
        return pack_float8(weight, bias)
    num_outputs, num_inputs = weight.quants.shape
    middle = 2 ** (weight.bits - 1)
    is_int4 = weight.bits == 4 and num_inputs % 2 == 0
    if is_int4:
        low, high = weight.quants[:, 0::2], weight.quants[:, 1::2]
        packed = (low | (high << 4)).contiguous()
    else:
        packed = (weight.quants.short() - middle).to(torch.int8)
    zeros = None if weight.zeros is None else (weight.zeros - middle).contiguous()
    sub_scales = None if weight.sub_scales is None else weight.sub_scales.contiguous()
    # sub-block scales make 8 bits of 4, whose groups share no scale
    shared = 1 if weight.sub_scales is not None else shared_groups(weight)
    data = PackedWeight(
        packed, weight.scales.contiguous(), zeros, sub_scales, weight.group_size, shared, is_int4
    )
    bias = None if bias is None else to_torch(bias)
    parts = (packed, data.scales, zeros, sub_scales, bias)
    nbytes = sum(part.nbytes for part in parts if part is not None)
    return LinearWeight(data, bias, num_outputs, num_inputs, nbytes)


@triton.jit
def _quantize_kernel(
    x, quants, scales, row_len, x_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """One group of one token: scale max / 127, quantized values x * (127 / max)."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    inputs = tl.arange(0, BLOCK)
    mask = inputs < GROUP
    source = x + token * x_stride + group * GROUP + inputs
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    # a maximum may drop NaN, a sum does not
    is_finite = tl.max(tl.where((value - value) == 0.0, 0, 1), 0) == 0
    most = tl.max(tl.abs(value), 0)
    is_used = is_finite & (most > _TINY)
    most = tl.where(is_used, most, 1.0)
    near = rounded_to_integer(value * rounded_quotient(127.0, most))
    near = tl.where(is_used, near, 0.0)
    tl.store(quants + token * row_len + group * GROUP + inputs, near.to(tl.int8), mask=mask)
    scale = tl.where(is_used, rounded_quotient(most, 127.0), 0.0)
    scale = tl.where(is_finite, scale, float("nan"))
    tl.store(scales + token * (row_len // GROUP) + group, scale)


@triton.jit
def _load_steps(
    packed, sub_scales, rows, columns, mask, num_inputs, INT4: tl.constexpr, HAS_SUB: tl.constexpr
):
    """Elements of the weight before their scale, int8; `rows` and `columns` broadcast."""
    if INT4:
        pair = tl.load(packed + rows * (num_inputs // 2) + columns // 2, mask=mask, other=0x88)
        steps = ((pair.to(tl.int32) >> (columns % 2 * 4).to(tl.int32)) & 15) - 8
    else:
        steps = tl.load(packed + rows * num_inputs + columns, mask=mask, other=0).to(tl.int32)
    if HAS_SUB:
        index = rows * (num_inputs // _SUB_BLOCK) + columns // _SUB_BLOCK
        steps *= tl.load(sub_scales + index, mask=mask, other=1).to(tl.int32)
    return steps.to(tl.int8)


@triton.jit
def quantized_tile(
    x,
    x_scales,
    tokens,
    is_token,
    packed,
    scales,
    zeros,
    sub_scales,
    outputs,
    is_output,
    num_inputs,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    INT4: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_SUB: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_T, BLOCK_N] fp32: `tokens` of quantized activations [T, C] int8 times `outputs`."""
    num_groups = num_inputs // GROUP
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for group in range(0, num_groups):
        dots = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.int32)
        sums = tl.zeros((BLOCK_T,), dtype=tl.int32)
        for first in range(0, GROUP, BLOCK_K):
            offsets = first + tl.arange(0, BLOCK_K)
            is_input = offsets < GROUP
            columns = group * GROUP + offsets
            a = tl.load(
                x + tokens[:, None] * num_inputs + columns[None, :],
                mask=is_token[:, None] & is_input[None, :],
                other=0,
            )
            b = _load_steps(
                packed,
                sub_scales,
                outputs[None, :],
                columns[:, None],
                is_output[None, :] & is_input[:, None],
                num_inputs,
                INT4,
                HAS_SUB,
            )
            dots += tl.dot(a, b, out_dtype=tl.int32)
            if HAS_ZEROS:
                sums += tl.sum(a.to(tl.int32), 1)
        scaled = dots.to(tl.float32)
        place = outputs * num_groups + group
        if HAS_ZEROS:
            zero = tl.load(zeros + place, mask=is_output, other=0.0)
            scaled -= sums.to(tl.float32)[:, None] * zero[None, :]
        scaled *= tl.load(scales + place, mask=is_output, other=0.0)[None, :]
        x_place = tokens * (num_groups // SHARED) + group // SHARED
        total += scaled * tl.load(x_scales + x_place, mask=is_token, other=0.0)[:, None]
    return total


@triton.jit
def _quantized_linear_kernel(
    x,
    x_scales,
    packed,
    scales,
    zeros,
    sub_scales,
    bias,
    out,
    num_tokens,
    num_outputs,
    num_inputs,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    INT4: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_SUB: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile [BLOCK_T, BLOCK_N] of the output."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    outputs = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token = tokens < num_tokens
    is_output = outputs < num_outputs
    total = quantized_tile(
        x,
        x_scales,
        tokens,
        is_token,
        packed,
        scales,
        zeros,
        sub_scales,
        outputs,
        is_output,
        num_inputs,
        GROUP,
        SHARED,
        INT4,
        HAS_ZEROS,
        HAS_SUB,
        BLOCK_T,
        BLOCK_N,
        BLOCK_K,
    )
    if HAS_BIAS:
        added = tl.load(bias + outputs, mask=is_output, other=0.0)
        total += added.to(tl.float32)[None, :]
    tl.store(
        out + tokens[:, None] * num_outputs + outputs[None, :],
        rounded(total, out.dtype.element_ty),
        mask=is_token[:, None] & is_output[None, :],
    )


@triton.jit
def _rows_kernel(
    token_ids,
    packed,
    scales,
    zeros,
    sub_scales,
    out,
    num_inputs,
    GROUP: tl.constexpr,
    INT4: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_SUB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one row, dequantized in fp32 and rounded once."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_inputs
    row = tl.load(token_ids + token).to(tl.int64)
    steps = _load_steps(packed, sub_scales, row, columns, mask, num_inputs, INT4, HAS_SUB)
    place = row * (num_inputs // GROUP) + columns // GROUP
    value = steps.to(tl.float32)
    if HAS_ZEROS:
        value -= tl.load(zeros + place, mask=mask, other=0.0)
    value *= tl.load(scales + place, mask=mask, other=0.0)
    target = out + token * num_inputs + columns
    tl.store(target, rounded(value, out.dtype.element_ty), mask=mask)


def block_k(group_size: int, most: int) -> int:
    """A block of a group: all of a small one."""
    least: int = triton.next_power_of_2(group_size)
    return min(most, max(_LEAST_BLOCK_K, least))


def quantize_tokens(x: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """X [T, C], T above 0, -> quantized values [T, C] int8 and scales [T, groups] fp32."""
    return quantize_groups(
        x, weight.group_size * weight.shared_groups, torch.int8, _quantize_kernel
    )


def quantized_linear(x: Tensor, weight: LinearWeight, tile: Tile | None = None) -> Tensor:
    """X [T, C] -> [T, N] in x's dtype; T may be 0. `tile` replaces that of the shape."""
    data = weight.data
    assert isinstance(data, PackedWeight)
    num_tokens, num_inputs = x.shape
    out = x.new_empty(num_tokens, weight.num_outputs)
    if out.numel() == 0:
        return out
    quants, scales = quantize_tokens(x, data)
    own_tile, most_block_k = tile_of(x, "int4" if data.is_int4 else "int8", weight.num_outputs)
    tile = tile or own_tile
    grid = (triton.cdiv(num_tokens, tile.block_t), triton.cdiv(weight.num_outputs, tile.block_n))
    _quantized_linear_kernel[grid](
        quants,
        scales,
        data.packed,
        data.scales,
        data.zeros,
        data.sub_scales,
        weight.bias,
        out,
        num_tokens,
        weight.num_outputs,
        num_inputs,
        GROUP=data.group_size,
        SHARED=data.shared_groups,
        INT4=data.is_int4,
        HAS_ZEROS=data.zeros is not None,
        HAS_SUB=data.sub_scales is not None,
        HAS_BIAS=weight.bias is not None,
        BLOCK_T=tile.block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k(data.group_size, most_block_k),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


def quantized_rows(token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """Rows of the weight [T, C], rounded once to `dtype`."""
    data = weight.data
    assert isinstance(data, PackedWeight)
    shape = (len(token_ids), weight.num_inputs)
    out = torch.empty(shape, dtype=dtype, device=data.packed.device)
    if out.numel():
        _rows_kernel[(shape[0], triton.cdiv(shape[1], _ROW_BLOCK))](
            token_ids,
            data.packed,
            data.scales,
            data.zeros,
            data.sub_scales,
            out,
            weight.num_inputs,
            GROUP=data.group_size,
            INT4=data.is_int4,
            HAS_ZEROS=data.zeros is not None,
            HAS_SUB=data.sub_scales is not None,
            BLOCK=_ROW_BLOCK,
            enable_fp_fusion=False,
        )
    return out
