"""New keys and values into their paged slots. A copy, so nothing rounds."""

from __future__ import annotations

from torch import Tensor

__all__ = ["write_kv"]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v [T, K, D] into k_cache, v_cache [B, S, K, D] at the flat slots slot_mapping [T]."""
    k_cache.view(-1, *k.shape[1:])[slot_mapping] = k
    v_cache.view(-1, *v.shape[1:])[slot_mapping] = v
