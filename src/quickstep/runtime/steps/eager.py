"""A step op by op, through the model's own Python and torch: any model, any device.

Opened by `runtime.steps.opening` for what cannot be captured. The rows of a step become the tensors
that a model reads: one NumPy pass and one tensor per field; loops go over rows, never over tokens.
A decoder whose small tensors are `HostTensor`s gets tensors of torch over the same memory, with the
same packed matrices. Importing this imports torch; captured steps do not need it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor

from quickstep.errors import EngineError
from quickstep.model.decoder import Decoder
from quickstep.model.interface import EmittingTokens, ForwardBatch, Model
from quickstep.model.rope import RopeTable
from quickstep.ops.reference.lora import among
from quickstep.ops.table import (
    ExpertWeights,
    KVCache,
    LoRAAdapter,
    LoRAMapping,
    PagedLayout,
    RowLengths,
    StateRows,
)
from quickstep.ops.tensors import (
    AnyTensor,
    Device,
    HostTensor,
    integers_on,
    to_torch,
    torch_device,
)
from quickstep.ops.weights import LinearWeight
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.step_model import EmittingToken, adapters_of
from quickstep.types import StepRow

Ints64 = npt.NDArray[np.int64]


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
        self._row_ends: list[int] = []  # of each row of the step, the end of its tokens

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        self.prepare_with(rows, slots, adapters_of(rows, self._adapters))

    def prepare_with(
        self,
        rows: Sequence[StepRow],
        slots: Sequence[RowBlocks],
        adapters: dict[str, LoRAAdapter],
    ) -> None:
        """`prepare` rows that name these adapters."""
        model = self._model
        batch = build_batch(rows, slots, self._block_size, model.vocab_size, model.device)
        self._row_ends = list(accumulate(row.num_tokens for row in rows))
        self._step_adapters = adapters
        self._batch = replace(batch, lora=lora_mapping(rows, self._step_adapters, model.device))

    def replace_tokens(self, places: Tensor, token_ids: Tensor) -> None:
        """Change the input tokens [n] at these places of the prepared step."""
        assert self._batch is not None, "a step is prepared before it changes"
        changed = self._batch.token_ids.index_copy(0, places, token_ids)
        self._batch = replace(self._batch, token_ids=changed)

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
        chosen = _emitting_tokens(batch, self._row_ends, emitting)
        if not every_token:
            batch = replace(batch, emitting=chosen)
        if features is not None:
            moved = to_torch(features).to(torch_device(model.device))
            parts: tuple[Tensor, ...] = (moved,)
            if isinstance(model, Decoder):  # of the stage before
                parts = tuple(moved.reshape(-1, self._row_ends[-1], model.spec.hidden_size))
            batch = replace(batch, features=parts)
        if isinstance(model, Decoder):
            hidden, self._aux_hidden = model.forward_with_aux(batch, self._kv, self._aux_layers)
            has_logits = model.stage.is_last
        else:
            hidden, has_logits = model.forward(batch, self._kv), True
        if not (emitting and has_logits):
            return hidden, torch.empty((0, model.vocab_size), device=torch_device(model.device))
        return hidden, model.logits(hidden[chosen.tokens] if every_token else hidden, chosen.lora)

    def aux_hidden_states(self) -> tuple[Tensor, ...]:
        """`StepModel.aux_hidden_states`."""
        return self._aux_hidden

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`StepModel.move_kv`."""
        self._model.ops.move_kv(self._kv, pairs)

    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        """`StepModel.logits`."""
        return self.logits_with(hidden, self._step_adapters[adapter] if adapter else None)

    @torch.inference_mode()
    def logits_with(self, hidden: AnyTensor, adapter: LoRAAdapter | None) -> AnyTensor:
        """`logits` of rows with this adapter."""
        lora, device = None, torch_device(self._model.device)
        if adapter is not None:
            tokens = torch.arange(hidden.shape[0], device=device)
            lora = LoRAMapping(((adapter, tokens),))
        return self._model.logits(to_torch(hidden).to(device), lora)


class RowBlocks(Protocol):
    """What a row's inputs are read from: its slot."""

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The block table, [num_blocks], in order."""

    def input_tokens(self, row: StepRow) -> tuple[int, ...]:
        """The input tokens of a row."""


class PackedRows(msgspec.Struct, frozen=True):
    """The rows of a step one after another, on the host.

    Attributes:
        token_ids: [T].
        positions: [T].
        slot_mapping: [T].
        row_offsets: [R + 1].
        block_tables: [R, blocks that the longest row reads]; padding is 0.
    """

    token_ids: Ints64
    positions: Ints64
    slot_mapping: Ints64
    row_offsets: Ints64
    block_tables: npt.NDArray[np.int32]


def pack_rows(
    rows: Sequence[StepRow], slots: Sequence[RowBlocks], block_size: int, vocab_size: int
) -> PackedRows:
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
    return PackedRows(
        token_ids, positions, blocks * block_size + positions % block_size, offsets, tables
    )


def build_batch(
    rows: Sequence[StepRow],
    slots: Sequence[RowBlocks],
    block_size: int,
    vocab_size: int,
    device: torch.device | Device,
) -> ForwardBatch:
    """The packed rows (`pack_rows`) as tensors."""
    packed = pack_rows(rows, slots, block_size, vocab_size)
    where = torch_device(device)
    positions, tables = packed.positions, packed.block_tables
    row_offsets = tuple(packed.row_offsets.tolist())
    context_lens = tuple([row.end for row in rows])
    tails: tuple[tuple[int, ...], ...] = ()
    if any([row.parents for row in rows]):
        attention = _with_trees(rows, tables, block_size)
        row_offsets, context_lens = tuple(attention.offsets), tuple(attention.context_lens)
        tails, tables = tuple(attention.tails), tables[attention.of_rows]
        lens, ends = np.array(context_lens), np.array(row_offsets[1:])
        counts = np.diff(row_offsets)
        positions = np.arange(row_offsets[-1]) + np.repeat(lens - ends, counts)

    def tensor(values: npt.NDArray[np.integer]) -> Tensor:
        host = torch.from_numpy(values)
        if where.type == "cuda":
            host = host.pin_memory()  # a copy from other memory waits for what runs
        return host.to(where, non_blocking=True)

    layout = PagedLayout(
        positions=tensor(positions),
        slot_mapping=tensor(packed.slot_mapping),
        row_offsets=row_offsets,
        context_lens=context_lens,
        block_tables=tensor(tables),
        block_size=block_size,
        tails=tails,
        lengths=RowLengths.of(row_offsets, tails, where),
    )
    return ForwardBatch(
        token_ids=tensor(packed.token_ids), layout=layout, state_rows=_state_rows(rows, layout)
    )


def _state_rows(rows: Sequence[StepRow], layout: PagedLayout) -> StateRows | None:
    """What the rows do with states; None where there are none. Such rows are no trees."""
    states = [row.state for row in rows if row.state is not None]
    if not states:
        return None
    saves = [(index, *save) for index, state in enumerate(states) for save in state.saves]
    return StateRows(
        layout.row_offsets,
        tuple([state.source for state in states]),
        tuple([state.target for state in states]),
        tuple([state.num_replayed for state in states]),
        tuple([row.num_drafts for row in rows]),
        tuple(saves),
    )


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
        (adapters[name], integers_on(torch_device(device), list(chain(*ranges)), torch.int64))
        for name, ranges in tokens.items()
    )
    return LoRAMapping(tuple(groups)) if tokens else None


def _emitting_tokens(
    batch: ForwardBatch, row_ends: Sequence[int], emitting: Sequence[EmittingToken]
) -> EmittingTokens:
    """The place of these tokens of a step, whose rows end at the tokens `row_ends`."""
    layout, lora = batch.layout, batch.lora
    device = layout.positions.device
    offsets = tuple(range(len(emitting) + 1))
    places = [row_ends[row] - 1 - num_after for row, num_after in emitting]
    rows = [bisect_right(layout.row_offsets, place) - 1 for place in places]
    tails = tuple([layout.tails[row] for row in rows]) if layout.tails else ()
    tokens = integers_on(device, places, torch.int64)
    return EmittingTokens(
        tokens,
        PagedLayout(
            positions=layout.positions[tokens],
            slot_mapping=layout.slot_mapping[tokens],
            row_offsets=offsets,
            context_lens=tuple(
                layout.context_lens[row] - (layout.row_offsets[row + 1] - 1 - place)
                for row, place in zip(rows, places, strict=True)
            ),
            block_tables=layout.block_tables[integers_on(device, rows, torch.int64)],
            block_size=layout.block_size,
            tails=tails,
            lengths=RowLengths.of(offsets, tails, device),
        ),
        None if lora is None else among(lora, tokens),
    )


class _AttentionRows(msgspec.Struct):
    """The rows of a `PagedLayout`: those of the step, but of a tree one for each draft.

    `of_rows` are the rows of the step that they are of.
    """

    offsets: list[int]
    context_lens: list[int]
    of_rows: list[int]
    tails: list[tuple[int, ...]]

    def add(self, row: int, num_tokens: int, context_len: int, tail: tuple[int, ...]) -> None:
        """Append one of the next tokens."""
        self.offsets.append(self.offsets[-1] + num_tokens)
        self.context_lens.append(context_len)
        self.of_rows.append(row)
        self.tails.append(tail)


def _with_trees(
    rows: Sequence[StepRow], tables: npt.NDArray[np.int32], block_size: int
) -> _AttentionRows:
    """What the tokens of a step see, some of whose rows are trees."""
    found = _AttentionRows([0], [], [], [])
    for index, row in enumerate(rows):
        root = row.root
        num_before = max(0, root + 1 - row.start)
        if num_before:
            found.add(index, num_before, row.start + num_before, ())
        for slot in range(row.start + num_before, row.end):
            path = [root + node for node in row.path(slot - root)]
            blocks = [int(tables[index, position // block_size]) for position in path]
            tail = [
                block * block_size + one % block_size
                for block, one in zip(blocks, path, strict=True)
            ]
            found.add(index, 1, root + len(path) + 1, tuple(tail))
    return found


def _block_tables(
    rows: Sequence[StepRow], slots: Sequence[RowBlocks], block_size: int
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
    return model.with_tensors(_of_torch(model.weights), ropes)


def with_torch_kv(kv: KVCache) -> KVCache:
    """The KV cache as tensors of torch over the same memory."""
    values = (None if tensor is None else to_torch(tensor) for tensor in kv.values)
    keys, states = (tuple(map(to_torch, part)) for part in (kv.keys, kv.states))
    return KVCache(keys, tuple(values), states)


def _of_torch(value: Any) -> Any:
    """A part of a model's weights with tensors of torch in place of `HostTensor`s; packed matrices
    stay as they are.
    """
    if isinstance(value, HostTensor):
        return to_torch(value)
    if isinstance(value, tuple):
        return tuple(map(_of_torch, value))
    if not isinstance(value, msgspec.Struct) or isinstance(value, (LinearWeight, ExpertWeights)):
        return value
    parts = {name: _of_torch(getattr(value, name)) for name in value.__struct_fields__}
    return replace(value, **parts)
