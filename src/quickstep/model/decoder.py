"""The decoder: one forward pass over packed weights for every native architecture.

The `ModelSpec` drives the forward pass. Built by the loader, called by the runtime through
`model.interface.Model`. Computes over rows only through the op table or elementwise, so that a
row's bits never depend on the other rows. Holds no per-request state and never allocates KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quickstep.model.adapters.lora_modules import (
    Projection,
    embedding_number,
    lm_head_number,
    module_number,
)
from quickstep.model.decoder_spec import ModelSpec, QKNorm
from quickstep.model.decoder_weights import AttentionWeights, DecoderWeights, MoEWeights
from quickstep.model.interface import ForwardBatch, KVLayout
from quickstep.model.rope import RopeTable
from quickstep.model.sharding import Shard, shard_spec
from quickstep.ops.table import (
    AttentionParams,
    KVCache,
    LoRAMapping,
    OpTable,
    PagedLayout,
)
from quickstep.ops.tensors import AnyTensor, Device, TensorT, rounded
from quickstep.ops.weights import LinearWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_COMPLETE = Shard()


class Decoder:
    """A native model over packed weights; see `model.interface.Model`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        ropes: tuple[RopeTable, ...],
        ops: OpTable,
        max_model_len: int,
        fingerprint: str,
        shard: Shard = _COMPLETE,
    ) -> None:
        self._spec = spec
        self._shard = shard
        self._own = shard_spec(spec, shard)  # what these weights compute
        self._weights = weights
        self._ropes = ropes
        self._ops = ops
        self._max_model_len = max_model_len
        self._fingerprint = fingerprint
        dtype = weights.final_norm.dtype
        # rounded to the weights' dtype, as Gemma was trained
        self._multiplier = rounded(spec.embedding_multiplier, dtype)
        self._attention_params = tuple(
            AttentionParams(spec.attention_scale, layer.window, spec.attention_softcap)
            for layer in spec.layers
        )

    @property
    def spec(self) -> ModelSpec:
        """What the model computes."""
        return self._spec

    @property
    def weights(self) -> DecoderWeights:
        """The packed weights."""
        return self._weights

    @property
    def ops(self) -> OpTable:
        """What it computes with."""
        return self._ops

    def with_ops(self, ops: OpTable) -> Decoder:
        """The same model and weights on another op table, which must read these weights."""
        return self._like(self._weights, self._ropes, ops)

    @property
    def ropes(self) -> tuple[RopeTable, ...]:
        """The rotary tables."""
        return self._ropes

    def with_tensors(self, weights: DecoderWeights, ropes: tuple[RopeTable, ...]) -> Decoder:
        """The same model on tensors of another kind, of the same values."""
        return self._like(weights, ropes, self._ops)

    def _like(self, weights: DecoderWeights, ropes: tuple[RopeTable, ...], ops: OpTable) -> Decoder:
        sizes = self._max_model_len, self._fingerprint, self._shard
        return Decoder(self._spec, weights, ropes, ops, *sizes)

    @property
    def exact(self) -> bool:
        """Whether a row's bits never depend on its batch: always, for a native model."""
        return True

    @property
    def kv_layout(self) -> KVLayout:
        """What to allocate."""
        return KVLayout(self._own.kv_groups, self._weights.final_norm.dtype)

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return self._spec.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence the tables cover, in tokens."""
        return self._max_model_len

    @property
    def device(self) -> torch.device | Device:
        """Where weights and KV live."""
        return self._weights.final_norm.device

    @property
    def fingerprint(self) -> str:
        """Stable name of weights, dtype and kernel set (hex digest)."""
        return self._fingerprint

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """`Model.forward`."""
        return self.forward_with_aux(batch, kv, ())[0]

    def forward_with_aux(
        self, batch: ForwardBatch, kv: KVCache, aux_layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`Model.forward`, and the inputs [T, hidden] of these layers, numbered from 0.

        With emitting tokens only, the last layer stops at its KV for others: the layer's keys and
        values are all that later tokens read of them.
        """
        aux: list[Tensor] = []
        layout, emitting, lora = batch.layout, batch.emitting, batch.lora
        rotations = tuple(table.at(self._ops, layout.positions) for table in self._ropes)
        residual = self._embedding(batch.token_ids)
        if lora is not None:
            self._ops.add_lora_(residual, batch.token_ids, embedding_number(self._spec), lora)
        if self._multiplier != 1.0:
            residual = residual * self._multiplier
        if self._ops.plan_attention is not None:
            num_heads, keys = self._own.num_heads, kv.keys[0]
            layout = self._ops.plan_attention(layout, residual.dtype, num_heads, keys)
        delta: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            kind = self._spec.layers[index]
            rotation = None if kind.rope is None else rotations[kind.rope]
            x, residual = self._add_and_norm(delta, residual, layer.input_layernorm)
            aux += [residual for aux_layer in aux_layers if aux_layer == index]
            q = self._write_kv_and_query(index, x, rotation, layout, kv, lora)
            if emitting is not None and index == self._spec.num_layers - 1:
                layout, tokens, lora = emitting.layout, emitting.tokens, emitting.lora
                q, residual = q[tokens], residual[tokens]
                if not tokens.shape[0]:
                    return residual, tuple(aux)
            x = self._attention(index, q, layout, kv, lora)
            delta = self._norm_output(x, layer.post_attention_layernorm)
            x, residual = self._add_and_norm(delta, residual, layer.pre_feedforward_layernorm)
            x = self._mlp(index, x, lora)
            delta = self._norm_output(x, layer.post_feedforward_layernorm)
        hidden, _ = self._add_and_norm(delta, residual, self._weights.final_norm)
        return hidden, tuple(aux)

    def logits(self, hidden: AnyTensor, lora: LoRAMapping | None = None) -> AnyTensor:
        """`Model.logits`."""
        spec, head = self._spec, self._weights.lm_head
        adapters = None if lora is None else (lm_head_number(spec), lora)
        divisor, softcap = spec.logit_divisor, spec.logit_softcap
        logits = self._ops.logits(hidden, head, divisor, softcap, adapters)
        ranks, size = self._ops.ranks, spec.vocab_size
        return (
            logits
            if ranks is None
            else ranks.gather_logits(logits, self._shard.outputs(size), size)
        )

    def _embedding(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, hidden] of token ids [T]."""
        weight, dtype = self._weights.embed_tokens, self._weights.final_norm.dtype
        ranks = self._ops.ranks
        if ranks is None:
            return self._ops.embedding(token_ids, weight, dtype)
        own = self._shard.outputs(self._spec.vocab_size)
        ids = ranks.local_ids(token_ids, own, self._spec.vocab_size)
        return ranks.gather_rows(self._ops.embedding(ids, weight, dtype), token_ids, own)

    def _of_all_ranks(self, x: TensorT, own: range, num_columns: int) -> TensorT:
        """x [T, n], this rank's columns `own` -> [T, num_columns]."""
        ranks = self._ops.ranks
        return x if ranks is None else ranks.gather(x, own, num_columns)

    def _heads_of_all_ranks(self, x: Tensor, num_heads: int) -> Tensor:
        """x [T, n * D] of this rank's heads -> [T, num_heads * D]."""
        size, own = self._spec.head_size, self._shard.heads(num_heads)
        return self._of_all_ranks(x, range(own.start * size, own.stop * size), num_heads * size)

    def _add_and_norm(
        self, delta: Tensor | None, residual: Tensor, norm: AnyTensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add the last sub-block's output to the residual; return the next one's input, and it."""
        eps, offset = self._spec.norm_eps, self._spec.norm_offset
        if delta is not None and norm is not None:
            return self._ops.add_rms_norm(delta, residual, norm, eps, offset)
        if delta is not None:
            residual = residual + delta
        if norm is None:
            return residual, residual
        return self._ops.rms_norm(residual, norm, eps, offset), residual

    def _norm_output(self, x: Tensor, norm: AnyTensor | None) -> Tensor:
        """Norm and scale a sub-block's output where the architecture does."""
        if norm is not None:
            x = self._ops.rms_norm(x, norm, self._spec.norm_eps, self._spec.norm_offset)
        if self._spec.residual_multiplier != 1.0:
            x = x * self._spec.residual_multiplier
        return x

    def _write_kv_and_query(
        self,
        index: int,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        layout: PagedLayout,
        kv: KVCache,
        lora: LoRAMapping | None,
    ) -> Tensor:
        """Write a layer's KV of x [T, hidden], return its queries [T, H, D]."""
        ops = self._ops
        q, k, v = self._qkv(index, x, lora)
        keys, values, slots = kv.keys[index], kv.values[index], layout.slot_mapping
        if rotation is not None and ops.rotary_write_kv is not None:
            return ops.rotary_write_kv(q, k, v, *rotation, False, keys, values, slots)
        if rotation is not None:
            q = ops.rotary(q, rotation[0], rotation[1], False)
            k = ops.rotary(k, rotation[0], rotation[1], False)
        ops.write_kv(k, v, keys, values, slots)
        return q

    def _attention(
        self,
        index: int,
        q: Tensor,
        layout: PagedLayout,
        kv: KVCache,
        lora: LoRAMapping | None,
    ) -> Tensor:
        """One layer's attention of q [T, H, D] over the KV written, and its output projection."""
        ops, spec = self._ops, self._spec
        keys, values = kv.keys[index], kv.values[index]
        weights = self._weights.layers[index].attention
        params = self._attention_params[index]
        mixed = ops.paged_attention(q, keys, values, layout, params, weights.sinks)
        mixed = mixed.reshape(-1, self._own.num_heads * spec.head_size)
        mixed = self._heads_of_all_ranks(mixed, spec.num_heads)
        x = self._linear(mixed, weights.o_proj, index, Projection.O_PROJ, lora)
        return self._of_all_ranks(x, self._shard.outputs(spec.hidden_size), spec.hidden_size)

    def _linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        index: int,
        projection: Projection,
        lora: LoRAMapping | None,
    ) -> Tensor:
        """A product of layer `index`, with the tokens' adapters."""
        y = self._ops.linear(x, weight)
        if lora is not None:
            self._ops.add_lora_(y, x, module_number(index, projection), lora)
        return y

    def _qkv(
        self, index: int, x: Tensor, lora: LoRAMapping | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], k and v [T, K, D], normed where the architecture does."""
        spec, weights = self._own, self._weights.layers[index].attention
        queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        qkv = self._linear(x, weights.qkv, index, Projection.QKV, lora)
        q, k = qkv[:, :queries], qkv[:, queries : queries + keys]
        v = qkv[:, queries + keys :]
        if spec.qk_norm is QKNorm.FULL:
            q, k = self._norm_complete_qk(weights, q, k)
        q = q.view(-1, spec.num_heads, spec.head_size)
        k, v = (part.view(-1, spec.num_kv_heads, spec.head_size) for part in (k, v))
        if spec.qk_norm is QKNorm.HEAD:
            q, k = self._norm_qk(weights, q, k)
        return q, k, v

    def _norm_complete_qk(
        self, weights: AttentionWeights, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Norms over the heads of all ranks, of which the rank's own are returned."""
        spec, size = self._spec, self._spec.head_size
        q = self._heads_of_all_ranks(q, spec.num_heads)
        k = self._heads_of_all_ranks(k, spec.num_kv_heads)
        q, k = self._norm_qk(weights, q, k)
        if self._ops.ranks is None:
            return q, k
        heads, kv_heads = self._shard.heads(spec.num_heads), self._shard.heads(spec.num_kv_heads)
        return (
            q[:, heads.start * size : heads.stop * size],
            k[:, kv_heads.start * size : kv_heads.stop * size],
        )

    def _norm_qk(self, weights: AttentionWeights, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        eps, offset = self._spec.norm_eps, self._spec.norm_offset
        assert weights.q_norm is not None and weights.k_norm is not None
        q = self._ops.rms_norm(q, weights.q_norm, eps, offset)
        return q, self._ops.rms_norm(k, weights.k_norm, eps, offset)

    def _mlp(self, index: int, x: Tensor, lora: LoRAMapping | None) -> Tensor:
        weights, activation = self._weights.layers[index].mlp, self._spec.activation
        if isinstance(weights, MoEWeights):
            assert self._spec.layers[index].sparse and self._spec.moe is not None
            # Imported here: it computes with torch.
            from quickstep.model.experts import mixture_of_experts

            return mixture_of_experts(self._ops, weights, x, self._spec, index, lora)
        if lora is None and self._ops.gated_linear is not None:
            x = self._ops.gated_linear(x, weights.gate_up, activation)
        else:
            gate_up = self._linear(x, weights.gate_up, index, Projection.GATE_UP, lora)
            x = self._ops.gated_activation(gate_up, activation)
        spec, shard = self._spec, self._shard
        x = self._of_all_ranks(x, shard.outputs(spec.intermediate_size), spec.intermediate_size)
        x = self._linear(x, weights.down_proj, index, Projection.DOWN_PROJ, lora)
        return self._of_all_ranks(x, shard.outputs(spec.hidden_size), spec.hidden_size)
