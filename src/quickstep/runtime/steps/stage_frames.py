"""What goes from stage to stage of a pipeline: a step, and what the last one has computed of it.

The last stage decides what to compute and sends it to the first; each stage passes it on with its
own results, so that in the end it comes back to where it began. On a stream socket, in the byte
order of the machine, as all stages are processes of one machine and installation:

    int64 [12], the sizes | int64: rows, token ids, emitting tokens, parents, adapters, moves
    | int32: block ids | float64: seconds of each stage | why it failed | carried [2, T, hidden]
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.ops.native.library import StepCall
from quickstep.ops.tensors import Array
from quickstep.runtime.steps.divided import FIELDS_PER_ROW, Ints

_BLOCKS, _NUM_BLOCKS, _PARENTS, _NUM_PARENTS = 2, 3, 4, 5  # the place of each among them
_NUM_SIZES = 12


class StepArrays(msgspec.Struct, frozen=True):
    """A step's numbers, all int64, whose rows still have no addresses of others.

    Attributes:
        rows: `FIELDS_PER_ROW` of each.
        emitting: Two numbers of each token with logits.
        adapters: A number for each row, 0 for none; empty if no row has one.
        moves: Pairs of KV slots, source and target, to be copied before the step.
        block_ids: int32, of all rows one after another.
    """

    rows: Ints
    token_ids: Ints
    emitting: Ints
    parents: Ints
    adapters: Ints
    moves: Ints
    block_ids: npt.NDArray[np.int32]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each."""
        ints = self.rows, self.token_ids, self.emitting, self.parents, self.adapters, self.moves
        return *map(len, ints), len(self.block_ids)


class StageFrame(msgspec.Struct):
    """A step on its way, with the `seconds` of each stage that has computed its part.

    Attributes:
        failure: Why a stage could not compute it; those after it pass it on.
        carried: The bytes that the last stage it passed has left.
    """

    step_id: int
    every_token: bool
    arrays: StepArrays
    seconds: list[float]
    failure: str = ""
    carried: Sequence[Array] = ()

    @property
    def num_tokens(self) -> int:
        """Of the step."""
        return len(self.arrays.token_ids)

    def call(self) -> StepCall:
        """The step as the library gets it, without adapters; valid while the frame exists."""
        arrays, call = self.arrays, StepCall()
        rows = arrays.rows.reshape(-1, FIELDS_PER_ROW)
        for place, count, of_all in (
            (_BLOCKS, _NUM_BLOCKS, arrays.block_ids),
            (_PARENTS, _NUM_PARENTS, arrays.parents),
        ):
            ends = np.cumsum(rows[:, count])
            rows[:, place] = of_all.ctypes.data + (ends - rows[:, count]) * of_all.itemsize
        call.num_rows = len(rows)
        call.num_emitting = len(arrays.emitting) // 2
        call.rows = arrays.rows.ctypes.data
        call.token_ids = arrays.token_ids.ctypes.data
        call.emitting = arrays.emitting.ctypes.data if len(arrays.emitting) else None
        return call

    def send(self, to: socket.socket) -> None:
        """Send it to the next stage. Raises OSError."""
        arrays, failure = self.arrays, self.failure.encode()
        carried_bytes = sum(part.nbytes for part in self.carried)
        seconds = np.array(self.seconds, dtype=np.float64)
        head = np.array(
            (
                self.step_id,
                self.every_token,
                *arrays.sizes,
                len(seconds),
                len(failure),
                carried_bytes,
            ),
            dtype=np.int64,
        )
        assert len(head) == _NUM_SIZES
        ints = arrays.rows, arrays.token_ids, arrays.emitting, arrays.parents
        parts = (*ints, arrays.adapters, arrays.moves, arrays.block_ids, seconds)
        first = b"".join([head.tobytes(), *(part.tobytes() for part in parts), failure])
        to.sendall(first)
        for part in self.carried:
            to.sendall(memoryview(part.data).cast("B"))

    @staticmethod
    def receive(connection: socket.socket) -> StageFrame | None:
        """Wait for a step; None once the other end has closed. Raises OSError."""
        head = _read(connection, _NUM_SIZES * 8)
        if head is None:
            return None
        step_id, every_token, *sizes = head.view(np.int64).tolist()
        *num_ints, num_blocks, num_seconds, failure_bytes, carried_bytes = sizes
        first_bytes = 8 * sum(num_ints) + 4 * num_blocks + 8 * num_seconds + failure_bytes
        first = _read(connection, first_bytes)
        carried = _read(connection, carried_bytes)
        if first is None or carried is None:
            return None
        end = 8 * sum(num_ints)
        ints = np.split(first[:end].view(np.int64), np.cumsum(num_ints)[:-1])
        blocks = first[end : (end := end + 4 * num_blocks)].view(np.int32)
        seconds = np.frombuffer(first[end : (end := end + 8 * num_seconds)].tobytes(), np.float64)
        failure = first[end:].tobytes().decode()
        rows, token_ids, emitting, parents, adapters, moves = ints
        arrays = StepArrays(rows, token_ids, emitting, parents, adapters, moves, blocks)
        passed = () if not carried_bytes else (carried,)
        return StageFrame(step_id, bool(every_token), arrays, seconds.tolist(), failure, passed)


def _read(connection: socket.socket, num_bytes: int) -> npt.NDArray[np.uint8] | None:
    """So many bytes, aligned to 8; None once the other end has closed."""
    found = np.empty(num_bytes, dtype=np.uint8)
    view = memoryview(found.data)
    while view:
        received = connection.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return found
