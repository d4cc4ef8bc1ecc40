"""The inputs of a recorded step: one buffer on the host, one copy, and the tensors that it fills.

Used by `runtime.steps.graphs`. The device's buffer begins with the last sampled token of every
slot, which the device itself writes; the step's own token ids follow, so that one gather reads
either. Two host buffers take turns: the next step may be filled in while the last copy still waits.
Every tensor begins at 16 bytes, whatever the size: Triton compiles another kernel for one that does
not.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.eager import PackedRows
from quickstep.types import StepRow

NUM_HOST_BUFFERS = 2
_NUM_WIDE = 7  # int64 fields of a token


class StepSize(msgspec.Struct, frozen=True):
    """What a recorded step is made for: R rows, T tokens, block tables of W blocks, adapters.

    Of its E tokens with logits, each row has one at most with `has_prompts`; else they are all.
    """

    num_rows: int
    num_tokens: int
    table_width: int
    has_lora: bool = False
    has_prompts: bool = False

    @property
    def num_emitting(self) -> int:
        """E, the tokens with logits."""
        return self.num_rows if self.has_prompts else self.num_tokens

    @property
    def field_width(self) -> int:
        """int64 elements from one field of the tokens to the next."""
        return _aligned(self.num_tokens, 8)

    @property
    def num_wide(self) -> int:
        """int64 elements of its inputs."""
        return _NUM_WIDE * self.field_width

    @property
    def first_table(self) -> int:
        """int32 elements before the block tables."""
        return _aligned(self.num_rows + 1, 4)

    @property
    def num_narrow(self) -> int:
        """int32 elements of its inputs, an even number."""
        return self.first_table + _aligned(self.num_rows * self.table_width, 4)

    @property
    def num_elements(self) -> int:
        """int64 elements of the buffer."""
        return self.num_wide + self.num_narrow // 2

    def holds(self, step: StepNeeds) -> bool:
        """Whether the step fits: padding changes none of its bits."""
        return (
            step.num_rows <= self.num_rows
            and step.num_tokens <= self.num_tokens
            and step.num_blocks <= self.table_width
            and step.has_lora <= self.has_lora
            and not (self.has_prompts and step.has_drafts)
        )


class StepNeeds(msgspec.Struct, frozen=True):
    """The rows of a step: how many, their tokens, the blocks of the longest one."""

    num_rows: int
    num_tokens: int
    num_blocks: int
    has_lora: bool
    has_prompts: bool
    has_drafts: bool


class StepInputs(msgspec.Struct, frozen=True):
    """The tensors of a size, views of the device's buffer.

    Attributes:
        all_ids: [slots + 1 or 2 + T], the last token of every slot, of padding, and the step's ids.
        token_index: [T], which of these a token is.
        positions: [T].
        slot_mapping: [T].
        emitting: [E], the tokens with logits, token 0 for padding; None where they are all.
        row_slots: [E], the slot whose last token is sampled here; that of padding for others.
        adapter_slots: [T], the place of the token's adapter in its table, 0 for none.
        row_offsets: [R + 1] int32.
        block_tables: [R, W] int32.
    """

    size: StepSize
    all_ids: Tensor
    token_index: Tensor
    positions: Tensor
    slot_mapping: Tensor
    emitting: Tensor | None
    row_slots: Tensor
    adapter_slots: Tensor
    row_offsets: Tensor
    block_tables: Tensor


class HostBuffer:
    """Pinned memory on a GPU's host, from which a step's numbers are copied."""

    def __init__(self, num_elements: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.tensor = torch.zeros(num_elements, dtype=torch.int64, pin_memory=is_cuda)
        self.wide: npt.NDArray[np.int64] = self.tensor.numpy()
        self.narrow: npt.NDArray[np.int32] = self.wide.view(np.int32)
        self._copied: torch.cuda.Event | None = None
        if is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the last copy from it is done."""
        if self._copied is not None:
            self._copied.synchronize()

    def record(self) -> None:
        """A copy from it was launched."""
        if self._copied is not None:
            self._copied.record()


class InputBuffer:
    """The buffers, of `num_elements`, those of the largest size; owned by the steps that are
    recorded with it.
    """

    def __init__(self, num_elements: int, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        # of the step's inputs, after the last tokens
        self._first = _aligned(num_slots + 1, 8)
        total = self._first + num_elements
        self._device_buffer = torch.zeros(total, dtype=torch.int64, device=device)
        self._hosts = [HostBuffer(num_elements, device) for _ in range(NUM_HOST_BUFFERS)]
        self._newest = 0

    @property
    def last_tokens(self) -> Tensor:
        """[slots + 1]; the last one is that of padding."""
        return self._device_buffer[: self._num_slots + 1]

    def inputs(self, size: StepSize) -> StepInputs:
        """The tensors of a size."""
        num_tokens = size.num_tokens
        wide = self._device_buffer[self._first : self._first + size.num_wide]
        fields = wide.view(_NUM_WIDE, size.field_width)[:, :num_tokens]
        narrow = self._device_buffer.view(torch.int32)[2 * (self._first + size.num_wide) :]
        tables = narrow[size.first_table :][: size.num_rows * size.table_width]
        _, token_index, positions, slot_mapping, emitting, row_slots, adapter_slots = (
            fields.unbind()
        )
        return StepInputs(
            size,
            self._device_buffer[: self._first + num_tokens],
            token_index,
            positions,
            slot_mapping,
            emitting[: size.num_emitting] if size.has_prompts else None,
            row_slots[: size.num_emitting],
            adapter_slots,
            narrow[: size.num_rows + 1],
            tables.view(size.num_rows, size.table_width),
        )

    def fill_padding(self, inputs: StepInputs, scratch_slot: int) -> None:
        """The inputs of a step without rows."""
        none = PackedRows(*(np.zeros(0, dtype=np.int64),) * 3, np.zeros(1, dtype=np.int64), _NONE)
        self.fill(inputs, none, (), (), scratch_slot, None)

    def fill(
        self,
        inputs: StepInputs,
        packed: PackedRows,
        rows: Sequence[StepRow],
        slots: Sequence[Slot],
        scratch_slot: int,
        adapter_slots: Sequence[int] | None,
    ) -> None:
        """Fill the next host buffer with a step's rows."""
        self._newest = (self._newest + 1) % NUM_HOST_BUFFERS
        host, size = self._hosts[self._newest], inputs.size
        host.wait()
        num_tokens, num_rows = packed.token_ids.shape[0], len(rows)
        fields = host.wide[: size.num_wide].reshape(_NUM_WIDE, size.field_width)
        fields = fields[:, : size.num_tokens]
        token_ids, token_index, positions, slot_mapping, emitting, row_slots, adapters = fields
        token_ids[:num_tokens], token_ids[num_tokens:] = packed.token_ids, 0
        token_index[:] = np.arange(self._first, self._first + size.num_tokens)
        positions[:num_tokens], positions[num_tokens:] = packed.positions, 0
        slot_mapping[:num_tokens], slot_mapping[num_tokens:] = packed.slot_mapping, scratch_slot
        emitting[:] = 0
        row_slots[:] = self._num_slots
        adapters[:] = 0
        offsets = packed.row_offsets
        num_emitting = 0
        for index, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            first = int(offsets[index])
            if is_pending(row, slot):
                token_index[first] = row.slot
            if row.emits and not row.num_drafts:
                last = int(offsets[index + 1]) - 1
                if size.has_prompts:
                    emitting[num_emitting] = last
                    row_slots[num_emitting] = row.slot
                    num_emitting += 1
                else:
                    row_slots[last] = row.slot
            if adapter_slots is not None:
                adapters[first : first + row.num_tokens] = adapter_slots[index]
        narrow = host.narrow[2 * size.num_wide :]
        narrow[: num_rows + 1] = offsets
        narrow[num_rows + 1 : size.num_rows + 1] = num_tokens
        tables = narrow[size.first_table :][: size.num_rows * size.table_width]
        tables = tables.reshape(size.num_rows, size.table_width)
        tables[:num_rows, : packed.block_tables.shape[1]] = packed.block_tables

    def send(self, inputs: StepInputs) -> None:
        """Copy what was filled last to the device, without waiting."""
        host, count = self._hosts[self._newest], inputs.size.num_elements
        target = self._device_buffer[self._first : self._first + count]
        target.copy_(host.tensor[:count], non_blocking=True)
        host.record()


def _aligned(num_elements: int, num_bytes: int) -> int:
    """As many elements of so many bytes as end at a multiple of 16 bytes, or more."""
    step = 16 // num_bytes
    return -(-num_elements // step) * step


def is_pending(row: StepRow, slot: Slot) -> bool:
    """Whether only the device knows the row's input token."""
    return slot.num_pending > 0 and not row.token_ids and not slot.failure


_NONE = np.zeros((0, 0), dtype=np.int32)
