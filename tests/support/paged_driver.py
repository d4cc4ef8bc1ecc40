"""Drives `Model.forward` as the runtime does, with the least code: sequences, blocks, ragged steps.

Sequences get their blocks in a shuffled order, so that a test fails when positions and slots are
mixed up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from quickstep.model.interface import ForwardBatch, Model
from quickstep.model.sizing import StateMemory
from quickstep.ops.table import LoRAAdapter, LoRAMapping, PagedLayout, StateRows
from quickstep.ops.tensors import CPU
from quickstep.runtime.cache.kv_cache import allocate_kv


@dataclass
class Row:
    """A sequence: its tokens so far, how many are computed, its blocks."""

    token_ids: list[int]
    blocks: list[int]
    computed: int = 0
    state: int | None = None  # its slot, once it has computed something
    adapter: LoRAAdapter | None = None
    logits: list[Tensor] = field(default_factory=list)


class PagedDriver:
    def __init__(
        self,
        model: Model,
        num_blocks: int = 96,
        block_size: int = 4,
        kv_dtype: str = "auto",
        adapters: Mapping[int, LoRAAdapter | None] | None = None,
    ) -> None:
        self._adapters = adapters or {}  # by the id() of a prompt
        layout = model.kv_layout.stored_as(kv_dtype)
        self.kv = allocate_kv(layout, num_blocks, block_size, CPU, StateMemory(32))
        self._free_states = list(range(31, -1, -1))
        self.model = model
        self.block_size = block_size
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))
        self._free = order.tolist()

    def open(self, token_ids: Sequence[int]) -> Row:
        return Row(list(token_ids), [], adapter=self._adapters.get(id(token_ids)))

    def step(self, work: Sequence[tuple[Row, int]]) -> list[Tensor]:
        """Compute `count` more tokens of each row; gives each row's logits [count, V]."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        offsets = [0]
        for row, count in work:
            end = row.computed + count
            while len(row.blocks) * self.block_size < end:
                row.blocks.append(self._free.pop())
            for position in range(row.computed, end):
                block = row.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
                positions.append(position)
            tokens += row.token_ids[row.computed : end]
            row.computed = end
            offsets.append(len(tokens))
        width = max(len(row.blocks) for row, _ in work)
        tables = [row.blocks + [0] * (width - len(row.blocks)) for row, _ in work]
        layout = PagedLayout(
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            row_offsets=tuple(offsets),
            context_lens=tuple(row.computed for row, _ in work),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            block_size=self.block_size,
        )
        state_rows = self._state_rows(work, offsets) if self.kv.states else None
        lora = _mapping(work, offsets)
        batch = ForwardBatch(torch.tensor(tokens), layout, lora=lora, state_rows=state_rows)
        hidden = self.model.forward(batch, self.kv)
        logits = self.model.logits(hidden, lora)
        parts = [logits[a:b] for a, b in pairwise(offsets)]
        for (row, _), part in zip(work, parts, strict=True):
            row.logits.append(part)
        return parts

    def _state_rows(self, work: Sequence[tuple[Row, int]], offsets: Sequence[int]) -> StateRows:
        sources = []
        for row, count in work:
            sources.append(-1 if row.computed == count else row.state)
            if row.state is None:
                row.state = self._free_states.pop()
        none = (0,) * len(work)
        targets = tuple(row.state for row, _ in work)
        return StateRows(tuple(offsets), tuple(sources), targets, none, none)

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int, chunk: int) -> list[Row]:
        """Greedy, all prompts together: a new one starts each step and is computed in chunks,
        so that decode rows and prefill chunks of several lengths share steps."""
        rows: list[Row] = []
        waiting = [self.open(prompt) for prompt in prompts]
        wanted = {id(row): len(row.token_ids) + num_new for row in waiting}
        while waiting or any(len(row.token_ids) < wanted[id(row)] for row in rows):
            if waiting:
                rows.append(waiting.pop(0))
            running = [row for row in rows if len(row.token_ids) < wanted[id(row)]]
            work = [(row, min(chunk, len(row.token_ids) - row.computed)) for row in running]
            for row, part in zip(running, self.step(work), strict=True):
                if row.computed == len(row.token_ids):
                    row.token_ids.append(int(part[-1].argmax()))
        return rows


def _mapping(work: Sequence[tuple[Row, int]], offsets: Sequence[int]) -> LoRAMapping | None:
    groups = []
    for adapter in {id(row.adapter): row.adapter for row, _ in work if row.adapter}.values():
        own = [i for i, (row, _) in enumerate(work) if row.adapter is adapter]
        tokens = [token for i in own for token in range(offsets[i], offsets[i + 1])]
        groups.append((adapter, torch.tensor(tokens)))
    return LoRAMapping(tuple(groups)) if groups else None
