"""How a KV cache holds its heads: as a float dtype, or as int8 quantized values with a scale beside
them.

A cache is [B, S, K, W]. In a float dtype W is the head size D. In int8 it is D + 4: D quantized
values, then the four bytes of the float32 that they are multiplied by, one for each token and head;
so a block travels as one piece, and a masked slot's scale is masked with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quickstep.ops.dtypes import INT8, DType, host_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["SCALE_BYTES", "head_size_of", "head_width", "quantize_heads", "read_heads"]

SCALE_BYTES = 4
_LEAST = 1e-30  # below it a scale's reciprocal would overflow; such a head is stored as zero


def head_width(head_size: int, dtype: DType | torch.dtype) -> int:
    """W, the elements that a head of D takes in a cache of this dtype."""
    return head_size + SCALE_BYTES if host_dtype(dtype) == INT8 else head_size


def head_size_of(cache: Tensor) -> int:
    """D of a cache [B, S, K, W]."""
    width: int = cache.shape[-1]
    return width - SCALE_BYTES if host_dtype(cache.dtype) == INT8 else width


def quantize_heads(x: Tensor) -> Tensor:
    """[..., D] -> [..., D + 4] int8: quantized values x * (127 / max|x|) rounded half to even,
    scale max|x| / 127, all in float32. A head with NaN or infinity gets NaN as its scale.
    """
    import torch

    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    whole = torch.full_like(most, 127.0)
    is_finite, is_zero = most.isfinite(), most < _LEAST
    is_used = is_finite & ~is_zero
    quants = (wide * torch.div(whole, most)).round().masked_fill(~is_used, 0.0)
    scale = torch.div(most, whole).masked_fill(is_zero, 0.0).masked_fill(~is_finite, torch.nan)
    return torch.cat((quants.to(torch.int8), scale.contiguous().view(torch.int8)), -1)


def read_heads(rows: Tensor) -> Tensor:
    """[..., W] of a cache -> [..., D] in float64, exactly."""
    import torch

    if rows.dtype != torch.int8:
        return rows.double()
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    scale = scale.view(torch.float32)
    return rows[..., :-SCALE_BYTES].double() * scale.double()
