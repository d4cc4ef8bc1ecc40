"""Attention of complete texts, in PyTorch: the definition of `ops.table.TextAttentionOp`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

# Queries that are computed at a time: a long text needs no more than so many rows of scores.
_QUERIES = 512


def text_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Sequence[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Text by text: a text's shapes and places decide its bits."""
    texts = [
        _of_text(q[start:end], k[start:end], v[start:end], scale, window)
        for start, end in pairwise(offsets)
    ]
    return torch.cat(texts)


def _of_text(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """[L, H, D] -> [L, H, D]."""
    queries = q.float().transpose(0, 1).contiguous() * scale
    keys = k.float().permute(1, 2, 0).contiguous()
    values = v.float().transpose(0, 1).contiguous()
    places = torch.arange(q.shape[0], device=q.device)
    parts = []
    for start in range(0, q.shape[0], _QUERIES):
        scores = torch.matmul(queries[:, start : start + _QUERIES], keys)
        if window is not None:
            distance = (places[start : start + _QUERIES, None] - places).abs()
            scores = scores.masked_fill(distance > window, float("-inf"))
        parts.append(torch.matmul(torch.softmax(scores, dim=-1), values))
    return torch.cat(parts, dim=1).transpose(0, 1).contiguous().to(q.dtype)
