"""A step's rows become the tensors that a model reads: one NumPy pass and one tensor per field.

Called by `runtime.runner` for every step, after admissions and releases. Loops go over rows, never
over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quickstep.errors import EngineError
from quickstep.model.interface import EmittingTokens, ForwardBatch
from quickstep.ops.table import PagedLayout
from quickstep.runtime.slots import Slot
from quickstep.types import StepRow

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quickstep.ops.tensors import Device

__all__ = ["build_batch", "emitting_tokens", "input_tokens"]

# Input of a row that has failed already: it keeps its place in the step, its output is discarded.
_PADDING_TOKEN = 0


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
    import torch

    token_ids = np.fromiter(
        chain.from_iterable(input_tokens(row, slot) for row, slot in zip(rows, slots, strict=True)),
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


def emitting_tokens(layout: PagedLayout, rows: Sequence[int]) -> EmittingTokens:
    """The last tokens of these rows of a step."""
    import torch

    device = layout.positions.device
    tokens = torch.tensor(
        [layout.row_offsets[row + 1] - 1 for row in rows], dtype=torch.int64, device=device
    )
    return EmittingTokens(
        tokens,
        PagedLayout(
            positions=layout.positions[tokens],
            slot_mapping=layout.slot_mapping[tokens],
            row_offsets=tuple(range(len(rows) + 1)),
            context_lens=tuple(layout.context_lens[row] for row in rows),
            block_tables=layout.block_tables[torch.tensor(rows, dtype=torch.int64, device=device)],
            block_size=layout.block_size,
        ),
    )


def input_tokens(row: StepRow, slot: Slot) -> tuple[int, ...]:
    """The row's input tokens; a pending one is what the slot sampled last.

    A row without one sets the slot's `failure`. Raises EngineError when row and tokens disagree.
    """
    if slot.failure:
        return (_PADDING_TOKEN,) * row.num_tokens
    if row.token_ids:
        if len(row.token_ids) != row.num_tokens:
            raise EngineError(f"a row has {len(row.token_ids)} tokens, it says {row.num_tokens}")
        return row.token_ids
    if row.num_tokens != 1:
        raise EngineError(f"a row has no tokens, it says {row.num_tokens}; one can be pending")
    if slot.last_token is not None:
        return (slot.last_token,)
    slot.failure = "its input token was never sampled"
    return (_PADDING_TOKEN,)


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
