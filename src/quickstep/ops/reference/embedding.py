"""Rows of a table. A copy, so nothing rounds."""

from __future__ import annotations

from torch import Tensor

__all__ = ["embedding"]


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """token_ids [T], weight [V, C] -> [T, C]."""
    return weight[token_ids]
