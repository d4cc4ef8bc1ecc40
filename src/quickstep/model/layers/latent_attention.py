"""Attention over latents: of a token one vector is kept, of which each head's keys and values are
products (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434).

The products are never computed for the tokens of the cache. A head's query is multiplied with the
matrix of its keys instead, and its result with that of its values ("absorbed"), in prompts and
decode alike: with two forms, a token's bits would depend on the chunk that it came in
(docs/design/0075). So attention has one KV head, whose values are the beginning of its keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quickstep.model.adapters.lora_modules import Projection
from quickstep.model.decoder_spec import KVSize
from quickstep.model.decoder_weights import LatentWeights
from quickstep.model.layers.interface import LayerStep
from quickstep.model.layers.layer_ops import LayerOps
from quickstep.ops.table import AttentionParams

if TYPE_CHECKING:
    from torch import Tensor

# As the models were trained, whatever the eps of their other norms.
_NORM_EPS = 1e-6


class LatentAttention:
    """A `Mixer`: queries of a token over the latents of it and of those before it.

    `place` is that of its latents in a `KVCache`, whose values it leaves out.
    """

    def __init__(self, ops: LayerOps, weights: LatentWeights, place: int) -> None:
        spec, layer = ops.spec, ops.spec.layers[ops.index]
        assert spec.latent is not None and layer.rope is not None and ops.table.latent is not None
        self._ops = ops
        self._latent_ops = ops.table.latent
        self._weights = weights
        self._place = place
        self._latent = spec.latent
        self._rope = layer.rope
        self._params = AttentionParams(
            spec.attention_scale, layer.window, spec.attention_softcap, spec.latent.rank
        )

    @property
    def kv_size(self) -> KVSize:
        """The latent, complete on every rank."""
        return self._ops.own.kv_size

    def write(self, x: Tensor, step: LayerStep) -> tuple[Tensor, ...]:
        """Write the latents of x [T, hidden]; its queries over them [T, H, rank + rope_size]."""
        ops, table, latent, weights = self._ops, self._ops.table, self._latent, self._weights
        cos, sin = step.rotations[self._rope]
        qkv = ops.linear(x, weights.qkv_a, Projection.QKV, step.lora)
        width = qkv.shape[1] - latent.kept_size
        q = qkv[:, :width]
        if weights.q_b is not None and weights.q_a_layernorm is not None:
            q = table.rms_norm(q, weights.q_a_layernorm, _NORM_EPS, 0.0)
            q = ops.linear(q, weights.q_b, Projection.Q_B, step.lora)
        q = q.view(-1, ops.own.num_heads, ops.spec.head_size)
        turns = cos, sin, latent.interleaved
        k = self._latent_ops.keys(qkv[:, width:], weights.kv_a_layernorm, _NORM_EPS, *turns)
        table.write_kv(k, None, step.kv.keys[self._place], None, step.layout.slot_mapping)
        return (self._latent_ops.queries(q, weights.k_b, *turns),)

    def read(self, rows: tuple[Tensor, ...], step: LayerStep) -> Tensor:
        """Attention of queries over the latents written, and its output projection."""
        (q,) = rows
        ops, weights, spec = self._ops, self._weights, self._ops.spec
        keys = step.kv.keys[self._place]
        mixed = ops.table.paged_attention(q, keys, None, step.layout, self._params, None)
        mixed = self._latent_ops.values(mixed, weights.v_b)
        mixed = mixed.reshape(-1, ops.own.num_heads * self._latent.value_size)
        mixed = ops.gather_heads(mixed, spec.num_heads, self._latent.value_size)
        x = ops.linear(mixed, weights.o_proj, Projection.O_PROJ, step.lora)
        return ops.gather(x, spec.hidden_size)
