"""Rows of a table. A copy, so nothing rounds; quantized values are dequantised and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.ops.reference.quantized_linear import quantized_rows
from quickstep.ops.table import LinearWeight, QuantizedWeight

__all__ = ["embedding"]


def embedding(token_ids: Tensor, weight: Tensor | LinearWeight, dtype: torch.dtype) -> Tensor:
    """token_ids [T], weight [V, C] -> [T, C] in `dtype`, the weight's own where it has one."""
    data = weight.data if isinstance(weight, LinearWeight) else weight
    if isinstance(data, QuantizedWeight):
        return quantized_rows(token_ids, data, dtype)
    assert isinstance(data, Tensor) and data.dtype == dtype
    return data[token_ids]
