"""The weights of a decoder, packed for the op table that reads them. Plain frozen data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quickstep.ops.table import LinearWeight

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AttentionWeights",
    "DecoderWeights",
    "DenseWeights",
    "LayerWeights",
    "SparseWeights",
]


class AttentionWeights(msgspec.Struct, frozen=True):
    """qkv: hidden -> (H + 2 K) * D in that order; norms are None without QK norm; sinks [H]
    float32, None where the architecture has none.
    """

    qkv: LinearWeight
    output: LinearWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None


class DenseWeights(msgspec.Struct, frozen=True):
    """gate_up: hidden -> 2 * width, gate first; down: width -> hidden. Also one expert."""

    gate_up: LinearWeight
    down: LinearWeight


class SparseWeights(msgspec.Struct, frozen=True):
    """A mixture of experts: router hidden -> experts."""

    router: LinearWeight
    experts: tuple[DenseWeights, ...]


class LayerWeights(msgspec.Struct, frozen=True):
    """One layer; a norm that the architecture lacks is None."""

    attention: AttentionWeights
    feed_forward: DenseWeights | SparseWeights
    before_attention: Tensor | None
    after_attention: Tensor | None
    before_feed_forward: Tensor | None
    after_feed_forward: Tensor | None


class DecoderWeights(msgspec.Struct, frozen=True):
    """A whole decoder: embedding [V, hidden], layers, final norm, output projection.

    The embedding of a tied model is the output projection itself, held once.
    """

    embedding: Tensor | LinearWeight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: LinearWeight
