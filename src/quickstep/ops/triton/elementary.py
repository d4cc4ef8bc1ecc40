"""Norms with and without a residual, and activations with and without a gate.

One program computes one row, or a block of it, in fp32 and rounds once: bits depend on that row and
on its length only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.errors import ConfigError
from quickstep.ops.reference.elementary import (
    ACTIVATIONS,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    check_ungated,
)
from quickstep.ops.tensors import AnyTensor, to_torch
from quickstep.ops.triton.rounding import rounded

_ACTIVATION_BLOCK = 1024
_ALPHA, _LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    summed,
    row_len,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row; the sum with the residual is rounded before it is normed."""
    row = tl.program_id(0).to(tl.int64) * row_len
    columns = tl.arange(0, BLOCK)
    mask = columns < row_len
    value = tl.load(x + row + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row + columns, mask=mask, other=0.0).to(tl.float32)
        stored = rounded(value, summed.dtype.element_ty)
        tl.store(summed + row + columns, stored, mask=mask)
        value = stored.to(tl.float32)
    mean_square = tl.sum(value * value, 0) / row_len
    scale = 1.0 / tl.sqrt(mean_square + eps)
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32) + offset
    result = value * scale * factor
    tl.store(out + row + columns, rounded(result, out.dtype.element_ty), mask=mask)


def _norm(
    kernel: Any,
    x: Tensor,
    residual: Tensor | None,
    parameters: Sequence[Tensor | None],
    scalars: Sequence[float],
    **options: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run the kernel of a norm over the rows of x: (the normed rows, the sum with the residual)."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    summed = None if residual is None else torch.empty_like(x)
    row_len = x.shape[-1]
    if x.numel():
        kernel[(x.numel() // row_len,)](
            x,
            residual,
            *parameters,
            out,
            summed,
            row_len,
            *scalars,
            HAS_RESIDUAL=residual is not None,
            BLOCK=triton.next_power_of_2(row_len),
            **options,
        )
    return out, summed


def rms_norm(x: Tensor, weight: AnyTensor, eps: float, offset: float) -> Tensor:
    """X [..., C], weight [C] -> [..., C]: x / sqrt(mean(x^2) + eps) * (weight + offset)."""
    return _norm(_rms_norm_kernel, x, None, (to_torch(weight),), (eps, offset))[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: AnyTensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """X, residual [T, C] -> (rms_norm(x + residual), x + residual); the sum is rounded first."""
    out, summed = _norm(_rms_norm_kernel, x, residual, (to_torch(weight),), (eps, offset))
    assert summed is not None
    return out, summed


@triton.jit
def _layer_norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    summed,
    row_len,
    num_weights,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, with the weight of its head."""
    number = tl.program_id(0).to(tl.int64)
    row, head = number * row_len, number % num_weights * row_len
    columns = tl.arange(0, BLOCK)
    mask = columns < row_len
    value = tl.load(x + row + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row + columns, mask=mask, other=0.0).to(tl.float32)
        stored = rounded(value, summed.dtype.element_ty)
        tl.store(summed + row + columns, stored, mask=mask)
        value = stored.to(tl.float32)
    distance = tl.where(mask, value - tl.sum(value, 0) / row_len, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(distance * distance, 0) / row_len + eps)
    factor = tl.load(weight + head + columns, mask=mask, other=0.0).to(tl.float32) + offset
    result = distance * scale * factor
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + columns, rounded(result, out.dtype.element_ty), mask=mask)


def _layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: AnyTensor,
    bias: AnyTensor | None,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor | None]:
    parameters = to_torch(weight), None if bias is None else to_torch(bias)
    scalars = weight.numel() // x.shape[-1], eps, offset
    return _norm(_layer_norm_kernel, x, residual, parameters, scalars, HAS_BIAS=bias is not None)


def layer_norm(
    x: Tensor, weight: AnyTensor, bias: AnyTensor | None, eps: float, offset: float
) -> Tensor:
    """X [..., C], weight [C] or that of each head -> [..., C]; see `ops.table.LayerNormOp`."""
    return _layer_norm(x, None, weight, bias, eps, offset)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: AnyTensor,
    bias: AnyTensor | None,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """X, residual [T, C] -> (layer_norm(x + residual), x + residual); the sum is rounded first."""
    out, summed = _layer_norm(x, residual, weight, bias, eps, offset)
    assert summed is not None
    return out, summed


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def activated(gate, up, KIND: tl.constexpr):
    """The activation of fp32 gates, times ups; of a kernel with `enable_fp_fusion=False`, so that
    its bits are the same in each.
    """
    if KIND == "silu":
        result = gate * _sigmoid(gate) * up
    elif KIND == "gelu":
        result = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == "gelu_tanh":
        # 0.5 (1 + tanh(z)) is sigmoid(2 z)
        inner = (gate * gate * gate * 0.044715 + gate) * 1.5957691216057308
        result = gate * _sigmoid(inner) * up
    else:
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
        result = gate * _sigmoid(gate * _ALPHA) * (up + 1.0)
    return result


@triton.jit
def _gated_activation_kernel(
    gate_up,
    out,
    width,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one token's outputs."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    source = gate_up + token * 2 * width
    gate = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width + columns, mask=mask, other=0.0).to(tl.float32)
    result = activated(gate, up, KIND)
    tl.store(out + token * width + columns, rounded(result, out.dtype.element_ty), mask=mask)


def check_activation(kind: str) -> None:
    """Raises ConfigError where `kind` is none of the reference's ACTIVATIONS."""
    if kind not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ConfigError(f"activation {kind!r} is not known; gated activations are {known}")


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """gate_up [T, 2 * N] -> [T, N]; `kind` is one of the reference's ACTIVATIONS."""
    check_activation(kind)
    gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    if out.numel():
        _gated_activation_kernel[(num_tokens, triton.cdiv(width, _ACTIVATION_BLOCK))](
            gate_up,
            out,
            width,
            KIND=kind,
            BLOCK=_ACTIVATION_BLOCK,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _activation_kernel(
    x,
    factor,
    out,
    width,
    x_stride,
    factor_stride,
    KIND: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one token's outputs."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    value = tl.load(x + token * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    other = 1.0
    if HAS_FACTOR:
        source = factor + token * factor_stride + columns
        other = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if KIND == "relu":
        result = tl.where(value < 0.0, 0.0, value) * other
    elif KIND == "relu2":
        above = tl.where(value < 0.0, 0.0, value)
        result = above * above * other
    else:
        result = activated(value, other, KIND)
    tl.store(out + token * width + columns, rounded(result, out.dtype.element_ty), mask=mask)


def activation(x: Tensor, factor: Tensor | None, kind: str) -> Tensor:
    """X [T, N], times `factor` [T, N] where there is one; `kind` is one of UNGATED."""
    check_ungated(kind)
    x = x if x.stride(1) == 1 else x.contiguous()
    if factor is not None and factor.stride(1) != 1:
        factor = factor.contiguous()
    num_tokens, width = x.shape
    out = x.new_empty(num_tokens, width)
    if out.numel():
        _activation_kernel[(num_tokens, triton.cdiv(width, _ACTIVATION_BLOCK))](
            x,
            factor,
            out,
            width,
            x.stride(0),
            0 if factor is None else factor.stride(0),
            KIND=kind,
            HAS_FACTOR=factor is not None,
            BLOCK=_ACTIVATION_BLOCK,
            enable_fp_fusion=False,
        )
    return out
