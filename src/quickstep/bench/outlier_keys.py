"""A synthetic attention whose keys have a few channels far larger than the rest.

Keys of trained models do (KIVI, arXiv:2402.02750: the same channels in every token; models with
biases on their keys most of all), and with nearly the same value for every token, which the softmax
takes out again: the exact output does not see them. What a KV format's steps make of the other
channels is measured as the norm of the output's error over that of the exact output, which is
dense attention in float64. Drawn from a seed.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor

from quickstep.ops.table import AttentionParams, OpTable, PagedLayout
from quickstep.ops.tensors import head_width

__all__ = ["KeyLayer", "kv_error", "random_keys"]

_TOKENS, _QUERY_HEADS, _KV_HEADS, _HEAD_SIZE = 256, 8, 2, 64
_LARGE_CHANNELS = 2
_BLOCK_SIZE = 16


class KeyLayer(msgspec.Struct, frozen=True):
    """Queries [T, H, D], keys and values [T, K, D] in float32, the exact output [T, H, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    exact: Tensor


def random_keys(factor: int, seed: int) -> KeyLayer:
    """Keys whose large channels stand around `factor`, all others around 0, all 1 apart."""
    rng = np.random.default_rng(seed)
    q = _normal(rng, _QUERY_HEADS)
    k = _normal(rng, _KV_HEADS)
    v = _normal(rng, _KV_HEADS)
    for head in range(_KV_HEADS if factor > 1 else 0):
        large = rng.choice(_HEAD_SIZE, _LARGE_CHANNELS, replace=False)
        k[:, head, torch.from_numpy(large)] += factor
    return KeyLayer(q, k, v, _dense(q.double(), k.double(), v.double()))


def _normal(rng: np.random.Generator, num_heads: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal((_TOKENS, num_heads, _HEAD_SIZE), np.float32))


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, [T, H, D]."""
    share = _QUERY_HEADS // _KV_HEADS
    keys, values = (part.repeat_interleave(share, dim=1) for part in (k, v))
    scores = torch.einsum("thd,shd->hts", q, keys) * _HEAD_SIZE**-0.5
    hidden = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, values)


def kv_error(layer: KeyLayer, ops: OpTable, dtype: torch.dtype) -> float:
    """Of a cache of `dtype` under float32 activations."""
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
