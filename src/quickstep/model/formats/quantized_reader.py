"""The tensors of a quantised checkpoint, matrices in the quantized values that its files hold.

A `TensorSource` for the loader; one layer's tensors are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec.structs import replace
from torch import Tensor

from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.formats.stacking import stack_matrices
from quickstep.model.formats.storage import MatrixStorage, Shapes
from quickstep.ops.table import QuantizedWeight, StoredMatrix

__all__ = ["QuantizedReader", "RowOrder"]

# The order in which a tensor's rows are to be taken, by its name; None as they stand.
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
            whole = self._reader.tensor(name)
            return whole if order is None else whole[order.to(whole.device)]
        quantized = self._storage.read(name, shape, self._reader)
        if order is None:
            return quantized
        zeros = None if quantized.zeros is None else quantized.zeros[order]
        return replace(
            quantized, quants=quantized.quants[order], scales=quantized.scales[order], zeros=zeros
        )
