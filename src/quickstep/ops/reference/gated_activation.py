"""The gated unit of an MLP (Shazeer, 2020): act(gate) * up, with gate and up side by side.

`clamped_swiglu` is gpt-oss's: gate sigmoid(1.702 gate) (up + 1), gate at most 7, up within 7 of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from quickstep.errors import ConfigError
from quickstep.ops.reference.exact_math import normal_cdf, sigmoid, tanh

__all__ = ["ACTIVATIONS", "gated_activation"]

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


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """gate_up [T, 2 * N] -> [T, N]; `kind` is a key of ACTIVATIONS."""
    if kind not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ConfigError(f"activation {kind!r} is not known; gated activations are {known}")
    gate, up = gate_up.double().chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate, up).float().to(gate_up.dtype)
