"""What a recording is made on: the calls so far, and which tensor stands in which buffer.

Owned by `ops.native_recorder`. A recorded tensor is an empty one of two rows, and the storage says
whose it is; an operand that a call could not read as it lies raises NotCapturable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quickstep.ops.native_packed import DTYPES
from quickstep.ops.native_step_abi import OpKind
from quickstep.ops.recording import Buffer, Numbers, Operand, OpRecord

__all__ = ["NUM_ROWS", "NotCapturable", "Tape"]

NUM_ROWS = 2  # one would let a wrong distance between rows pass unseen


class NotCapturable(Exception):
    """The forward pass is more than a list of native calls; the message says where."""


class Tape:
    """Calls, buffers, and what must live as long as they do."""

    def __init__(self) -> None:
        self.ops: list[OpRecord] = []
        self.buffers: list[Buffer] = []
        self.kept: list[Tensor | object] = []
        self._of_storage: dict[int, int] = {}

    def new(self, tail: Sequence[int], dtype: torch.dtype, rows: int) -> Tensor:
        """A tensor of a new buffer, which the next op fills."""
        tensor = torch.empty((NUM_ROWS, *tail), dtype=dtype)
        self.kept.append(tensor)
        self._of_storage[tensor.untyped_storage().data_ptr()] = len(self.buffers)
        now = len(self.ops)
        self.buffers.append(Buffer(tensor.nbytes // NUM_ROWS, rows, now, now))
        return tensor

    def is_recorded(self, x: Tensor) -> bool:
        """Whether it stands in a buffer."""
        return x.untyped_storage().data_ptr() in self._of_storage

    def buffer_of(self, x: Tensor) -> int:
        """Which buffer it stands in."""
        if not self.is_recorded(x):
            raise NotCapturable("a tensor was computed outside the recorded calls")
        return self._of_storage[x.untyped_storage().data_ptr()]

    def operand(self, x: Tensor) -> Operand:
        """The place of a tensor with a row per token, whose buffer the next op reads."""
        index = self.buffer_of(x)
        buffer = self.buffers[index]
        offset = int(x.storage_offset()) * x.element_size()
        is_row_view = x.shape[0] == NUM_ROWS and x.stride(0) * x.element_size() == buffer.row_bytes
        if not is_row_view or offset >= buffer.row_bytes:
            raise NotCapturable("a view crosses the tokens of a step")
        buffer.last = len(self.ops)
        return Operand(index, offset)

    def whole(self, x: Tensor) -> Operand:
        """The place of a contiguous tensor."""
        if not x.is_contiguous():
            raise NotCapturable("an op would have to copy its input")
        return self.operand(x)

    def heads(self, x: Tensor) -> Operand:
        """The place of [T, H, D] whose tokens are contiguous."""
        if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
            raise NotCapturable("an op would have to copy its heads")
        return self.operand(x)

    def fixed(self, x: Tensor, dtype: torch.dtype | None = None) -> int:
        """The address of a weight or of a KV tensor."""
        if self.is_recorded(x) or not x.is_contiguous() or x.dtype != (dtype or x.dtype):
            raise NotCapturable("a weight is not a plain tensor of the activations' dtype")
        self.kept.append(x)
        return x.data_ptr()

    def rows_of(self, x: Tensor) -> int:
        """Whether it has a row per token or per emitting row: `RowsOf`."""
        return self.buffers[self.buffer_of(x)].rows

    def record(
        self,
        kind: int,
        x: Tensor,
        inputs: tuple[Operand | int, ...],
        outputs: Sequence[Tensor] | tuple[int, ...],
        numbers: Numbers | None = None,
    ) -> None:
        """Note a call over the rows and in the dtype of `x`; an int output is an address."""
        places = tuple(one if isinstance(one, int) else self.operand(one) for one in outputs)
        dtype = DTYPES.get(x.dtype, -1)
        if dtype < 0 and kind != OpKind.GATHER:
            raise NotCapturable(f"there are no native kernels for {x.dtype}")
        self.ops.append(
            OpRecord(kind, dtype, self.rows_of(x), inputs, places, numbers or Numbers())
        )
