"""Attention over a paged KV cache: the mixer of most layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quickstep.model.adapters.lora_modules import Projection
from quickstep.model.decoder_spec import KVSize, QKNorm
from quickstep.model.decoder_weights import AttentionWeights
from quickstep.model.layers.interface import LayerStep
from quickstep.model.layers.layer_ops import LayerOps
from quickstep.ops.table import AttentionParams, LoRAMapping

if TYPE_CHECKING:
    from torch import Tensor


class Attention:
    """A `Mixer`: queries of a token over the keys and values of it and of those before it.

    `place` is that of its keys and values in a `KVCache`, or of those that it reads.
    """

    def __init__(self, ops: LayerOps, weights: AttentionWeights, place: int) -> None:
        spec, layer = ops.spec, ops.spec.layers[ops.index]
        self._ops = ops
        self._weights = weights
        self._place = place
        self._has_keys = layer.kv_from is None
        self._values_are_keys = layer.values_are_keys
        self._rope = layer.rope
        self._query_rope = layer.rope if layer.query_rope is None else layer.query_rope
        self._interleaved = layer.rope is not None and spec.ropes[layer.rope].interleaved
        self._params = AttentionParams(
            spec.attention_scale, layer.window, spec.attention_softcap, chunk=layer.chunk
        )

    @property
    def kv_size(self) -> KVSize | None:
        """K and V of the rank's heads; None where it reads another layer's."""
        return self._ops.own.kv_size if self._has_keys else None

    def write(self, x: Tensor, step: LayerStep) -> tuple[Tensor, ...]:
        """Write the KV of x [T, hidden], return its queries [T, H, D], and the gates [T, H * D] of
        what attention returns, if there are any.
        """
        if not self._has_keys:
            return (self._queries(x, step),)
        q, k, v, *gates = self._qkv(x, step.lora)
        return self._write(q, k, v, step), *gates

    def _write(self, q: Tensor, k: Tensor, v: Tensor, step: LayerStep) -> Tensor:
        """Write k and v, return q, turned where the layer turns them."""
        table = self._ops.table
        keys, values = step.kv.keys[self._place], step.kv.values[self._place]
        slots = step.layout.slot_mapping
        pairs = self._interleaved
        if self._rope is not None and self._rope == self._query_rope:
            cos, sin = step.rotations[self._rope]
            if table.rotary_write_kv is not None and values is not None:
                return table.rotary_write_kv(q, k, v, cos, sin, pairs, keys, values, slots)
        if self._query_rope is not None:
            q = table.rotary(q, *step.rotations[self._query_rope], pairs)
        if self._rope is not None:
            k = table.rotary(k, *step.rotations[self._rope], pairs)
        table.write_kv(k, v, keys, values, slots)
        return q

    def read(self, rows: tuple[Tensor, ...], step: LayerStep) -> Tensor:
        """Attention of queries [T, H, D] over the KV written, and its output projection."""
        q, *gates = rows
        ops, weights, spec = self._ops, self._weights, self._ops.spec
        keys, values = step.kv.keys[self._place], step.kv.values[self._place]
        mixed = ops.table.paged_attention(q, keys, values, step.layout, self._params, weights.sinks)
        mixed = mixed.reshape(-1, ops.own.num_heads * spec.head_size)
        if gates:
            mixed = ops.gated(mixed, gates[0])
        mixed = ops.gather_heads(mixed, spec.num_heads)
        x = ops.linear(mixed, weights.o_proj, Projection.O_PROJ, step.lora)
        return ops.gather(x, spec.hidden_size)

    def _qkv(self, x: Tensor, lora: LoRAMapping | None) -> tuple[Tensor, ...]:
        """Queries [T, H, D], k and v [T, K, D], normed where the architecture does, and gates."""
        own, weights = self._ops.own, self._weights
        queries, keys = own.num_heads * own.head_size, own.num_kv_heads * own.head_size
        qkv = self._ops.linear(x, weights.qkv, Projection.QKV, lora)
        gates: tuple[Tensor, ...] = ()
        q = qkv[:, :queries]
        if own.attention_gate:
            gates, qkv = (qkv[:, queries : 2 * queries],), qkv[:, queries:]
        k = qkv[:, queries : queries + keys]
        v = k if self._values_are_keys else qkv[:, queries + keys :]
        if own.qk_norm is QKNorm.FULL:
            q, k = self._norm_complete_qk(q, k)
        q = q.view(-1, own.num_heads, own.head_size)
        k, v = (part.view(-1, own.num_kv_heads, own.head_size) for part in (k, v))
        if own.qk_norm is not QKNorm.FULL and weights.q_norm is not None:
            q, k = self._norm_qk(q, k)
        if weights.v_norm is not None:
            v = self._ops.norm(v, weights.v_norm)
        return q, k, v, *gates

    def _queries(self, x: Tensor, step: LayerStep) -> Tensor:
        """Queries [T, H, D] of a layer without keys, normed and turned."""
        own, weights = self._ops.own, self._weights
        q = self._ops.linear(x, weights.qkv, Projection.QKV, step.lora)
        q = q.view(-1, own.num_heads, own.head_size)
        if own.qk_norm is QKNorm.HEAD:
            assert weights.q_norm is not None
            q = self._ops.norm(q, weights.q_norm)
        if self._query_rope is None:
            return q
        rotation = step.rotations[self._query_rope]
        return self._ops.table.rotary(q, *rotation, self._interleaved)

    def _norm_complete_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Norms over the heads of all ranks, of which the rank's own are returned."""
        ops, spec = self._ops, self._ops.spec
        q = ops.gather_heads(q, spec.num_heads)
        k = ops.gather_heads(k, spec.num_kv_heads)
        q, k = self._norm_qk(q, k)
        if ops.table.ranks is None:
            return q, k
        queries, keys = ops.head_columns(spec.num_heads), ops.head_columns(spec.num_kv_heads)
        return q[:, queries.start : queries.stop], k[:, keys.start : keys.stop]

    def _norm_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        weights = self._weights
        assert weights.q_norm is not None and weights.k_norm is not None
        return self._ops.norm(q, weights.q_norm), self._ops.norm(k, weights.k_norm)
