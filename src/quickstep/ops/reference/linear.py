"""Linear layers: y = x W^T + b, each output an exact sum per K chunk, chunks added in order.
Also rows of a table (`embedding`) and the output projection (`logits`).

Factors are rounded to a few bits below the largest element of their row and chunk, so that BLAS
can add in any order (`exact_math`); the weight once, when it is packed, in its own dtype.
It is widened to fp64 block by block as it is used: on one core 0.15 ns an element, against
0.4 ns for reading it in a one-row product, and no copy of the model is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.ops.reference.exact_math import round_rows, sum_bits, tanh
from quickstep.ops.reference.quantized_linear import quantized_linear, quantized_rows
from quickstep.ops.table import LinearWeight, QuantizedWeight

__all__ = ["embedding", "finished_logits", "linear", "logits", "pack_linear"]

_BLOCK_ELEMENTS = 1 << 18  # of a weight in fp64 at a time: 2 MiB, stays in cache


def _chunk(dtype: torch.dtype) -> int:
    """Channels per exact sum: fp32 factors keep 23 bits, 16-bit ones 21."""
    return 128 if dtype == torch.float32 else 2048


def _round_chunks(x: Tensor, chunk: int) -> list[Tensor]:
    return [round_rows(part.double(), sum_bits(chunk)) for part in torch.split(x, chunk, dim=-1)]


def _row_blocks(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    step = max(1, _BLOCK_ELEMENTS // max(1, num_columns))
    return [(start, min(num_rows, start + step)) for start in range(0, num_rows, step)]


def pack_linear(weight: Tensor, bias: Tensor | None) -> LinearWeight:
    """Weight [N, C], bias [N] or None. The weight itself is kept where no rounding was needed."""
    num_outputs, num_inputs = weight.shape
    rounded = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for start, stop in _row_blocks(num_outputs, num_inputs):
        parts = _round_chunks(weight[start:stop], _chunk(weight.dtype))
        rounded[start:stop] = torch.cat(parts, dim=-1)
    data = weight if weight.is_contiguous() and torch.equal(weight, rounded) else rounded
    nbytes = data.nbytes + (0 if bias is None else bias.nbytes)
    return LinearWeight(data, bias, num_outputs, num_inputs, nbytes)


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """X [T, C] -> [T, N] in x's dtype; T may be 0."""
    data = weight.data
    if isinstance(data, QuantizedWeight):
        return quantized_linear(x, weight)
    assert isinstance(data, Tensor)
    out = x.new_empty(x.shape[0], weight.num_outputs)
    if out.numel() == 0:
        return out
    chunk = _chunk(data.dtype)
    inputs = _round_chunks(x, chunk)
    bias = None if weight.bias is None else weight.bias.double()
    for start, stop in _row_blocks(weight.num_outputs, weight.num_inputs):
        wide = torch.split(data[start:stop].double(), chunk, dim=-1)
        total = inputs[0] @ wide[0].t()
        for part, block in zip(inputs[1:], wide[1:], strict=True):
            total += part @ block.t()
        if bias is not None:
            total += bias[start:stop]
        out[:, start:stop] = total.float()
    return out


def embedding(token_ids: Tensor, weight: Tensor | LinearWeight, dtype: torch.dtype) -> Tensor:
    """token_ids [T], weight [V, C] -> [T, C] in `dtype`, the weight's own where it has one."""
    data = weight.data if isinstance(weight, LinearWeight) else weight
    if isinstance(data, QuantizedWeight):
        return quantized_rows(token_ids, data, dtype)
    assert isinstance(data, Tensor) and data.dtype == dtype
    return data[token_ids]


def logits(hidden: Tensor, weight: LinearWeight, divisor: float, softcap: float | None) -> Tensor:
    """Hidden states [E, C] -> [E, V] fp32."""
    return finished_logits(linear(hidden, weight), divisor, softcap)


def finished_logits(product: Tensor, divisor: float, softcap: float | None) -> Tensor:
    """Widened to fp32, divided, then softcap * tanh(logits / softcap) in fp64."""
    wide = product.float()
    if divisor != 1.0:
        wide = wide / divisor
    if softcap is None:
        return wide
    # row by row: the fp64 scratch is a few times V, and not E times that
    for row in wide:
        row.copy_(tanh(row.double() / softcap) * softcap)
    return wide
