"""Rotary position embedding (Su et al., 2021): pairs of channels turned by an angle.

Products and sums of single elements only, one IEEE operation a call: nothing depends on place.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotary"]


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """X [T, H, D], cos and sin [T, D_rot / 2] -> [T, H, D]; channels from D_rot on are kept.

    Pairs are (i, i + D_rot / 2), or (2 i, 2 i + 1) when interleaved.
    """
    half = cos.shape[-1]
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    turned = x[..., : 2 * half].double()
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = first * c - second * s, second * c + first * s
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated.float().to(x.dtype), x[..., 2 * half :]), -1)
