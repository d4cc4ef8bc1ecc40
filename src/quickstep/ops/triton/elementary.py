"""RMS norm with and without a residual, rotary embedding and gated activations.

One program computes one row, or one head of a token, in fp32 and rounds once: bits depend on that
row and on its length only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.errors import ConfigError
from quickstep.ops.reference.elementary import ACTIVATIONS, SWIGLU_ALPHA, SWIGLU_LIMIT
from quickstep.ops.tensors import AnyTensor, to_torch
from quickstep.ops.triton.rounding import rounded

__all__ = ["add_rms_norm", "gated_activation", "rms_norm", "rotary"]

_ACTIVATION_BLOCK = 1024


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
    x: Tensor, residual: Tensor | None, weight: AnyTensor, eps: float, offset: float
) -> tuple[Tensor, Tensor | None]:
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    summed = None if residual is None else torch.empty_like(x)
    row_len = x.shape[-1]
    if x.numel():
        _rms_norm_kernel[(x.numel() // row_len,)](
            x,
            residual,
            to_torch(weight),
            out,
            summed,
            row_len,
            eps,
            offset,
            HAS_RESIDUAL=residual is not None,
            BLOCK=triton.next_power_of_2(row_len),
        )
    return out, summed


def rms_norm(x: Tensor, weight: AnyTensor, eps: float, offset: float) -> Tensor:
    """X [..., C], weight [C] -> [..., C]: x / sqrt(mean(x^2) + eps) * (weight + offset)."""
    return _norm(x, None, weight, eps, offset)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: AnyTensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """X, residual [T, C] -> (rms_norm(x + residual), x + residual); the sum is rounded first."""
    out, summed = _norm(x, residual, weight, eps, offset)
    assert summed is not None
    return out, summed


@triton.jit
def _rotary_kernel(
    x,
    cos,
    sin,
    out,
    num_heads,
    head_size,
    half,
    x_token_stride,
    x_head_stride,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    source = x + token * x_token_stride + head * x_head_stride
    target = out + (token * num_heads + head) * head_size
    channels = tl.arange(0, BLOCK_D)
    kept = (channels >= 2 * half) & (channels < head_size)
    tl.store(target + channels, tl.load(source + channels, mask=kept), mask=kept)
    pairs = tl.arange(0, BLOCK_HALF)
    mask = pairs < half
    if INTERLEAVED:
        first_index = 2 * pairs
        second_index = 2 * pairs + 1
    else:
        first_index = pairs
        second_index = pairs + half
    first = tl.load(source + first_index, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + second_index, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + token * half + pairs, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + pairs, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + first_index, rounded(first * c - second * s, out.dtype.element_ty), mask=mask)
    tl.store(
        target + second_index, rounded(second * c + first * s, out.dtype.element_ty), mask=mask
    )


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """X [T, H, D], cos and sin [T, D_rot / 2] -> [T, H, D]; channels from D_rot on are kept."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_tokens, num_heads, head_size = x.shape
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rotary_kernel[(num_tokens, num_heads)](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            num_heads,
            head_size,
            half,
            x.stride(0),
            x.stride(1),
            INTERLEAVED=interleaved,
            BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_D=triton.next_power_of_2(head_size),
        )
    return out


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _gated_activation_kernel(
    gate_up,
    out,
    width,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one token's outputs."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    source = gate_up + token * 2 * width
    gate = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width + columns, mask=mask, other=0.0).to(tl.float32)
    if KIND == "silu":
        result = gate * _sigmoid(gate) * up
    elif KIND == "gelu":
        result = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == "gelu_tanh":
        # 0.5 (1 + tanh(z)) is sigmoid(2 z)
        inner = (gate * gate * gate * 0.044715 + gate) * 1.5957691216057308
        result = gate * _sigmoid(inner) * up
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        result = gate * _sigmoid(gate * ALPHA) * (up + 1.0)
    tl.store(out + token * width + columns, rounded(result, out.dtype.element_ty), mask=mask)


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """gate_up [T, 2 * N] -> [T, N]; `kind` is one of the reference's ACTIVATIONS."""
    if kind not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ConfigError(f"activation {kind!r} is not known; gated activations are {known}")
    gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    if out.numel():
        _gated_activation_kernel[(num_tokens, triton.cdiv(width, _ACTIVATION_BLOCK))](
            gate_up,
            out,
            width,
            KIND=kind,
            ALPHA=SWIGLU_ALPHA,
            LIMIT=SWIGLU_LIMIT,
            BLOCK=_ACTIVATION_BLOCK,
        )
    return out
