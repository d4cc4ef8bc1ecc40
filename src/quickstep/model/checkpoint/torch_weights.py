"""A decoder whose small tensors are `HostTensor`s, seen through tensors of torch.

For running it op by op: on the same memory, with the same packed matrices. Called where torch is
imported anyhow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from quickstep.model.decoder import Decoder
from quickstep.model.rope import RopeTable
from quickstep.model.weights import AttentionWeights, DecoderWeights, LayerWeights
from quickstep.ops.host_tensor import HostTensor, to_torch
from quickstep.ops.table import KVCache, LinearWeight

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["with_torch_kv", "with_torch_tensors"]


def with_torch_tensors(model: Decoder) -> Decoder:
    """The same model; itself if its tensors are torch's."""
    if not isinstance(model.weights.final_norm, HostTensor):
        return model
    ropes = tuple(RopeTable(to_torch(table.cos), to_torch(table.sin)) for table in model.ropes)
    return model.with_tensors(_weights(model.weights), ropes)


def with_torch_kv(kv: KVCache) -> KVCache:
    """The same memory."""
    return KVCache(tuple(map(to_torch, kv.keys)), tuple(map(to_torch, kv.values)))


def _weights(weights: DecoderWeights) -> DecoderWeights:
    embedding = weights.embedding
    return replace(
        weights,
        embedding=embedding if isinstance(embedding, LinearWeight) else to_torch(embedding),
        layers=tuple(map(_layer, weights.layers)),
        final_norm=to_torch(weights.final_norm),
    )


def _layer(layer: LayerWeights) -> LayerWeights:
    return replace(
        layer,
        attention=_attention(layer.attention),
        before_attention=_small(layer.before_attention),
        after_attention=_small(layer.after_attention),
        before_feed_forward=_small(layer.before_feed_forward),
        after_feed_forward=_small(layer.after_feed_forward),
    )


def _attention(weights: AttentionWeights) -> AttentionWeights:
    return replace(
        weights,
        q_norm=_small(weights.q_norm),
        k_norm=_small(weights.k_norm),
        sinks=_small(weights.sinks),
    )


def _small(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else to_torch(weight)
