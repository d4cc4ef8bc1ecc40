"""llama.cpp's Q8_0 and Q4_0 in NumPy, for comparing the accuracy of our formats with them.

Both store weights in blocks of 32 inputs with a float16 scale, and quantize activations to Q8_0.
Here weights and activations are dequantized and multiplied in float32, whose rounding error is far
smaller than that of the quantization. `block_ops` runs a model in one of the formats. Embeddings
and the output projection are Q8_0 in both, because llama.cpp stores them with more bits as well.

    Q8_0   d = max |x| / 127            quant = round(x / d)
    Q4_0   d = (x of max |x|) / -8      quant = min(15, trunc(x / d + 8.5)) - 8
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from quickstep.ops.reference.logits import Logits
from quickstep.ops.table import OpTable
from quickstep.ops.weights import LinearWeight

BLOCK = 32

Floats = NDArray[np.float32]


def rounded_q8_0(values: Floats) -> Floats:
    """Values [..., C] after rounding to Q8_0, in float32; C is a multiple of 32."""
    blocks = _blocks(values)
    step = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(step)
    quants = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)
    rounded: Floats = (quants * _half(step)).reshape(values.shape)
    return rounded


def rounded_q4_0(values: Floats) -> Floats:
    """Values [..., C] after rounding to Q4_0, in float32; C is a multiple of 32."""
    blocks = _blocks(values)
    place = np.abs(blocks).argmax(-1, keepdims=True)
    step = np.take_along_axis(blocks, place, -1) / np.float32(-8)
    quants = np.minimum(np.float32(15), np.trunc(blocks * _inverse(step) + np.float32(8.5)))
    rounded: Floats = ((quants - np.float32(8)) * _half(step)).reshape(values.shape)
    return rounded


def block_product(x: Floats, rounded_weight: Floats) -> Floats:
    """The product of x [T, C], rounded to Q8_0, with rounded weights [N, C] -> [T, N]."""
    product: Floats = rounded_q8_0(x) @ rounded_weight.T
    return product


def block_ops(ops: OpTable, bits: int, vocab_size: int) -> OpTable:
    """`ops` with matrices in Q8_0 (`bits` is 8) or Q4_0 (4); with `vocab_size` rows in Q8_0."""

    def pack(weight: Tensor, bias: Tensor | None) -> LinearWeight:
        outputs, inputs = weight.shape
        round_weight = rounded_q8_0 if bits == 8 or outputs == vocab_size else rounded_q4_0
        rounded = torch.from_numpy(round_weight(weight.float().numpy()))
        return LinearWeight(rounded, bias, outputs, inputs, rounded.nbytes)

    def linear(x: Tensor, weight: LinearWeight) -> Tensor:
        assert isinstance(weight.data, Tensor)
        product = block_product(x.float().numpy(), weight.data.numpy())
        out = torch.from_numpy(product)
        return (out if weight.bias is None else out + weight.bias.float()).to(x.dtype)

    def embedding(token_ids: Tensor, weight: Tensor | LinearWeight, dtype: torch.dtype) -> Tensor:
        rows = weight.data if isinstance(weight, LinearWeight) else weight
        assert isinstance(rows, Tensor)
        return rows[token_ids].to(dtype)

    return replace(
        ops,
        pack_linear=pack,
        load_linear=None,
        linear=linear,
        embedding=embedding,
        logits=Logits(linear, ops.add_lora_),
        steps=None,
    )


def _blocks(values: Floats) -> Floats:
    return values.astype(np.float32, copy=False).reshape(*values.shape[:-1], -1, BLOCK)


def _inverse(step: Floats) -> Floats:
    return np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)


def _half(step: Floats) -> Floats:
    return step.astype(np.float16).astype(np.float32)
