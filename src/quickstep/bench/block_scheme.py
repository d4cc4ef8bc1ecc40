"""llama.cpp's Q8_0 and Q4_0 schemes in NumPy, to judge our formats beside them.

Both hold weights in blocks of 32 inputs with a float16 scale, and quantise activations to Q8_0 on
the way in. Here the quantized values are multiplied out, and the product taken in float32: its
rounding is far below that of the quantized values. `block_ops` puts the scheme under a whole model.
As llama.cpp keeps them at more bits, embeddings and the output projection are Q8_0 in both.

    Q8_0   d = max |x| / 127            quant = round(x / d)
    Q4_0   d = (x of max |x|) / -8      quant = min(15, trunc(x / d + 8.5)) - 8
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from quickstep.ops.reference.linear import finished_logits
from quickstep.ops.table import LinearWeight, OpTable

__all__ = ["BLOCK", "block_ops", "block_product", "rounded_q4_0", "rounded_q8_0"]

BLOCK = 32

Floats = NDArray[np.float32]


def rounded_q8_0(values: Floats) -> Floats:
    """What Q8_0 keeps of values [..., C], in float32; C is a multiple of 32."""
    blocks = _blocks(values)
    step = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(step)
    quants = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)
    kept: Floats = (quants * _half(step)).reshape(values.shape)
    return kept


def rounded_q4_0(values: Floats) -> Floats:
    """What Q4_0 keeps of values [..., C], in float32; C is a multiple of 32."""
    blocks = _blocks(values)
    place = np.abs(blocks).argmax(-1, keepdims=True)
    step = np.take_along_axis(blocks, place, -1) / np.float32(-8)
    quants = np.minimum(np.float32(15), np.trunc(blocks * _inverse(step) + np.float32(8.5)))
    kept: Floats = ((quants - np.float32(8)) * _half(step)).reshape(values.shape)
    return kept


def block_product(x: Floats, kept: Floats) -> Floats:
    """X [T, C] through Q8_0, times weights [N, C] that one of the above gave -> [T, N]."""
    product: Floats = rounded_q8_0(x) @ kept.T
    return product


def block_ops(ops: OpTable, bits: int, vocab_size: int) -> OpTable:
    """`ops`, with matrices in Q8_0 (8) or Q4_0 (4); those of `vocab_size` outputs in Q8_0."""

    def pack(weight: Tensor, bias: Tensor | None) -> LinearWeight:
        outputs, inputs = weight.shape
        rounded = rounded_q8_0 if bits == 8 or outputs == vocab_size else rounded_q4_0
        kept = torch.from_numpy(rounded(weight.float().numpy()))
        return LinearWeight(kept, bias, outputs, inputs, kept.nbytes)

    def linear(x: Tensor, weight: LinearWeight) -> Tensor:
        assert isinstance(weight.data, Tensor)
        product = block_product(x.float().numpy(), weight.data.numpy())
        out = torch.from_numpy(product)
        return (out if weight.bias is None else out + weight.bias.float()).to(x.dtype)

    def embedding(token_ids: Tensor, weight: Tensor | LinearWeight, dtype: torch.dtype) -> Tensor:
        rows = weight.data if isinstance(weight, LinearWeight) else weight
        assert isinstance(rows, Tensor)
        return rows[token_ids].to(dtype)

    def logits(
        hidden: Tensor, weight: LinearWeight, divisor: float, softcap: float | None
    ) -> Tensor:
        return finished_logits(linear(hidden, weight), divisor, softcap)

    return replace(
        ops, pack_linear=pack, linear=linear, embedding=embedding, logits=logits, steps=None
    )


def _blocks(values: Floats) -> Floats:
    return values.astype(np.float32, copy=False).reshape(*values.shape[:-1], -1, BLOCK)


def _inverse(step: Floats) -> Floats:
    return np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)


def _half(step: Floats) -> Floats:
    return step.astype(np.float16).astype(np.float32)
