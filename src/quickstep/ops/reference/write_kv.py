"""New keys and values into their paged slots: a copy, rounded where the cache is narrower."""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.ops.kv_format import quantize_heads

__all__ = ["write_kv"]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v [T, K, D] into k_cache, v_cache [B, S, K, W] at the flat slots slot_mapping [T]."""
    for heads, cache in ((k, k_cache), (v, v_cache)):
        stored = quantize_heads(heads) if cache.dtype == torch.int8 else heads.to(cache.dtype)
        cache.view(-1, *cache.shape[2:])[slot_mapping] = stored
