"""A step op by op, through the model's own Python and torch: any model, any device.

Opened by `runtime.capture` for what cannot be captured. A decoder
whose small tensors are `HostTensor`s is seen through tensors of torch, on the same memory and with
the same packed matrices. Importing this imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from torch import Tensor

from quickstep.model.decoder import AttentionWeights, Decoder, DecoderWeights, LayerWeights
from quickstep.model.interface import ForwardBatch, Model
from quickstep.model.rope import RopeTable
from quickstep.ops.table import KVCache, LinearWeight
from quickstep.ops.tensors import HostTensor, to_torch
from quickstep.runtime.batch import build_batch, emitting_tokens
from quickstep.runtime.slots import Slot
from quickstep.types import StepRow

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EagerSteps", "with_torch_kv", "with_torch_tensors"]


class EagerSteps:
    """Runs the model's Python. A decoder in memory of ours is seen through tensors of torch."""

    def __init__(self, model: Model, kv: KVCache, block_size: int) -> None:
        self._model = with_torch_tensors(model) if isinstance(model, Decoder) else model
        self._kv = with_torch_kv(kv)
        self._block_size = block_size
        self._batch: ForwardBatch | None = None

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        model = self._model
        self._batch = build_batch(rows, slots, self._block_size, model.vocab_size, model.device)

    @torch.inference_mode()
    def run(self, emitting: Sequence[int], every_token: bool) -> tuple[Tensor, Tensor]:
        """`StepModel.run`."""
        assert self._batch is not None, "a step is prepared before it runs"
        model, batch, self._batch = self._model, self._batch, None
        chosen = emitting_tokens(batch.layout, emitting)
        if not every_token:
            batch = replace(batch, emitting=chosen)
        hidden = model.forward(batch, self._kv)
        if not emitting:
            return hidden, torch.empty((0, model.vocab_size), device=model.device.type)
        return hidden, model.logits(hidden[chosen.tokens] if every_token else hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor | HostTensor) -> Tensor:
        """`StepModel.logits`."""
        return self._model.logits(to_torch(hidden))


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
    embedding = weights.embed_tokens
    return replace(
        weights,
        embed_tokens=embedding if isinstance(embedding, LinearWeight) else to_torch(embedding),
        layers=tuple(map(_layer, weights.layers)),
        final_norm=to_torch(weights.final_norm),
    )


def _layer(layer: LayerWeights) -> LayerWeights:
    return replace(
        layer,
        attention=_attention(layer.attention),
        input_layernorm=_small(layer.input_layernorm),
        post_attention_layernorm=_small(layer.post_attention_layernorm),
        pre_feedforward_layernorm=_small(layer.pre_feedforward_layernorm),
        post_feedforward_layernorm=_small(layer.post_feedforward_layernorm),
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
