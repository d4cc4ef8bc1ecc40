"""The output projection: a product, then division and soft cap in the head's own precision."""

from __future__ import annotations

from torch import Tensor

from quickstep.ops.reference.elementary import tanh
from quickstep.ops.reference.linear import linear
from quickstep.ops.table import LinearWeight

__all__ = ["finished_logits", "logits"]


def logits(hidden: Tensor, weight: LinearWeight, divisor: float, softcap: float | None) -> Tensor:
    """Hidden states [E, C] -> [E, V] fp32."""
    return finished_logits(linear(hidden, weight), divisor, softcap)


def finished_logits(product: Tensor, divisor: float, softcap: float | None) -> Tensor:
    """Widened to fp32, divided, then softcap * tanh(logits / softcap) in fp64."""
    wide = product.float()
    if divisor != 1.0:
        wide = wide / divisor
    if softcap is None:
        return wide
    # row by row: the fp64 scratch is a few times V, and not E times that
    for row in wide:
        row.copy_(tanh(row.double() / softcap) * softcap)
    return wide
