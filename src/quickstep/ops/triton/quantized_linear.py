"""Batch-invariant product of activations with int8 and int4 weights, and rows of such weights.

The arithmetic is the reference's (`ops.reference.linear`): activations are quantized to int8 per
token and group, the sums of a group are integers, and so exact in any order. Groups are added in
ascending order in fp32, by one program, without fused multiply-adds: the bits of a token do not
depend on the shape of a tile, which may therefore follow the number of tokens.

    8 bits:
    packed      [N, C] int8: quants - 128
    4 bits, in spans of 2 * half inputs, S of them:
    packed      [S, N, half] uint8: byte i has input i of the span (low half) and half + i
    sub_scales  [S, N] int32: four bits for each 16 inputs, ascending, (sub-block scale + 15) / 2
    both:
    scales      [G, N] float32
    zeros       [G, N] float32, less 2**(bits - 1); None where that is 0

A span lies in one group, or has two small groups, one in each half. Weights have the rows of the
matrix instruction, tokens its columns, and 4 bits become 8 four at a time, in a register.
"""

from __future__ import annotations

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.reference.linear import shared_groups
from quickstep.ops.tensors import AnyTensor, to_torch
from quickstep.ops.triton.float8_linear import pack_float8
from quickstep.ops.triton.rounding import (
    INTERPRETED,
    quantize_groups,
    rounded,
    rounded_quotient,
    rounded_to_integer,
)
from quickstep.ops.triton.tiles import Tile, tile_of
from quickstep.ops.weights import SUB_BLOCK_INPUTS, LinearWeight, QuantizedWeight

_LEAST_BLOCK_K = 32  # of int8 matrix instructions
_ROW_BLOCK = 1024
_TINY = tl.constexpr(1e-30)  # the reference's: such a group counts as zero
_SUB_BLOCK = tl.constexpr(SUB_BLOCK_INPUTS)


def _assembly(shift: int, *, is_multiplied: bool) -> str:
    """Four bytes of (four bits - 8), times a scale, from four pairs.

    Sums are modulo 2**32, so that the scale's sign needs no care: what counts is that each byte
    plus 128 is between 0 and 255.
    """
    shifted = f"shr.u32 n, $1, {shift};" if shift else "mov.b32 n, $1;"
    scaled = "add.u32 n, n, 0x78787878;"  # 128 - 8
    if is_multiplied:
        scaled = "mad.lo.u32 k, $2, 0xf7f7f7f8, 0x80808080; mad.lo.u32 n, n, $2, k;"
    return f"""{{ .reg .b32 n, k; {shifted} and.b32 n, n, 0x0f0f0f0f;
        {scaled} xor.b32 $0, n, 0x80808080; }}"""


_LOW = tl.constexpr(_assembly(0, is_multiplied=False))
_HIGH = tl.constexpr(_assembly(4, is_multiplied=False))
_MULTIPLIED_LOW = tl.constexpr(_assembly(0, is_multiplied=True))
_MULTIPLIED_HIGH = tl.constexpr(_assembly(4, is_multiplied=True))


class TritonWeight(msgspec.Struct, frozen=True):
    """A `QuantizedWeight` [N, C] as the kernels read it; the module's docstring has the layout.

    Groups of `shared_groups` neighbours use one scale of the activations.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    sub_scales: Tensor | None
    group_size: int
    shared_groups: int
    half: int  # 0 for 8 bits


def pack_quantized(weight: QuantizedWeight, bias: AnyTensor | None) -> LinearWeight:
    """A weight [N, C], bias [N] or None, in the kernels' layout, on the device of the weight."""
    if weight.is_float8:
        return pack_float8(weight, bias)
    weight = weight.with_zeros()
    num_outputs, num_inputs = weight.quants.shape
    middle = 2 ** (weight.bits - 1)
    num_groups = weight.scales.shape[1]
    half, sub_scales = 0, None
    if weight.bits == 4 and num_inputs % 2 == 0:
        half = _half_of(weight.group_size, num_groups)
        spans = weight.quants.view(num_outputs, -1, 2, half)
        packed = (spans[:, :, 0] | (spans[:, :, 1] << 4)).transpose(0, 1).contiguous()
    else:
        packed = (weight.quants.short() - middle).to(torch.int8)
    if weight.sub_scales is not None:
        sub_scales = _pack_sub_scales(weight.sub_scales, 2 * half // SUB_BLOCK_INPUTS)
    scales = weight.scales.t().contiguous()
    zeros = None if weight.zeros is None else (weight.zeros - middle).t().contiguous()
    # sub-block scales make 8 bits of 4, whose groups share no scale
    shared = 1 if weight.sub_scales is not None else shared_groups(weight)
    data = TritonWeight(packed, scales, zeros, sub_scales, weight.group_size, shared, half)
    bias = None if bias is None else to_torch(bias)
    parts = (packed, scales, zeros, sub_scales, bias)
    nbytes = sum(part.nbytes for part in parts if part is not None)
    return LinearWeight(data, bias, num_outputs, num_inputs, nbytes)


def _half_of(group_size: int, num_groups: int) -> int:
    """Inputs of half a span: a small group, or as many as divide half a group."""
    if group_size in (16, 32, 64) and num_groups % 2 == 0:
        return group_size
    fitting = (size for size in (64, 32, 48, 16) if group_size % (2 * size) == 0)
    return next(fitting, group_size // 2)


def _pack_sub_scales(sub_scales: Tensor, per_span: int) -> Tensor:
    """[N, C / 16] int8 -> [S, N] int32."""
    held = ((sub_scales.to(torch.int64) + 15) // 2).view(sub_scales.shape[0], -1, per_span)
    shifts = 4 * torch.arange(per_span, device=held.device)
    words = (held << shifts).sum(-1)
    # as int32, whose highest bit is its sign
    return ((words + 2**31) % 2**32 - 2**31).to(torch.int32).t().contiguous()


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
def _steps(pairs, sub_scale, HIGH: tl.constexpr, HAS_SUB: tl.constexpr):
    """(four bits of each of `pairs` - 8) * sub_scale, int8; the high four or the low ones.

    Compiled, four bytes at a time: none of their sums with 128 carries into the next one.
    """
    if INTERPRETED:
        steps = ((pairs.to(tl.int32) >> (4 if HIGH else 0)) & 15) - 8
        if HAS_SUB:
            steps *= sub_scale
        return steps.to(tl.int8)
    if HAS_SUB:
        return tl.inline_asm_elementwise(
            _MULTIPLIED_HIGH if HIGH else _MULTIPLIED_LOW,
            "=r,r,r,r,r,r",
            [pairs, sub_scale],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            _HIGH if HIGH else _LOW, "=r,r", [pairs], dtype=tl.int8, is_pure=True, pack=4
        )


@triton.jit
def _activations(x, tokens, is_token, columns, is_input, num_inputs, IS_WHOLE: tl.constexpr):
    """[BLOCK_K, BLOCK_T] int8."""
    mask = is_token[None, :] if IS_WHOLE else is_token[None, :] & is_input[:, None]
    return tl.load(x + tokens[None, :] * num_inputs + columns[:, None], mask=mask, other=0)


@triton.jit
def _group_sum(
    dots,
    sums,
    scale,
    zero,
    x_scales,
    tokens,
    is_token,
    group,
    num_groups,
    SHARED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """[BLOCK_N, BLOCK_T] fp32: the integer sums of a group, scaled."""
    scaled = dots.to(tl.float32)
    if HAS_ZEROS:
        scaled -= zero[:, None] * sums.to(tl.float32)[None, :]
    scaled *= scale[:, None]
    place = tokens * (num_groups // SHARED) + group // SHARED
    return scaled * tl.load(x_scales + place, mask=is_token, other=0.0)[None, :]


@triton.jit
def _of_group(values, group, num_groups, outputs, is_output, num_outputs):
    """[BLOCK_N] fp32 of scales or zeros; 0 after the last group."""
    place = outputs + group * num_outputs
    return tl.load(values + place, mask=is_output & (group < num_groups), other=0.0)


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
    num_outputs,
    num_inputs,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_SUB: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_T, BLOCK_N] fp32: `tokens` of quantized activations [T, C] int8 times `outputs`.

    HALF: of a span of 4 bits; 0 for 8 bits.
    """
    PAIRED: tl.constexpr = HALF == GROUP
    SPAN: tl.constexpr = 2 * HALF if HALF > 0 else GROUP
    GROUPS: tl.constexpr = 2 if PAIRED else 1
    PART: tl.constexpr = HALF if HALF > 0 else GROUP
    IS_WHOLE: tl.constexpr = PART % BLOCK_K == 0
    num_groups = num_inputs // GROUP
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    # read a step ahead: the compiler copies ahead only what a product multiplies
    scale = _of_group(scales, 0, num_groups, outputs, is_output, num_outputs)
    scale_1 = scale
    zero = scale
    zero_1 = scale
    if PAIRED:
        scale_1 = _of_group(scales, 1, num_groups, outputs, is_output, num_outputs)
    if HAS_ZEROS:
        zero = _of_group(zeros, 0, num_groups, outputs, is_output, num_outputs)
        if PAIRED:
            zero_1 = _of_group(zeros, 1, num_groups, outputs, is_output, num_outputs)
    for group in range(0, num_groups, GROUPS):
        after = group + GROUPS
        next_scale = _of_group(scales, after, num_groups, outputs, is_output, num_outputs)
        next_zero = next_scale
        if HAS_ZEROS:
            next_zero = _of_group(zeros, after, num_groups, outputs, is_output, num_outputs)
        if PAIRED:
            next_scale_1 = _of_group(scales, after + 1, num_groups, outputs, is_output, num_outputs)
            next_zero_1 = next_scale_1
            if HAS_ZEROS:
                next_zero_1 = _of_group(
                    zeros, after + 1, num_groups, outputs, is_output, num_outputs
                )
        dots = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.int32)
        sums = tl.zeros((BLOCK_T,), dtype=tl.int32)
        dots_1 = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.int32)
        sums_1 = tl.zeros((BLOCK_T,), dtype=tl.int32)
        for first in range(0, GROUP * GROUPS, SPAN):
            for start in range(0, PART, BLOCK_K):
                offsets = start + tl.arange(0, BLOCK_K)
                is_input = offsets < PART
                columns = group * GROUP + first + offsets
                mask = is_output[:, None]
                if not IS_WHOLE:
                    mask = mask & is_input[None, :]
                a = _activations(x, tokens, is_token, columns, is_input, num_inputs, IS_WHOLE)
                if HAS_ZEROS:
                    sums += tl.sum(a.to(tl.int32), 0)
                if HALF > 0:
                    place = outputs + (group * GROUP + first) // SPAN * num_outputs
                    source = packed + place[:, None] * HALF + offsets[None, :]
                    pairs = tl.load(source, mask=mask, other=0)
                    low_scale = 1
                    high_scale = 1
                    if HAS_SUB:
                        word = tl.load(sub_scales + place, mask=is_output, other=0)[:, None]
                        shift = (offsets // _SUB_BLOCK * 4)[None, :]
                        low_scale = ((word >> shift) & 15) * 2 - 15
                        high_scale = ((word >> (shift + HALF // _SUB_BLOCK * 4)) & 15) * 2 - 15
                    low = _steps(pairs, low_scale, False, HAS_SUB)
                    high = _steps(pairs, high_scale, True, HAS_SUB)
                    a_high = _activations(
                        x, tokens, is_token, columns + HALF, is_input, num_inputs, IS_WHOLE
                    )
                    dots += tl.dot(low, a, out_dtype=tl.int32)
                    if PAIRED:
                        dots_1 += tl.dot(high, a_high, out_dtype=tl.int32)
                    else:
                        dots += tl.dot(high, a_high, out_dtype=tl.int32)
                    if HAS_ZEROS:
                        if PAIRED:
                            sums_1 += tl.sum(a_high.to(tl.int32), 0)
                        else:
                            sums += tl.sum(a_high.to(tl.int32), 0)
                else:
                    source = packed + outputs[:, None] * num_inputs + columns[None, :]
                    dots += tl.dot(tl.load(source, mask=mask, other=0), a, out_dtype=tl.int32)
        total += _group_sum(
            dots,
            sums,
            scale,
            zero,
            x_scales,
            tokens,
            is_token,
            group,
            num_groups,
            SHARED,
            HAS_ZEROS,
        )
        if PAIRED:
            total += _group_sum(
                dots_1,
                sums_1,
                scale_1,
                zero_1,
                x_scales,
                tokens,
                is_token,
                group + 1,
                num_groups,
                SHARED,
                HAS_ZEROS,
            )
            scale_1, zero_1 = next_scale_1, next_zero_1
        scale, zero = next_scale, next_zero
    return tl.trans(total)


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
    HALF: tl.constexpr,
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
        num_outputs,
        num_inputs,
        GROUP,
        SHARED,
        HALF,
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
    num_outputs,
    num_inputs,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_SUB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one row, dequantized in fp32 and rounded once."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_inputs
    row = tl.load(token_ids + token).to(tl.int64)
    if HALF > 0:
        span = columns // (2 * HALF)
        offset = columns % (2 * HALF)
        place = row + span * num_outputs
        pair = tl.load(packed + place * HALF + offset % HALF, mask=mask, other=0x88)
        steps = ((pair.to(tl.int32) >> (offset // HALF * 4)) & 15) - 8
        if HAS_SUB:
            word = tl.load(sub_scales + place, mask=mask, other=0)
            steps *= ((word >> (offset // _SUB_BLOCK * 4)) & 15) * 2 - 15
    else:
        steps = tl.load(packed + row * num_inputs + columns, mask=mask, other=0)
    place = row + columns // GROUP * num_outputs
    value = steps.to(tl.float32)
    if HAS_ZEROS:
        value -= tl.load(zeros + place, mask=mask, other=0.0)
    value *= tl.load(scales + place, mask=mask, other=0.0)
    target = out + token * num_inputs + columns
    tl.store(target, rounded(value, out.dtype.element_ty), mask=mask)


def block_k(weight: TritonWeight, most: int) -> int:
    """Inputs of a product, at most `most`: of half a span, or of a group; all of a small one."""
    least: int = triton.next_power_of_2(weight.half or weight.group_size)
    return min(most, max(_LEAST_BLOCK_K, least))


def quantize_tokens(x: Tensor, weight: TritonWeight) -> tuple[Tensor, Tensor]:
    """X [T, C], T above 0, -> quantized values [T, C] int8 and scales [T, groups] fp32."""
    return quantize_groups(
        x, weight.group_size * weight.shared_groups, torch.int8, _quantize_kernel
    )


def quantized_linear(x: Tensor, weight: LinearWeight, tile: Tile | None = None) -> Tensor:
    """X [T, C] -> [T, N] in x's dtype; T may be 0. `tile` replaces that of the shape."""
    data = weight.data
    assert isinstance(data, TritonWeight)
    num_tokens, num_inputs = x.shape
    out = x.new_empty(num_tokens, weight.num_outputs)
    if out.numel() == 0:
        return out
    quants, scales = quantize_tokens(x, data)
    own_tile, most_block_k = tile_of(x, "int4" if data.half else "int8", weight.num_outputs)
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
        HALF=data.half,
        HAS_ZEROS=data.zeros is not None,
        HAS_SUB=data.sub_scales is not None,
        HAS_BIAS=weight.bias is not None,
        BLOCK_T=tile.block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k(data, most_block_k),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


def quantized_rows(token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """Rows of the weight [T, C], rounded once to `dtype`."""
    data = weight.data
    assert isinstance(data, TritonWeight)
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
            weight.num_outputs,
            weight.num_inputs,
            GROUP=data.group_size,
            HALF=data.half,
            HAS_ZEROS=data.zeros is not None,
            HAS_SUB=data.sub_scales is not None,
            BLOCK=_ROW_BLOCK,
            enable_fp_fusion=False,
        )
    return out
