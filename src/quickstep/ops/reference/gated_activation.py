"""The gated unit of an MLP (Shazeer, 2020): act(gate) * up, with gate and up side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from quickstep.errors import ConfigError
from quickstep.ops.reference.elementary import normal_cdf, sigmoid, tanh

__all__ = ["ACTIVATIONS", "gated_activation"]


def _silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def _gelu(x: Tensor) -> Tensor:
    return x * normal_cdf(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x * x * 0.044715 + x) * math.sqrt(2.0 / math.pi)
    return x * 0.5 * (tanh(inner) + 1.0)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}
)


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """gate_up [T, 2 * N] -> [T, N]; `kind` is a key of ACTIVATIONS."""
    if kind not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ConfigError(f"activation {kind!r} is not known; gated activations are {known}")
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (ACTIVATIONS[kind](gate) * up).float().to(gate_up.dtype)
