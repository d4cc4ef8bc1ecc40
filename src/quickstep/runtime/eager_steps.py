"""A step op by op, through the model's own Python and torch: any model, any device.

Opened by `runtime.capture` for what cannot be captured. The rows of a step become the tensors that
a model reads: one NumPy pass and one tensor per field; loops go over rows, never over tokens. A
decoder whose small tensors are `HostTensor`s gets tensors of torch over the same memory, with the
same packed matrices. Importing this imports torch; captured steps do not need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor

from quickstep.errors import EngineError
from quickstep.model.adapters.lora_modules import among
from quickstep.model.decoder import AttentionWeights, Decoder, DecoderWeights, LayerWeights
from quickstep.model.interface import EmittingTokens, ForwardBatch, Model
from quickstep.model.rope import RopeTable
from quickstep.ops.table import KVCache, LinearWeight, LoRAAdapter, LoRAMapping, PagedLayout
from quickstep.ops.tensors import AnyTensor, Device, HostTensor, to_torch
from quickstep.runtime.capture import EmittingToken, adapters_of
from quickstep.runtime.slots import Slot
from quickstep.types import StepRow

__all__ = ["EagerSteps", "build_batch", "lora_mapping", "with_torch_kv", "with_torch_tensors"]


class EagerSteps:
    """Runs the model's Python; a decoder's `HostTensor`s become tensors of torch.

    `adapters` are those that rows may name, as they are when a step is prepared.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        block_size: int,
        adapters: Mapping[str, LoRAAdapter] | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        self._aux_layers = aux_layers
        self._aux_hidden: tuple[Tensor, ...] = ()
        self._model = with_torch_tensors(model) if isinstance(model, Decoder) else model
        self._kv = with_torch_kv(kv)
        self._block_size = block_size
        self._adapters = {} if adapters is None else adapters
        self._step_adapters: dict[str, LoRAAdapter] = {}
        self._batch: ForwardBatch | None = None

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        model = self._model
        batch = build_batch(rows, slots, self._block_size, model.vocab_size, model.device)
        self._step_adapters = adapters_of(rows, self._adapters)
        self._batch = replace(batch, lora=lora_mapping(rows, self._step_adapters, model.device))

    @torch.inference_mode()
    def run(
        self,
        emitting: Sequence[EmittingToken],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[Tensor, AnyTensor]:
        """`StepModel.run`."""
        assert self._batch is not None, "a step is prepared before it runs"
        model, batch, self._batch = self._model, self._batch, None
        chosen = _emitting_tokens(batch, emitting)
        if not every_token:
            batch = replace(batch, emitting=chosen)
        if features is not None:
            batch = replace(batch, features=to_torch(features).to(model.device.type))
        if self._aux_layers:
            assert isinstance(model, Decoder)
            hidden, self._aux_hidden = model.forward_with_aux(batch, self._kv, self._aux_layers)
        else:
            hidden = model.forward(batch, self._kv)
        if not emitting:
            return hidden, torch.empty((0, model.vocab_size), device=model.device.type)
        return hidden, model.logits(hidden[chosen.tokens] if every_token else hidden, chosen.lora)

    def aux_hidden_states(self) -> tuple[Tensor, ...]:
        """`StepModel.aux_hidden_states`."""
        return self._aux_hidden

    @torch.inference_mode()
    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        """`StepModel.logits`."""
        lora = None
        if adapter:
            tokens = torch.arange(hidden.shape[0], device=self._model.device.type)
            lora = LoRAMapping(((self._step_adapters[adapter], tokens),))
        return self._model.logits(to_torch(hidden), lora)


def build_batch(
    rows: Sequence[StepRow],
    slots: Sequence[Slot],
    block_size: int,
    vocab_size: int,
    device: torch.device | Device,
) -> ForwardBatch:
    """Pack rows one after another; `slots` holds the slot of each row.

    Raises EngineError when a row's tokens, positions or blocks contradict each other.
    """
    token_ids = np.fromiter(
        chain.from_iterable(slot.input_tokens(row) for row, slot in zip(rows, slots, strict=True)),
        dtype=np.int64,
    )
    if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise EngineError(f"a row has token ids outside the model's {vocab_size}")
    tables = _block_tables(rows, slots, block_size)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    row_of_token = np.repeat(np.arange(len(rows)), counts)
    blocks = tables[row_of_token, positions // block_size].astype(np.int64)

    def tensor(values: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values).to(device.type, non_blocking=True)

    layout = PagedLayout(
        positions=tensor(positions),
        slot_mapping=tensor(blocks * block_size + positions % block_size),
        row_offsets=tuple(offsets.tolist()),
        context_lens=tuple(row.end for row in rows),
        block_tables=tensor(tables),
        block_size=block_size,
    )
    return ForwardBatch(token_ids=tensor(token_ids), layout=layout)


def lora_mapping(
    rows: Sequence[StepRow],
    adapters: Mapping[str, LoRAAdapter],
    device: torch.device | Device,
) -> LoRAMapping | None:
    """The tokens of each adapter in a step; None if no row has one."""
    tokens: dict[str, list[range]] = {}
    first = 0
    for row in rows:
        if row.adapter:
            tokens.setdefault(row.adapter, []).append(range(first, first + row.num_tokens))
        first += row.num_tokens
    groups = (
        (adapters[name], torch.tensor(list(chain(*ranges)), device=device.type))
        for name, ranges in tokens.items()
    )
    return LoRAMapping(tuple(groups)) if tokens else None


def _emitting_tokens(batch: ForwardBatch, emitting: Sequence[EmittingToken]) -> EmittingTokens:
    """The place of these tokens of a step."""
    rows = [row for row, _ in emitting]
    layout, lora = batch.layout, batch.lora
    device = layout.positions.device
    tokens = torch.tensor(
        [layout.row_offsets[row + 1] - 1 - num_after for row, num_after in emitting],
        dtype=torch.int64,
        device=device,
    )
    return EmittingTokens(
        tokens,
        PagedLayout(
            positions=layout.positions[tokens],
            slot_mapping=layout.slot_mapping[tokens],
            row_offsets=tuple(range(len(emitting) + 1)),
            context_lens=tuple(layout.context_lens[row] - num_after for row, num_after in emitting),
            block_tables=layout.block_tables[torch.tensor(rows, dtype=torch.int64, device=device)],
            block_size=layout.block_size,
        ),
        None if lora is None else among(lora, tokens),
    )


def _block_tables(
    rows: Sequence[StepRow], slots: Sequence[Slot], block_size: int
) -> npt.NDArray[np.int32]:
    """[R, blocks that the longest row reads]; padding is 0."""
    width = max(-(-row.end // block_size) for row in rows)
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for index, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        num_blocks = -(-row.end // block_size)
        block_ids = slot.block_ids[:num_blocks]
        if block_ids.shape[0] < num_blocks:
            raise EngineError(
                f"a row ends at token {row.end}, its {block_ids.shape[0]} blocks hold "
                f"{block_ids.shape[0] * block_size}"
            )
        tables[index, :num_blocks] = block_ids
    return tables


def with_torch_tensors(model: Decoder) -> Decoder:
    """The same model with tensors of torch; the model itself if it has them already."""
    if not isinstance(model.weights.final_norm, HostTensor):
        return model
    ropes = tuple(RopeTable(to_torch(table.cos), to_torch(table.sin)) for table in model.ropes)
    return model.with_tensors(_weights(model.weights), ropes)


def with_torch_kv(kv: KVCache) -> KVCache:
    """The KV cache as tensors of torch over the same memory."""
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


def _small(weight: AnyTensor | None) -> AnyTensor | None:
    return None if weight is None else to_torch(weight)
