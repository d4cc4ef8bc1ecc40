"""The tensors of a quantized checkpoint, with matrices in the quantized values that its files hold.

A `TensorSource` for the loader; one layer's tensors are in memory at a time. Queries, keys and
values are one product, so matrices of different formats are stacked (`stack_matrices`). A 4-bit
quantized value is an 8-bit one with the same scale and zero, and a large group is several small
ones: a common format always exists and nothing is lost. Only where one of the matrices is not
quantized, or some are in e4m3, are the others dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.tensor_schema import Shapes
from quickstep.model.formats.storage import MatrixStorage
from quickstep.ops.tensors import to_torch
from quickstep.ops.weights import QuantizedWeight, StoredMatrix

# The order of a tensor's rows, by its name; None if it is that of the file.
RowOrder = Callable[[str], Tensor | None]


class QuantizedReader:
    """Reads by name, through `storage` what it has parts for; `shapes` are the matrices' own."""

    def __init__(
        self,
        reader: TensorReader,
        storage: MatrixStorage,
        shapes: Shapes,
        row_order: RowOrder | None = None,
    ) -> None:
        self._reader = reader
        self._storage = storage
        self._shapes = shapes
        self._row_order = row_order

    def tensor(self, name: str) -> Tensor:
        """One tensor, in the model's dtype, whichever way it is stored."""
        part = self._part(name)
        if isinstance(part, QuantizedWeight):
            return part.dequantized().to(self._reader.dtype)
        return part

    def stacked(self, names: tuple[str, ...]) -> Tensor:
        """Several tensors, one below the other along the first dimension."""
        return torch.cat([self.tensor(name) for name in names])

    def linear(self, names: tuple[str, ...]) -> Tensor | QuantizedWeight:
        """The stacked matrix, in quantized values where all its parts are."""
        return stack_matrices([self._part(name) for name in names], self._reader.dtype)

    def stored(self, names: tuple[str, ...]) -> StoredMatrix | None:
        """The stacked matrix in its files, where all its parts have the same form there."""
        if self._row_order is not None and any(self._row_order(name) is not None for name in names):
            return None
        shapes = [self._shapes[name] for name in names]
        quantized = [
            self._storage.parts(name, shape) is not None
            for name, shape in zip(names, shapes, strict=True)
        ]
        if not any(quantized):
            return self._reader.stored(names)
        if not all(quantized) or self._reader.device.type != "cpu":
            return None
        return self._storage.stored(names, shapes, self._reader)

    def _part(self, name: str) -> Tensor | QuantizedWeight:
        order = None if self._row_order is None else self._row_order(name)
        shape = self._shapes[name]
        if self._storage.parts(name, shape) is None:
            tensor = to_torch(self._reader.tensor(name))
            return tensor if order is None else tensor[order.to(tensor.device)]
        quantized = self._storage.read(name, shape, self._reader)
        if order is None:
            return quantized
        zeros = None if quantized.zeros is None else quantized.zeros[order]
        return replace(
            quantized, quants=quantized.quants[order], scales=quantized.scales[order], zeros=zeros
        )


def stack_matrices(
    parts: Sequence[Tensor | QuantizedWeight], dtype: torch.dtype
) -> Tensor | QuantizedWeight:
    """One matrix of all parts, whose inputs are the same; `dtype` is that of matrices that are not
    quantized.
    """
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    floats = [part for part in quantized if part.is_float8]
    if len(quantized) < len(parts) or len(floats) not in (0, len(parts)):
        return torch.cat([_dequantized(part, dtype) for part in parts])
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
        is_float8=bool(floats),
    )


def _dequantized(part: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
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
