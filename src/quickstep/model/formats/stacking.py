"""Matrices of different forms below one another: queries, keys and values are one product.

A 4-bit quantized value is an 8-bit quantized value with the same scale and zero, and a large group
is several small ones, so a common form always exists and nothing is lost. Only a neighbour stored
whole brings the quantized values back to floating point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from quickstep.model.quantization import MatrixFormat
from quickstep.ops.table import QuantizedWeight

__all__ = ["common_form", "stack_matrices"]


def stack_matrices(
    parts: Sequence[Tensor | QuantizedWeight], dtype: torch.dtype
) -> Tensor | QuantizedWeight:
    """One matrix of all parts, whose inputs are the same; `dtype` is that of whole matrices."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) < len(parts):
        return torch.cat([_whole(part, dtype) for part in parts])
    bits = max(part.bits for part in quantized)
    group_size = math.gcd(*(part.group_size for part in quantized))
    symmetric = all(part.zeros is None for part in quantized)
    same = [_as_form(part, bits, group_size, symmetric=symmetric) for part in quantized]
    zeros = [part.zeros for part in same if part.zeros is not None]
    return QuantizedWeight(
        torch.cat([part.quants for part in same]),
        torch.cat([part.scales for part in same]),
        torch.cat(zeros) if zeros else None,
        bits,
        group_size,
    )


def common_form(forms: Sequence[MatrixFormat], num_inputs: int) -> MatrixFormat:
    """The form of `stack_matrices`' result, for parts of these forms."""
    group_size = math.gcd(*(form.group_size or num_inputs for form in forms))
    return MatrixFormat(
        max(form.bits for form in forms),
        None if group_size == num_inputs else group_size,
        any(form.has_zeros for form in forms),
        any(form.wide_scales for form in forms),
    )


def _whole(part: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return part.dequantized().to(dtype) if isinstance(part, QuantizedWeight) else part


def _as_form(
    part: QuantizedWeight, bits: int, group_size: int, *, symmetric: bool
) -> QuantizedWeight:
    """The same weights in quantized values of `bits`, in groups of `group_size`, with or without
    zeros.
    """
    repeats = part.group_size // group_size
    scales, zeros = part.scales, part.zeros
    if repeats > 1:
        scales = scales.repeat_interleave(repeats, 1)
        zeros = None if zeros is None else zeros.repeat_interleave(repeats, 1)
    quants = part.quants
    middle = 2 ** (part.bits - 1)
    if symmetric and part.bits < bits:
        quants = quants + (2 ** (bits - 1) - middle)
    if not symmetric and zeros is None:
        zeros = torch.full_like(scales, float(middle))
    return replace(
        part, quants=quants, scales=scales, zeros=zeros, bits=bits, group_size=group_size
    )
