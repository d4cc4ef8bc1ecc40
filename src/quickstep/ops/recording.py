"""A captured step as data: the calls of a forward pass with symbolic operands, and their memory.

Made by `ops.native.recorder`, bound to addresses by `ops.native.program`. Every buffer has a row
per token, or per emitting row, of a step; how many rows a step has is decided when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["Buffer", "Numbers", "OpRecord", "Operand", "Recording", "place_buffers"]

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
    """What a call needs beside its operands."""

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
    """A whole forward pass. `weights` keeps alive what the addresses point to.

    Attributes:
        token_ids, positions, emitting: Buffers of int64 that each run fills.
        hidden: Final hidden states, a row per token or per emitting row; they stand until the next
            run.
        logits: float32, a row per emitting row; they stand until the next run.
    """

    ops: tuple[OpRecord, ...]
    buffers: tuple[Buffer, ...]
    token_ids: int
    positions: int
    emitting: int
    hidden: int
    logits: int
    weights: tuple[object, ...]


def place_buffers(buffers: Sequence[Buffer], capacities: tuple[int, int]) -> tuple[list[int], int]:
    """Byte offsets of the buffers, which share memory unless alive together, and the whole size.

    `capacities` are the rows of each `RowsOf`.
    """
    offsets: list[int] = []
    alive: list[tuple[int, int, int]] = []  # (offset, end, last op)
    total = 0
    for buffer in buffers:
        size = -(-buffer.row_bytes * capacities[buffer.rows] // _ALIGNMENT) * _ALIGNMENT
        alive = sorted(one for one in alive if one[2] >= buffer.first)
        offset = 0
        for start, end, _ in alive:
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets.append(offset)
        alive.append((offset, offset + size, buffer.last))
        total = max(total, offset + size)
    return offsets, total
