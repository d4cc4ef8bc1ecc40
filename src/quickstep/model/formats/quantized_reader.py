"""The tensors of a quantized checkpoint, with matrices in the quantized values that its files hold.

A `TensorSource` for the loader; one layer's tensors are in memory at a time. Queries, keys and
values are one product, so matrices of different formats are stacked. The native kernels hold each
in its own form. For torch's ops (`stack_matrices`) they get one: a 4-bit quantized value is an
8-bit one with the same scale and zero, and a large group is several small ones, so a common format
always exists and nothing is lost. Only where one of the matrices is not quantized, or some are in
e4m3, are the others dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.tensor_schema import Shapes
from quickstep.model.formats.storage import MatrixStorage, PairedHeads
from quickstep.ops.tensors import AnyTensor, HostTensor, TensorT, to_torch, torch_device
from quickstep.ops.weights import QuantizedWeight, StoredMatrix, StoredRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FLOAT8 = "E4M3"


class QuantizedReader:
    """Reads by name, through `storage` what it has parts for; `shapes` are the matrices' own."""

    def __init__(
        self,
        reader: TensorReader,
        storage: MatrixStorage,
        shapes: Shapes,
        paired_heads: PairedHeads | None = None,
    ) -> None:
        self._reader = reader
        self._storage = storage
        self._shapes = shapes
        self._paired_heads = paired_heads

    def tensor(self, name: str) -> AnyTensor:
        """One tensor, in the model's dtype, whichever way it is stored."""
        part = self._part(name)
        if isinstance(part, QuantizedWeight):
            return part.dequantized().to(self._reader.dtype)
        return part

    def stacked(self, names: tuple[str, ...]) -> AnyTensor:
        """Several tensors, one below the other along the first dimension."""
        return self._reader.joined([self.tensor(name) for name in names])

    def linear(self, names: tuple[str, ...]) -> AnyTensor | QuantizedWeight:
        """The stacked matrix, in quantized values where all its parts are."""
        parts = [self._part(name) for name in names]
        quantized = [
            part if isinstance(part, QuantizedWeight) else to_torch(part) for part in parts
        ]
        return stack_matrices(quantized, self._reader.dtype)

    def stored(self, names: tuple[str, ...], *, floating: bool = False) -> StoredMatrix | None:
        """The stacked matrix in its files: in quantized values where all its parts are in some that
        the kernels multiply.
        """
        kind = self._reader.loaded_kind
        if kind is None:
            return None
        is_quantized = [self._is_quantized(name) for name in names]
        parts = [self._rows(name) for name in names]
        held = parts[0].kind
        if floating or not all(is_quantized) or any(part.kind == _FLOAT8 for part in parts):
            held = kind
        assert held is not None
        return StoredMatrix(held, tuple(parts), self._shapes[names[0]][1])

    def _rows(self, name: str) -> StoredRows:
        shape = self._shapes[name]
        if self._is_quantized(name):
            rows = self._storage.rows(name, shape, self._reader)
        else:
            rows = self._reader.rows(name, shape[0])
        head_size = 0 if self._paired_heads is None else self._paired_heads(name)
        return replace(rows, head_size=head_size) if head_size else rows

    def _is_quantized(self, name: str) -> bool:
        return self._storage.parts(name, self._shapes[name]) is not None

    def _part(self, name: str) -> AnyTensor | QuantizedWeight:
        head_size = 0 if self._paired_heads is None else self._paired_heads(name)
        if not self._is_quantized(name):
            tensor = self._reader.tensor(name)
            return tensor if head_size == 0 else _unpaired(tensor, head_size)
        quantized = self._decoded(name)
        if head_size == 0:
            return quantized
        zeros = None if quantized.zeros is None else _unpaired(quantized.zeros, head_size)
        return replace(
            quantized,
            quants=_unpaired(quantized.quants, head_size),
            scales=_unpaired(quantized.scales, head_size),
            zeros=zeros,
        )

    def _decoded(self, name: str) -> QuantizedWeight:
        """The quantized values of a matrix, its rows as the file has them."""
        shape = self._shapes[name]
        rows = self._storage.rows(name, shape, self._reader)
        # Imported here: both need torch.
        if self._storage.name == "gguf":
            from quickstep.model.formats.gguf_blocks import decode_blocks

            raw = self._reader.raw(name)
            decoded = decode_blocks(self._reader.stored_as(name), raw, shape)
            if decoded.has_minimums and decoded.zeros is not None:
                decoded = replace(decoded, zeros=decoded.zeros * rows.factor)
            return replace(decoded, scales=decoded.scales * rows.factor)
        from quickstep.model.formats.stored_values import decode_rows

        weight = decode_rows(rows, shape[1], torch_device(self._reader.device))
        assert isinstance(weight, QuantizedWeight)
        return weight


def _unpaired(x: TensorT, head_size: int) -> TensorT:
    """Rows 0 2 4 ... 1 3 5 ... of each head."""
    heads, half = x.shape[0] // head_size, head_size // 2
    if isinstance(x, HostTensor):
        pairs = x.numpy().reshape(heads, half, 2, *x.shape[1:])
        return HostTensor(pairs.swapaxes(1, 2).reshape(x.shape), x.dtype)
    return x.view(heads, half, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def stack_matrices(
    parts: Sequence[Tensor | QuantizedWeight], dtype: torch.dtype
) -> Tensor | QuantizedWeight:
    """One matrix of all parts, whose inputs are the same; `dtype` is that of matrices that are not
    quantized.
    """
    import torch

    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    floats = [part for part in quantized if part.is_float8]
    if len(quantized) < len(parts) or len(floats) not in (0, len(parts)):
        return torch.cat([_dequantized(part, dtype) for part in parts])
    bits = max(part.bits for part in quantized)
    group_size = math.gcd(*(part.group_size for part in quantized))
    symmetric = all(part.zeros is None for part in quantized)
    # Not with 6 or 8 bits about the middle: products with minimums would be those of large numbers.
    has_minimums = any(part.has_minimums for part in quantized) and all(
        part.has_minimums or part.bits == 4 for part in quantized
    )
    if bits == 6 and not symmetric and not has_minimums:
        bits = 8  # there are no zeros of 6 bits
    if not has_minimums:
        quantized = [part.with_zeros() for part in quantized]
    same = [_as_form(part, bits, group_size, symmetric=symmetric) for part in quantized]
    if has_minimums:
        same = [_with_minimums(part) for part in same]
    zeros = [part.zeros for part in same if part.zeros is not None]
    return QuantizedWeight(
        torch.cat([part.quants for part in same]),
        torch.cat([part.scales for part in same]),
        torch.cat(zeros) if zeros else None,
        bits,
        group_size,
        is_float8=bool(floats),
        has_minimums=has_minimums,
    )


def _with_minimums(part: QuantizedWeight) -> QuantizedWeight:
    """The same weights with minimums in place of zeros; exact for scales and zeros of blocks."""
    if part.has_minimums or part.zeros is None:
        return part
    return replace(part, zeros=part.zeros * -part.scales, has_minimums=True)


def _dequantized(part: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return part.dequantized().to(dtype) if isinstance(part, QuantizedWeight) else part


def _as_form(
    part: QuantizedWeight, bits: int, group_size: int, *, symmetric: bool
) -> QuantizedWeight:
    """The same weights in quantized values of `bits`, in groups of `group_size`, with or without
    zeros.
    """
    import torch

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
