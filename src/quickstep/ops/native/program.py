"""A captured step: its calls as data (`Recording`), and bound to memory (`Program`).

`ops.native.recorder` makes the recording: calls with symbolic operands, and the buffers that they
read and write. Every buffer has a row per token, or per emitting row, of a step; a step's number of
rows is decided when it runs. `ops.native.steps` binds a recording to addresses; one native call
then runs the complete forward pass. The library keeps the calls, and a `Program` keeps the library,
the memory and the weights that they point to.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import msgspec

from quickstep.ops.native.library import OpCall, ProgramInputs, raise_for_status
from quickstep.ops.tensors import UINT8, DType, HostTensor

_ALIGNMENT = 64


class Buffer(msgspec.Struct):
    """Rows of `row_bytes`; alive from op `first` to op `last`, both included."""

    row_bytes: int
    rows: int  # `RowsOf`
    first: int
    last: int


class Operand(msgspec.Struct, frozen=True):
    """A place within the rows of a buffer."""

    buffer: int
    offset: int


class Numbers(msgspec.Struct, frozen=True):
    """The numbers that a call needs in addition to its operands."""

    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    scalar: tuple[float, ...] = ()
    option: int = 0


class OpRecord(msgspec.Struct, frozen=True):
    """One call. An int operand is an address."""

    kind: int
    dtype: int
    rows: int
    inputs: tuple[Operand | int, ...]
    outputs: tuple[Operand | int, ...]
    numbers: Numbers


class Recording(msgspec.Struct, frozen=True):
    """A complete forward pass. `weights` keeps alive what the addresses point to.

    Attributes:
        token_ids, positions, emitting: Buffers of int64 that each run fills.
        hidden: Final hidden states, a row per token or per emitting row; valid until the next run.
        logits: float32, a row per emitting row; valid until the next run. None without any.
        features: Further inputs of each token, which the caller fills in before a run.
        aux_hidden: Further results, a row per token; valid until the next run.
    """

    ops: tuple[OpRecord, ...]
    buffers: tuple[Buffer, ...]
    token_ids: int
    positions: int
    emitting: int
    hidden: int
    logits: int | None
    weights: tuple[object, ...]
    features: tuple[int, ...] = ()
    aux_hidden: tuple[int, ...] = ()


def place_buffers(buffers: Sequence[Buffer], capacities: tuple[int, int]) -> tuple[list[int], int]:
    """Byte offsets of the buffers, which share memory unless alive together, and the total size.

    `capacities` are the rows of each `RowsOf`.
    """
    offsets: list[int] = []
    alive: list[tuple[int, int, int]] = []  # (offset, end, last op)
    total = 0
    for buffer in buffers:
        size = -(-buffer.row_bytes * capacities[buffer.rows] // _ALIGNMENT) * _ALIGNMENT
        alive = sorted(held for held in alive if held[2] >= buffer.first)
        offset = 0
        for start, end, _ in alive:
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets.append(offset)
        alive.append((offset, offset + size, buffer.last))
        total = max(total, offset + size)
    return offsets, total


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
        """All rows of one of the recording's buffers that are inputs or results, [capacity, C]."""
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
