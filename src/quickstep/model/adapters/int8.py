"""Adapters in int8: half the memory, and half of what a step reads of them.

A row of A and a column of B belong to one rank, so the product of their scales is one factor per
rank, which a kernel multiplies with A x. Each scale is the largest magnitude / 127, so a value is
off by at most half of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from quickstep.ops.table import LoRAPart
from quickstep.ops.tensors import FLOAT32, INT8, AnyTensor, Array, HostTensor, as_float64

_LARGEST = 127.0


def as_int8(modules: Sequence[Sequence[LoRAPart]]) -> tuple[tuple[LoRAPart, ...], ...]:
    """The parts of each of a model's matrices, rounded."""
    return tuple(tuple(map(_rounded, parts)) for parts in modules)


def _rounded(part: LoRAPart) -> LoRAPart:
    a, scales = _quantized(part.a, 0 if part.is_embedding else 1)
    b = None
    if part.b is not None:
        b, of_b = _quantized(part.b, 0)
        scales = scales * of_b
    return replace(part, a=a, b=b, rank_scales=HostTensor(scales.astype(np.float32), FLOAT32))


def _quantized(tensor: AnyTensor, axis: int) -> tuple[HostTensor, Array]:
    """The quantized values, with the scales [rank] of what lies along `axis`."""
    values = as_float64(tensor)
    largest = np.abs(values).max(axis=axis, keepdims=True, initial=0.0)
    scales = np.where(largest > 0, largest, _LARGEST) / _LARGEST
    quants = np.rint(values / scales).astype(np.int8)
    return HostTensor(quants, INT8), scales.reshape(-1)
