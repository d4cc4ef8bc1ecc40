"""Ops on single rows: norms, gated activations and rotary embedding.

RMS norm (Zhang and Sennrich, 2019) rounds the squares so that their sum is exact (`exact_math`):
torch's own sum over a row changes bits with the number of rows once it is split over threads (seen
at C = 40000). The gated unit of an MLP (Shazeer, 2020) is act(gate) * up; `clamped_swiglu` is
gpt-oss's: gate sigmoid(1.702 gate) (up + 1), gate at most 7, up within 7 of 0. Rotary position
embedding (Su et al., 2021) rotates pairs of channels by an angle, with one IEEE operation per call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from quickstep.errors import ConfigError
from quickstep.ops.reference.exact_math import (
    normal_cdf,
    reciprocal_sqrt,
    round_rows,
    sigmoid,
    tanh,
)
from quickstep.ops.tensors import AnyTensor, to_torch

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def _silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def _gelu(x: Tensor) -> Tensor:
    return x * normal_cdf(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x * x * 0.044715 + x) * math.sqrt(2.0 / math.pi)
    return x * 0.5 * (tanh(inner) + 1.0)


def _of_gate(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: activation(gate) * up


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * sigmoid(gate * SWIGLU_ALPHA) * (up + 1.0)


ACTIVATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "silu": _of_gate(_silu),
        "gelu": _of_gate(_gelu),
        "gelu_tanh": _of_gate(_gelu_tanh),
        "clamped_swiglu": _clamped_swiglu,
    }
)


def _relu(x: Tensor) -> Tensor:
    return x.clamp(min=0.0)


UNGATED: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": _silu,
        "gelu": _gelu,
        "gelu_tanh": _gelu_tanh,
        "relu": _relu,
        "relu2": lambda x: _relu(x) * _relu(x),
    }
)


def check_ungated(kind: str) -> None:
    """Raises ConfigError where `kind` is no key of UNGATED."""
    if kind not in UNGATED:
        known = ", ".join(UNGATED)
        raise ConfigError(f"activation {kind!r} is not known without a gate; known are {known}")


def activation(x: Tensor, factor: Tensor | None, kind: str) -> Tensor:
    """X [T, N], times `factor` [T, N] where there is one; `kind` is a key of UNGATED."""
    check_ungated(kind)
    activated = UNGATED[kind](x.double())
    if factor is not None:
        activated = activated * factor.double()
    return activated.float().to(x.dtype)


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """gate_up [T, 2 * N] -> [T, N]; `kind` is a key of ACTIVATIONS."""
    if kind not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ConfigError(f"activation {kind!r} is not known; gated activations are {known}")
    gate, up = gate_up.double().chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate, up).float().to(gate_up.dtype)


_SQUARE_BITS = 36  # exact sums up to C = 2**17


def rms_norm(x: Tensor, weight: AnyTensor, eps: float, offset: float) -> Tensor:
    """X [..., C], weight [C] -> [..., C]: x / sqrt(mean(x^2) + eps) * (weight + offset)."""
    wide = x.double()
    mean_square = round_rows(wide * wide, _SQUARE_BITS).sum(-1, keepdim=True) / x.shape[-1]
    scaled = wide * reciprocal_sqrt(mean_square + eps) * (to_torch(weight).double() + offset)
    return scaled.float().to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: AnyTensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """X, residual [T, C] -> (rms_norm(x + residual), x + residual); the sum is rounded first."""
    summed = (x.double() + residual.double()).float().to(x.dtype)
    return rms_norm(summed, weight, eps, offset), summed


def layer_norm(
    x: Tensor, weight: AnyTensor, bias: AnyTensor | None, eps: float, offset: float
) -> Tensor:
    """X [..., C], weight [C] or that of each head -> [..., C]; see `ops.table.LayerNormOp`."""
    wide = x.double()
    mean = round_rows(wide, _SQUARE_BITS).sum(-1, keepdim=True) / x.shape[-1]
    distance = wide - mean
    square = round_rows(distance * distance, _SQUARE_BITS).sum(-1, keepdim=True) / x.shape[-1]
    normed = distance * reciprocal_sqrt(square + eps) * (to_torch(weight).double() + offset)
    if bias is not None:
        normed = normed + to_torch(bias).double()
    return normed.float().to(x.dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: AnyTensor,
    bias: AnyTensor | None,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """X, residual [T, C] -> (layer_norm(x + residual), x + residual); the sum is rounded first."""
    summed = (x.double() + residual.double()).float().to(x.dtype)
    return layer_norm(summed, weight, bias, eps, offset), summed


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """X [T, H, D], cos and sin [T, D_rot / 2] -> [T, H, D]; channels from D_rot on are kept.

    Pairs are (i, i + D_rot / 2), or (2 i, 2 i + 1) when interleaved.
    """
    half = cos.shape[-1]
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    turned = x[..., : 2 * half].double()
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = first * c - second * s, second * c + first * s
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated.float().to(x.dtype), x[..., 2 * half :]), -1)
