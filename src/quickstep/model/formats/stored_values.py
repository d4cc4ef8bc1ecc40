"""Stored rows into quantized values with torch: for GPUs, and for steps op by op.

The native kernels decode the same kinds as they are loaded, in the same operations
(`csrc/scaled_rows.cpp`). Used by `formats.quantized_reader` and `formats.fused_experts_source`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quickstep.model.checkpoint.safetensors_files import read_span
from quickstep.ops.reference.quantize import quantize
from quickstep.ops.tensors import to_torch
from quickstep.ops.weights import REQUANTIZED_GROUPS, QuantizedWeight, StoredRows

# the position of row 0, 1, ... of eight within a word of AWQ
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_INPUTS_PER_WORD = {"U8": 4, "U4": 8}
_INPUTS_PER_BYTE = {"LEVELS": 2, "LEVELS_HIGH": 2}
_BITS = {"U4": 4, "I4": 4, "LEVELS": 6}  # of the others 8


def decode_rows(
    rows: StoredRows, num_inputs: int, device: torch.device
) -> Tensor | QuantizedWeight:
    """A matrix [N, C] in its quantized values, or in the floating point of its file. Raises
    ConfigError.
    """
    assert rows.kind is not None
    read = _awq_values if rows.layout == "awq" else _values
    values = _in_order(read(rows, num_inputs, device), rows)
    if rows.scales is None:
        return values
    scales = to_torch(rows.scales).to(device)
    zeros = None if rows.zeros is None else to_torch(rows.zeros).to(device)
    group_size = num_inputs // scales.shape[1]
    if rows.kind == "E4M3":
        return QuantizedWeight(values, scales, None, 8, group_size, is_float8=True)
    weight = QuantizedWeight(values, scales, zeros, _BITS.get(rows.kind, 8), group_size)
    return weight if rows.order is None else _requantized(weight, to_torch(rows.order))


def _values(rows: StoredRows, num_inputs: int, device: torch.device) -> Tensor:
    """[N, C]: quantized values in uint8, or floating point; N are the tensor's rows, of which the
    wanted ones are read where each is in one piece.
    """
    kind = rows.kind
    assert kind is not None
    if kind in _FLOATS:
        dtype, width = _FLOATS[kind], num_inputs
    elif kind in _INPUTS_PER_WORD:
        dtype, width = torch.int32, -(-num_inputs // _INPUTS_PER_WORD[kind])
    else:
        dtype, width = torch.uint8, num_inputs // _INPUTS_PER_BYTE.get(kind, 1)
    if rows.layout == "columns":
        stored = _read(rows, (width, rows.stored_rows), 0, dtype, device).t()
    elif rows.head_size:
        stored = _read(rows, (rows.stored_rows, width), 0, dtype, device)
    else:
        first = rows.first_row * width * dtype.itemsize
        stored = _read(rows, (rows.num_rows, width), first, dtype, device)
    if kind == "I8":
        return stored ^ 128
    if kind == "I4":
        return stored + 8 & 15
    if dtype == torch.int32:
        octets = stored.contiguous().view(torch.uint8)
        return (octets if kind == "U8" else _halves(octets))[:, :num_inputs]
    if rows.levels is not None:
        levels = to_torch(rows.levels).to(device)
        return levels[_halves(stored, high_first=kind == "LEVELS_HIGH").int()]
    return stored


def _awq_values(rows: StoredRows, num_inputs: int, device: torch.device) -> Tensor:
    """[N, C] of words [C, N / 8]."""
    shape = num_inputs, rows.stored_rows // 8
    quants = _halves(_read(rows, shape, 0, torch.int32, device).view(torch.uint8))
    return quants.view(num_inputs, -1, 8)[:, :, _AWQ_PLACES].flatten(1).t().contiguous()


def _halves(octets: Tensor, *, high_first: bool = False) -> Tensor:
    pair = (octets >> 4, octets & 15) if high_first else (octets & 15, octets >> 4)
    return torch.stack(pair, -1).flatten(-2)


def _in_order(stored: Tensor, rows: StoredRows) -> Tensor:
    """The wanted rows of those that were read, heads' halves one after the other."""
    if rows.head_size:
        heads, half = stored.shape[0] // rows.head_size, rows.head_size // 2
        pairs = stored.reshape(heads, half, 2, *stored.shape[1:])
        stored = pairs.transpose(1, 2).reshape(stored.shape)
    if stored.shape[0] > rows.num_rows:
        stored = stored[rows.first_row : rows.first_row + rows.num_rows]
    return stored.contiguous()


def _read(
    rows: StoredRows,
    shape: tuple[int, ...],
    first: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    content = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    read_span(rows.file, rows.offset + first, memoryview(content.numpy().data))
    return content.to(device).view(dtype).view(shape)


def _requantized(weight: QuantizedWeight, order: Tensor) -> QuantizedWeight:
    """A matrix [N, C] whose input c belongs to group order[c] ([C] int32), rounded again."""
    order = order.long().to(weight.quants.device)
    zeros = weight.zeros
    middle = 2 ** (weight.bits - 1) if zeros is None else zeros[:, order]
    dequantized = (weight.quants.float() - middle) * weight.scales[:, order]
    sizes = (size for size in REQUANTIZED_GROUPS if dequantized.shape[1] % size == 0)
    return quantize(dequantized, 8, next(sizes, None), has_zeros=False)
