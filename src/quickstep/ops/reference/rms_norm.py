"""Root-mean-square norm (Zhang and Sennrich, 2019), alone and after the residual addition.

The squares are rounded so that their sum is exact (`exact_math`): torch's own sum over a row
changes bits with the number of rows once it is split over threads (seen at C = 40000).
"""

from __future__ import annotations

from torch import Tensor

from quickstep.ops.reference.exact_math import reciprocal_sqrt, round_rows

__all__ = ["add_rms_norm", "rms_norm"]

_SQUARE_BITS = 36  # exact sums up to C = 2**17


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """X [..., C], weight [C] -> [..., C]: x / sqrt(mean(x^2) + eps) * (weight + offset)."""
    wide = x.double()
    mean_square = round_rows(wide * wide, _SQUARE_BITS).sum(-1, keepdim=True) / x.shape[-1]
    scaled = wide * reciprocal_sqrt(mean_square + eps) * (weight.double() + offset)
    return scaled.float().to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to x's dtype first."""
    summed = (x.double() + residual.double()).float().to(x.dtype)
    return rms_norm(summed, weight, eps, offset), summed
