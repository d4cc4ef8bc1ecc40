"""A dense feed-forward block, or one expert of a mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quickstep.model.weights import DenseWeights
from quickstep.ops.table import OpTable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dense_feed_forward"]


def dense_feed_forward(ops: OpTable, weights: DenseWeights, x: Tensor, activation: str) -> Tensor:
    """[T, C] -> [T, C]: down(act(gate(x)) * up(x))."""
    gate_up = ops.linear(x, weights.gate_up)
    return ops.linear(ops.gated_activation(gate_up, activation), weights.down)
