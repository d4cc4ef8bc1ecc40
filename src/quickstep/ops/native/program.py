"""A recording bound to memory: one native call runs the whole forward pass of a step.

Made by `ops.native.steps`. The library keeps the calls; this object keeps the library, the memory
and the weights that they point to.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

from quickstep.ops.dtypes import UINT8, DType
from quickstep.ops.host_tensor import HostTensor
from quickstep.ops.native.library import raise_for_status
from quickstep.ops.native.step_abi import OpCall, ProgramInputs
from quickstep.ops.recording import Operand, OpRecord, Recording, place_buffers

__all__ = ["Program", "program_bytes"]


def program_bytes(recording: Recording, capacities: tuple[int, int]) -> int:
    """Bytes of memory that a program of these capacities (tokens, emitting rows) needs."""
    return place_buffers(recording.buffers, capacities)[1]


class Program:
    """Steps of up to `capacities` tokens and emitting rows, in `memory` shared with other programs.

    `owner` keeps the context alive. Results stay in the memory until another program runs in it.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        context: int,
        owner: object,
        recording: Recording,
        capacities: tuple[int, int],
        memory: HostTensor,
        block_size: int,
    ) -> None:
        offsets, num_bytes = place_buffers(recording.buffers, capacities)
        assert memory.nbytes >= num_bytes and memory.dtype == UINT8
        self._kept = (owner, recording, memory)
        self._run = library.qs_program_run
        self._memory = memory
        self._recording = recording
        self._offsets = offsets
        self.capacities = capacities
        base = memory.data_ptr()
        addresses = [base + offset for offset in offsets]
        calls = (OpCall * len(recording.ops))()
        for call, record in zip(calls, recording.ops, strict=True):
            _fill(call, record, addresses)
        inputs = ProgramInputs(
            addresses[recording.token_ids],
            addresses[recording.positions],
            addresses[recording.emitting],
            *capacities,
            block_size,
        )
        handle = ctypes.c_void_p()
        status = library.qs_program_create(
            context, calls, len(calls), ctypes.byref(inputs), ctypes.byref(handle)
        )
        raise_for_status(status, f"binding a step of {capacities[0]} tokens")
        assert handle.value is not None
        self._handle = handle.value
        finalizer = weakref.finalize(self, library.qs_program_destroy, self._handle)
        finalizer.atexit = False

    def run(self, step_address: int) -> None:
        """Run the step that a `StepCall` at this address describes. Raises EngineError."""
        status = self._run(self._handle, step_address)
        if status:
            raise_for_status(status, "a captured step")

    def rows(self, buffer: int, dtype: DType) -> HostTensor:
        """All rows of a buffer, [capacity, C]: `Recording.hidden` or `Recording.logits`."""
        one = self._recording.buffers[buffer]
        count = self.capacities[one.rows]
        start = self._offsets[buffer]
        flat = self._memory.numpy()[start : start + count * one.row_bytes]
        return HostTensor(flat.view(dtype.storage).reshape(count, -1), dtype)


def _fill(call: OpCall, record: OpRecord, addresses: Sequence[int]) -> None:
    call.kind = record.kind
    call.dtype = max(record.dtype, 0)
    call.rows = record.rows
    call.option = record.numbers.option
    for index, size in enumerate(record.numbers.size):
        call.size[index] = size
    for index, stride in enumerate(record.numbers.stride):
        call.stride[index] = stride
    for index, scalar in enumerate(record.numbers.scalar):
        call.scalar[index] = scalar
    for index, place in enumerate(record.inputs):
        call.inputs[index] = _address(place, addresses)
    for index, place in enumerate(record.outputs):
        call.outputs[index] = _address(place, addresses)


def _address(place: Operand | int, addresses: Sequence[int]) -> int:
    return place if isinstance(place, int) else addresses[place.buffer] + place.offset
