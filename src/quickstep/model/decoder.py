"""The decoder: one forward pass over packed weights for every native architecture.

Embedding, the layers in order (`model.layers`), logits. Built by the loader, called by the runtime
through `model.interface.Model`. Computes over rows only through the op table or elementwise, so
that a row's bits never depend on the other rows. Holds no per-request state and never allocates KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quickstep.model.adapters.lora_modules import embedding_number, lm_head_number
from quickstep.model.decoder_spec import ModelSpec, kv_groups
from quickstep.model.decoder_weights import DecoderWeights
from quickstep.model.interface import ForwardBatch, KVLayout
from quickstep.model.layers.interface import LayerStack, LayerStep
from quickstep.model.layers.stack import build_layers
from quickstep.model.rope import RopeTable
from quickstep.model.sharding import Shard
from quickstep.model.stages import NUM_CARRIED, Stage
from quickstep.ops.table import KVCache, LoRAMapping, OpTable, PagedLayout
from quickstep.ops.tensors import AnyTensor, Device, rounded

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_COMPLETE, _ONE_STAGE = Shard(), Stage()

# The last number is that of the first layer.
LayersOf = Callable[[ModelSpec, DecoderWeights, OpTable, Shard, int], LayerStack]


class Decoder:
    """A native model over packed weights, or one stage of it; see `model.interface.Model`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        ropes: tuple[RopeTable, ...],
        ops: OpTable,
        max_model_len: int,
        fingerprint: str,
        shard: Shard = _COMPLETE,
        layers_of: LayersOf = build_layers,
        stage: Stage = _ONE_STAGE,
    ) -> None:
        self._spec = spec
        self._shard = shard
        self._stage = stage
        self._layers_of = layers_of
        self._stack = layers_of(spec, weights, ops, shard, stage.layers(spec).start)
        self._weights = weights
        self._ropes = ropes
        self._ops = ops
        self._max_model_len = max_model_len
        self._fingerprint = fingerprint
        dtype = weights.final_norm.dtype
        # rounded to the weights' dtype, as Gemma was trained
        self._multiplier = rounded(spec.embedding_multiplier, dtype)

    @property
    def spec(self) -> ModelSpec:
        """What the model computes."""
        return self._spec

    @property
    def stage(self) -> Stage:
        """Which of its layers are here."""
        return self._stage

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
        own = self._shard, self._layers_of, self._stage
        others = self._max_model_len, self._fingerprint, *own
        return Decoder(self._spec, weights, ropes, ops, *others)

    @property
    def exact(self) -> bool:
        """Whether a row's bits never depend on its batch: always, for a native model."""
        return True

    @property
    def kv_layout(self) -> KVLayout:
        """What to allocate."""
        groups = kv_groups([layer.kv_size for layer in self._stack.layers])
        dtype, states = self._weights.final_norm.dtype, self._stack.states
        return KVLayout(groups, dtype, states, self._ops.kv_in_pairs)

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
        values are all that later tokens read of them. A stage gets the inputs of the layers before
        its own as features, after the stream; one that is not the last returns the stream before
        them all, and what of it comes first in place of the hidden states.
        """
        emitting, stack, stage = batch.emitting, self._stack, self._stage
        passed: tuple[Tensor, ...] = ()
        rotations = tuple(table.at(self._ops, batch.layout.positions) for table in self._ropes)
        if stage.is_first:
            x = self._embedding(batch)
            stream = stack.begin(x)
        else:
            carried = batch.features[:NUM_CARRIED]
            stream, x = stack.unpack(carried), carried[0]
            num_passed = stage.num_passed(self._spec, aux_layers)
            passed = batch.features[NUM_CARRIED : NUM_CARRIED + num_passed]
        layout = self._planned(batch.layout, x, kv)
        inputs = self._layer_inputs(batch.token_ids, x)
        step = LayerStep(layout, kv, rotations, batch.lora, batch.state_rows, inputs)
        aux = list(passed)
        for index, layer in enumerate(stack.layers, stage.layers(self._spec).start):
            is_last = index == self._spec.num_layers - 1
            stream, x = layer.forward(stream, step, emitting if is_last else None)
            aux += [x for aux_layer in aux_layers if aux_layer == index]
        if not stage.is_last:
            carried = stack.pack(stream)
            return carried[0], (*carried, *aux)
        if emitting is not None and not emitting.tokens.shape[0]:
            return x[emitting.tokens], tuple(aux)
        return stack.end(stream), tuple(aux)

    def logits(self, hidden: AnyTensor, lora: LoRAMapping | None = None) -> AnyTensor:
        """`Model.logits`."""
        spec, head = self._spec, self._weights.lm_head
        assert head is not None, "the last stage of a pipeline has the logits"
        adapters = None if lora is None else (lm_head_number(spec), lora)
        divisor, softcap = spec.logit_divisor, spec.logit_softcap
        logits = self._ops.logits(hidden, head, divisor, softcap, adapters)
        if self._ops.ranks is None:
            return logits
        own = self._shard.outputs(spec.vocab_size)
        return self._ops.ranks.gather_logits(logits, own, spec.vocab_size)

    def _embedding(self, batch: ForwardBatch) -> Tensor:
        """Embeddings [T, hidden] of the batch's tokens, with their adapters."""
        x = self._rows(batch.token_ids)
        if batch.lora is not None:
            self._ops.add_lora_(x, batch.token_ids, embedding_number(self._spec), batch.lora)
        return x if self._multiplier == 1.0 else x * self._multiplier

    def embedded(self, token_ids: Tensor) -> Tensor:
        """What the first layer gets of tokens [T] without adapters, [T, hidden]."""
        x = self._rows(token_ids)
        return x if self._multiplier == 1.0 else x * self._multiplier

    def _rows(self, token_ids: Tensor) -> Tensor:
        weight, dtype = self._weights.embed_tokens, self._weights.final_norm.dtype
        assert weight is not None, "the first stage of a pipeline embeds"
        ranks = self._ops.ranks
        if ranks is None:
            return self._ops.embedding(token_ids, weight, dtype)
        own = self._shard.outputs(self._spec.vocab_size)
        ids = ranks.local_ids(token_ids, own, self._spec.vocab_size)
        return ranks.gather_rows(self._ops.embedding(ids, weight, dtype), token_ids, own)

    def _layer_inputs(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """[T, L * I] of embeddings x [T, hidden] and their tokens; None if layers have none."""
        weights, sizes = self._weights.layer_inputs, self._spec.layer_inputs
        if weights is None or sizes is None:
            return None
        ops, spec, dtype = self._ops, self._spec, self._weights.final_norm.dtype
        if sizes.vocab_size < spec.vocab_size:
            token_ids = _row_ids(ops, token_ids, sizes.vocab_size, spec.vocab_size)
        found = ops.embedding(token_ids, weights.table, dtype) * rounded(sizes.size**0.5, dtype)
        projected = ops.linear(x, weights.projection) * spec.hidden_size**-0.5
        by_layer = projected.view(-1, spec.num_layers, sizes.size)
        normed = ops.rms_norm(by_layer, weights.norm, spec.norm_eps, spec.norm_offset)
        return (normed.view(-1, spec.num_layers * sizes.size) + found) * 2**-0.5

    def _planned(self, layout: PagedLayout, x: Tensor, kv: KVCache) -> PagedLayout:
        """The layout with what attention of all layers reads, computed once."""
        if self._ops.plan_attention is None or not kv.keys:
            return layout
        num_heads = len(self._shard.heads(self._spec.num_heads))
        return self._ops.plan_attention(layout, x.dtype, num_heads, kv.keys[0])


def _row_ids(ops: OpTable, token_ids: Tensor, num_rows: int, vocab_size: int) -> Tensor:
    """`RowIdsOp`."""
    if ops.row_ids is not None:
        return ops.row_ids(token_ids, num_rows, vocab_size)
    return token_ids.masked_fill(token_ids >= num_rows, 0)
