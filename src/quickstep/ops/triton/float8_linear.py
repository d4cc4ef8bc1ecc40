"""Batch-invariant product of activations with weights in e4m3, and rows of such weights.

Activations are quantized to e4m3 per token and group, as in `ops.reference.linear`. Numbers of e4m3
are exact in fp16, in which the product runs on every GPU, with fp32 sums: what fp8 saves is memory
and its bandwidth. (Matrix instructions of fp8 keep fewer bits of a sum on some GPUs.) Each group is
summed over blocks of inputs in ascending order, then multiplied by both scales and added to the
groups before it, by one program; the tile is that of the weight's shape (`ops.triton.tiles`).

    packed   [N, C] uint8, the bytes of e4m3
    scales   [G, N] float32

Weights have the rows of the matrix instruction, tokens its columns.
"""

from __future__ import annotations

import functools

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.tensors import FLOAT8_MAX, AnyTensor, to_torch
from quickstep.ops.triton.rounding import (
    float8_value,
    quantize_groups,
    rounded,
    rounded_quotient,
    rounded_to_float8,
)
from quickstep.ops.triton.tiles import Tile, tile_of
from quickstep.ops.weights import LinearWeight, QuantizedWeight

_ROW_BLOCK = 1024
_TINY = tl.constexpr(1e-30)  # the reference's: such a group counts as zero
_LARGEST = tl.constexpr(FLOAT8_MAX)


class Float8Weight(msgspec.Struct, frozen=True):
    """A `QuantizedWeight` [N, C] in e4m3; the module's docstring has the layout."""

    packed: Tensor
    scales: Tensor
    group_size: int


def pack_float8(weight: QuantizedWeight, bias: AnyTensor | None) -> LinearWeight:
    """A weight [N, C], bias [N] or None, on the device of the weight."""
    assert weight.is_float8
    scales = weight.scales.t().contiguous()
    data = Float8Weight(weight.quants.contiguous(), scales, weight.group_size)
    bias = None if bias is None else to_torch(bias)
    nbytes = sum(tensor.nbytes for tensor in (data.packed, data.scales, bias) if tensor is not None)
    outputs, inputs = weight.quants.shape
    return LinearWeight(data, bias, outputs, inputs, nbytes)


@triton.jit
def _quantize_kernel(
    x, values, scales, row_len, x_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """One group of one token: scale max / 448, values x * (448 / max) in e4m3."""
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
    scaled = tl.where(is_used, value * rounded_quotient(_LARGEST, most), 0.0)
    near = rounded_to_float8(scaled)
    tl.store(values + token * row_len + group * GROUP + inputs, near.to(tl.float16), mask=mask)
    scale = tl.where(is_used, rounded_quotient(most, _LARGEST), 0.0)
    scale = tl.where(is_finite, scale, float("nan"))
    tl.store(scales + token * (row_len // GROUP) + group, scale)


@triton.jit
def float8_tile(
    x,
    x_scales,
    tokens,
    is_token,
    packed,
    scales,
    outputs,
    is_output,
    num_outputs,
    num_inputs,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
    HAS_CAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_T, BLOCK_N] fp32: `tokens` of quantized activations [T, C] fp16 times `outputs`.

    WIDEN: multiply in fp32, else in fp16. HAS_CAST: the GPU converts e4m3.
    """
    num_groups = num_inputs // GROUP
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for group in range(0, num_groups):
        dots = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        for first in range(0, GROUP, BLOCK_K):
            offsets = first + tl.arange(0, BLOCK_K)
            columns = group * GROUP + offsets
            x_mask = is_token[None, :]
            w_mask = is_output[:, None]
            if GROUP % BLOCK_K:
                x_mask = x_mask & (offsets < GROUP)[:, None]
                w_mask = w_mask & (offsets < GROUP)[None, :]
            a = tl.load(x + tokens[None, :] * num_inputs + columns[:, None], mask=x_mask, other=0.0)
            source = packed + outputs[:, None] * num_inputs + columns[None, :]
            bits = tl.load(source, mask=w_mask, other=0)
            if HAS_CAST:
                w = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            else:
                w = float8_value(bits)
            if WIDEN:
                a = a.to(tl.float32)
                w = w.to(tl.float32)
            else:
                w = w.to(tl.float16)
            dots = tl.dot(w, a, dots, input_precision="ieee")
        scale = tl.load(scales + outputs + group * num_outputs, mask=is_output, other=0.0)
        scaled = dots * scale[:, None]
        x_scale = tl.load(x_scales + tokens * num_groups + group, mask=is_token, other=0.0)
        total += scaled * x_scale[None, :]
    return tl.trans(total)


@triton.jit
def _float8_kernel(
    x,
    x_scales,
    packed,
    scales,
    bias,
    out,
    num_tokens,
    num_outputs,
    num_inputs,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    HAS_CAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile [BLOCK_T, BLOCK_N] of the output."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    outputs = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token = tokens < num_tokens
    is_output = outputs < num_outputs
    total = float8_tile(
        x,
        x_scales,
        tokens,
        is_token,
        packed,
        scales,
        outputs,
        is_output,
        num_outputs,
        num_inputs,
        GROUP,
        WIDEN,
        HAS_CAST,
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
    out,
    num_outputs,
    num_inputs,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one row, dequantized in fp32 and rounded once."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_inputs
    row = tl.load(token_ids + token).to(tl.int64)
    value = float8_value(tl.load(packed + row * num_inputs + columns, mask=mask, other=0))
    place = row + columns // GROUP * num_outputs
    value *= tl.load(scales + place, mask=mask, other=0.0)
    target = out + token * num_inputs + columns
    tl.store(target, rounded(value, out.dtype.element_ty), mask=mask)


@functools.cache
def has_float8_cast(device: torch.device) -> bool:
    """Whether the GPU converts e4m3 to fp16 itself: bits are those of `float8_value`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def widens_float8(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether factors are multiplied in fp32, for activations in `dtype`: matrix units keep fewer
    bits of a sum than an fp32 result needs (an H200: 17 times the allowed error), and interpreted
    products are in fp32.
    """
    return dtype == torch.float32 or device.type == "cpu"


def quantize_to_float8(x: Tensor, weight: Float8Weight) -> tuple[Tensor, Tensor]:
    """X [T, C], T above 0, -> numbers of e4m3 [T, C] in fp16 and scales [T, groups] fp32."""
    return quantize_groups(x, weight.group_size, torch.float16, _quantize_kernel)


def float8_linear(x: Tensor, weight: LinearWeight, tile: Tile | None = None) -> Tensor:
    """X [T, C] -> [T, N] in x's dtype; T may be 0. `tile` replaces that of the shape."""
    data = weight.data
    assert isinstance(data, Float8Weight)
    num_tokens, num_inputs = x.shape
    out = x.new_empty(num_tokens, weight.num_outputs)
    if out.numel() == 0:
        return out
    values, scales = quantize_to_float8(x, data)
    is_wide = widens_float8(x.dtype, x.device)
    kind = "float8 in fp32" if is_wide and x.device.type == "cuda" else "float8"
    own_tile, block_k = tile_of(x, kind, weight.num_outputs)
    tile = tile or own_tile
    grid = (triton.cdiv(num_tokens, tile.block_t), triton.cdiv(weight.num_outputs, tile.block_n))
    _float8_kernel[grid](
        values,
        scales,
        data.packed,
        data.scales,
        weight.bias,
        out,
        num_tokens,
        weight.num_outputs,
        num_inputs,
        GROUP=data.group_size,
        HAS_BIAS=weight.bias is not None,
        WIDEN=is_wide,
        HAS_CAST=has_float8_cast(x.device),
        BLOCK_T=tile.block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


def float8_rows(token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """Rows of the weight [T, C], rounded once to `dtype`."""
    data = weight.data
    assert isinstance(data, Float8Weight)
    shape = (len(token_ids), weight.num_inputs)
    out = torch.empty(shape, dtype=dtype, device=data.packed.device)
    if out.numel():
        _rows_kernel[(shape[0], triton.cdiv(shape[1], _ROW_BLOCK))](
            token_ids,
            data.packed,
            data.scales,
            out,
            weight.num_outputs,
            weight.num_inputs,
            GROUP=data.group_size,
            BLOCK=_ROW_BLOCK,
            enable_fp_fusion=False,
        )
    return out
