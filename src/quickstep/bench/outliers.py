"""Synthetic layers with outlier channels, to measure the error of a format on them.

Large models have a few channels that are far larger than the rest; the bundled model does not.

Linear layers: activations are normal, with the same few channels of every token times a factor.
Large models have a handful of such channels, 20 times larger and more (LLM.int8(),
arXiv:2208.07339) or about 100 times (SmoothQuant, arXiv:2211.10438). Weights follow Student's t
with 5 degrees of freedom, which has heavier tails than a normal distribution. Two errors, both the
norm of (output - exact output):

    output    divided by the norm of the exact output
    ordinary  divided by the norm of what the ordinary channels contribute to it: outliers often
              have nearly the same value for every token, and the other channels distinguish tokens

Attention: the same few channels of all keys have a large mean (KIVI, arXiv:2402.02750; most of all
in models with biases on their keys). The softmax cancels a constant, so the exact output does not
depend on it; the error shows how a KV format's step size affects the other channels. The error is
the norm of (output - exact output) divided by that of the exact output, which is dense attention in
float64.

Everything is a function of the seed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch
from torch import Tensor

from quickstep.bench.llama_cpp_formats import block_product, rounded_q4_0, rounded_q8_0
from quickstep.model.quantization import MatrixFormat
from quickstep.model.quantize import quantize_matrix
from quickstep.ops.table import AttentionParams, OpTable, PagedLayout
from quickstep.ops.tensors import head_width

# How many times larger the outlier channels are than the others; 1 means no outliers.
FACTORS = (1, 30, 100)

# Linear layer: outputs, inputs, tokens, outlier channels, degrees of freedom of the weights.
_OUTPUTS, _INPUTS, _LAYER_TOKENS = 512, 2048, 64
_LAYER_OUTLIERS = 6
_FREEDOM = 5
# Attention: tokens, heads, outlier channels of each head, KV block size.
_TOKENS, _QUERY_HEADS, _KV_HEADS, _HEAD_SIZE = 256, 8, 2, 64
_KEY_OUTLIERS = 2
_BLOCK_SIZE = 16


class OutlierLayer(msgspec.Struct, frozen=True):
    """Weights [N, C], activations [T, C], exact output [T, N], its part from ordinary channels."""

    weight: Tensor
    x: Tensor
    exact: Tensor
    ordinary: Tensor


class LayerError(msgspec.Struct, frozen=True):
    """Relative errors; the module docstring defines both."""

    output: float
    ordinary: float


def random_layer(factor: int, seed: int) -> OutlierLayer:
    """A random layer whose outlier channels are `factor` times larger than the others."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_t(_FREEDOM, (_OUTPUTS, _INPUTS)) / _INPUTS**0.5
    x = rng.standard_normal((_LAYER_TOKENS, _INPUTS))
    large = rng.choice(_INPUTS, _LAYER_OUTLIERS, replace=False)
    x[:, large] *= factor
    weight, x = weight.astype(np.float32), x.astype(np.float32)
    ordinary = x.copy()
    ordinary[:, large] = 0
    wide = weight.astype(np.float64).T
    return OutlierLayer(
        torch.from_numpy(weight),
        torch.from_numpy(x),
        torch.from_numpy(x.astype(np.float64) @ wide),
        torch.from_numpy(ordinary.astype(np.float64) @ wide),
    )


def format_error(
    layer: OutlierLayer, ops: OpTable, dtype: torch.dtype, form: MatrixFormat | None
) -> LayerError:
    """The error with quantized weights (`form`) or weights in `dtype`; activations in `dtype`."""
    weight = layer.weight.to(dtype)
    if form is None:
        packed = ops.pack_linear(weight, None)
    else:
        packed = ops.pack_quantized(quantize_matrix(ops, weight, form), None)
    return _error(layer, ops.linear(layer.x.to(dtype), packed))


def block_error(layer: OutlierLayer, bits: int) -> LayerError:
    """The error of llama.cpp's Q8_0 (`bits` is 8) or Q4_0 (4)."""
    rounded: Callable[..., np.ndarray] = rounded_q8_0 if bits == 8 else rounded_q4_0
    product = block_product(layer.x.numpy(), rounded(layer.weight.numpy()))
    return _error(layer, torch.from_numpy(product))


def _error(layer: OutlierLayer, out: Tensor) -> LayerError:
    error = float((out.double() - layer.exact).norm())
    return LayerError(error / float(layer.exact.norm()), error / float(layer.ordinary.norm()))


class KeyLayer(msgspec.Struct, frozen=True):
    """Queries [T, H, D], keys and values [T, K, D] in float32, the exact output [T, H, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    exact: Tensor


def random_keys(factor: int, seed: int) -> KeyLayer:
    """Random keys: outlier channels have the mean `factor`, the others 0; the deviation is 1."""
    rng = np.random.default_rng(seed)
    q = _normal(rng, _QUERY_HEADS)
    k = _normal(rng, _KV_HEADS)
    v = _normal(rng, _KV_HEADS)
    for head in range(_KV_HEADS if factor > 1 else 0):
        large = rng.choice(_HEAD_SIZE, _KEY_OUTLIERS, replace=False)
        k[:, head, torch.from_numpy(large)] += factor
    return KeyLayer(q, k, v, _dense(q.double(), k.double(), v.double()))


def _normal(rng: np.random.Generator, num_heads: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal((_TOKENS, num_heads, _HEAD_SIZE), np.float32))


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence, [T, H, D]."""
    group = _QUERY_HEADS // _KV_HEADS
    keys, values = (part.repeat_interleave(group, dim=1) for part in (k, v))
    scores = torch.einsum("thd,shd->hts", q, keys) * _HEAD_SIZE**-0.5
    future = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, values)


def kv_error(layer: KeyLayer, ops: OpTable, dtype: torch.dtype) -> float:
    """The relative error of attention with a KV cache of `dtype` and float32 activations."""
    num_blocks = _TOKENS // _BLOCK_SIZE
    size = (num_blocks, _BLOCK_SIZE, _KV_HEADS, head_width(_HEAD_SIZE, dtype))
    k_cache, v_cache = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
    positions = torch.arange(_TOKENS)
    blocks = torch.arange(num_blocks, dtype=torch.int32)
    layout = PagedLayout(positions, positions, (0, _TOKENS), (_TOKENS,), blocks[None], _BLOCK_SIZE)
    ops.write_kv(layer.k, layer.v, k_cache, v_cache, layout.slot_mapping)
    params = AttentionParams(scale=_HEAD_SIZE**-0.5)
    out = ops.paged_attention(layer.q, k_cache, v_cache, layout, params, None)
    return float((out.double() - layer.exact).norm() / layer.exact.norm())
