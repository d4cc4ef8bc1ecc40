"""The ranks of a model on one machine: processes that meet in shared memory (csrc/group.cpp).

`NativeSteps.ranks` joins a group; `NativeRanks` is its `ops.table.Ranks`, and has the messages by
which rank 0 tells the others what to compute. The memory is a `memfd`, which rank 0 makes and the
others inherit by its descriptor: nothing is left over when they end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from quickstep.ops.native.library import GatherCall, MessageCall, StepCall, raise_for_status
from quickstep.ops.tensors import AnyTensor, TensorT

if TYPE_CHECKING:
    from torch import Tensor

_LINE = 64
_CONTROL_BYTES = 4096  # at the beginning; `qs_group_bytes` has the sum


class RankMemory(msgspec.Struct, frozen=True):
    """The memory that ranks share, as each of them opens it.

    Attributes:
        descriptor: Of the file.
        stage_bytes: The widest row that they gather, and more for fewer meetings.
        message_bytes: The largest message.
        size: How many ranks there are.
    """

    descriptor: int
    stage_bytes: int
    message_bytes: int
    size: int

    @staticmethod
    def create(stage_bytes: int, message_bytes: int, size: int) -> RankMemory:
        """New memory for at least these bytes; the caller closes the descriptor. Pages that are
        not written take no memory.
        """
        stage_bytes, message_bytes = (
            -(-num_bytes // _LINE) * _LINE for num_bytes in (stage_bytes, message_bytes)
        )
        descriptor = os.memfd_create("quickstep-ranks")
        os.ftruncate(descriptor, _CONTROL_BYTES + 2 * stage_bytes + message_bytes)
        return RankMemory(descriptor, stage_bytes, message_bytes, size)


class NativeRanks:
    """One rank's end of the group. Used by one thread at a time, but `break_`."""

    def __init__(
        self, library: ctypes.CDLL, context: int, owner: object, memory: RankMemory, rank: int
    ) -> None:
        self.rank = rank
        self.size = memory.size
        self._library = library
        self._context = context
        self._owner = owner
        num_bytes = library.qs_group_bytes(memory.stage_bytes, memory.message_bytes)
        self._memory = mmap.mmap(memory.descriptor, num_bytes)
        start = ctypes.c_char.from_buffer(self._memory)
        handle = ctypes.c_void_p()
        status = library.qs_group_open(
            ctypes.addressof(start),
            memory.stage_bytes,
            memory.message_bytes,
            rank,
            memory.size,
            ctypes.byref(handle),
        )
        raise_for_status(status, f"joining {memory.size} ranks")
        assert handle.value is not None
        self.handle = handle.value
        self._start = start  # keeps the mapping
        finalizer = weakref.finalize(self, library.qs_group_close, self.handle)
        finalizer.atexit = False
        self._message = MessageCall()

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for the others."""
        return int(self._library.qs_group_waited_ns(self.handle)) / 1e9

    def break_(self) -> None:
        """Another rank is lost: every call that waits raises EngineError, in all ranks."""
        self._library.qs_group_break(self.handle)

    # -- `ops.table.Ranks`, for steps that are not captured ----------------------------------------

    def gather(self, x: TensorT, own: range, num_columns: int) -> TensorT:
        """`Ranks.gather`. Raises EngineError."""
        return self._gathered(x, own.start, num_columns)

    def gather_logits(self, x: TensorT, own: range, vocab_size: int) -> TensorT:
        """`Ranks.gather_logits`. Raises EngineError."""
        return self._gathered(x, own.start, vocab_size, for_first=True)

    def local_ids(self, token_ids: Tensor, own: range, vocab_size: int) -> Tensor:
        """`Ranks.local_ids`. Raises EngineError for an id outside of the vocabulary."""
        out = token_ids.new_empty(tuple(token_ids.shape))
        status = self._library.qs_local_ids(
            token_ids.data_ptr(),
            token_ids.numel(),
            own.start,
            len(own),
            vocab_size,
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "embedding")
        return out

    def gather_rows(self, x: Tensor, token_ids: Tensor, own: range) -> Tensor:
        """`Ranks.gather_rows`. Raises EngineError."""
        return self._gathered(x, 0, x.shape[1], (token_ids, own))

    def _gathered(
        self,
        x: TensorT,
        first: int,
        num_columns: int,
        rows: tuple[Tensor, range] | None = None,
        for_first: bool = False,
    ) -> TensorT:
        ids, own = (None, range(0)) if rows is None else rows
        assert x.stride(1) == 1
        item_bytes = x.element_size()
        out = x.new_empty((x.shape[0], num_columns))
        call = GatherCall(
            group=self.handle,
            x=x.data_ptr(),
            stride_bytes=x.stride(0) * item_bytes,
            rows=x.shape[0],
            own_bytes=x.shape[1] * item_bytes,
            first_byte=first * item_bytes,
            row_bytes=num_columns * item_bytes,
            ids=None if ids is None else ids.data_ptr(),
            first_id=own.start,
            num_ids=len(own),
            for_first=for_first,
            out=out.data_ptr(),
        )
        status = self._library.qs_group_gather(self._context, ctypes.byref(call))
        if status:
            raise_for_status(status, "gathering the parts of a step")
        return out

    # -- messages of rank 0 -----------------------------------------------------------------------

    def post(
        self,
        kind: int,
        numbers: Sequence[int] = (),
        step: StepCall | None = None,
        adapters: int | None = None,
        data: AnyTensor | None = None,
    ) -> None:
        """Rank 0: let the others take this once they have finished what was posted before.

        `adapters` is the address of a number for each of the step's rows. Raises EngineError.
        """
        message = self._message
        message.kind = kind
        message.numbers[: len(numbers)] = numbers
        message.step = StepCall() if step is None else step
        message.adapters = adapters
        message.data = None if data is None else data.data_ptr()
        message.num_bytes = 0 if data is None else data.numel() * data.element_size()
        status = self._library.qs_group_post(self.handle, ctypes.byref(message))
        if status:
            raise_for_status(status, "posting a step to the other ranks")

    def take(self) -> MessageCall:
        """Another rank: wait for a message; valid until `finish`. Raises EngineError."""
        status = self._library.qs_group_take(self.handle, ctypes.byref(self._message))
        if status:
            raise_for_status(status, "waiting for a step")
        return self._message

    def finish(self) -> None:
        """The message was carried out."""
        self._library.qs_group_finish(self.handle)
