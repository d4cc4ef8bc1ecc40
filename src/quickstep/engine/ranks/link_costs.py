"""What it costs ranks to meet and stages to pass a step on, measured between two processes.

`quickstep doctor` prints it. Ranks meet five times a layer, in shared memory; stages once a step,
over a socket. The other process is `python -m quickstep.engine.ranks.link_costs`; it takes the same
steps and then sends every frame back.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time

import msgspec
import numpy as np

from quickstep.engine.remote.launch import launch
from quickstep.engine.remote.worker import die_with, leave_signals
from quickstep.errors import EngineError
from quickstep.model.stages import NUM_CARRIED
from quickstep.ops.native.backend import load_native
from quickstep.ops.native.ranks import RankMemory
from quickstep.ops.tensors import BFLOAT16, HostTensor
from quickstep.runtime.steps.divided import FIELDS_PER_ROW
from quickstep.runtime.steps.stage_frames import StageFrame, StepArrays

_COMMAND = (sys.executable, "-P", "-m", "quickstep.engine.ranks.link_costs")

HIDDEN_SIZE = 4096  # of a model of about 8 B parameters, in bfloat16
CHUNK_TOKENS = 512

_MESSAGE_BYTES = 4096
# A stage of shared memory has place for one row, so that a gather of many rows meets for each.
_ROW_BYTES = 64, 2 * HIDDEN_SIZE
_NUM_ROWS, _NUM_REPEATS = 64, 100  # results that fit in caches
_NUM_FRAMES, _NUM_CHUNKS = 100, 5


class LinkCosts(msgspec.Struct, frozen=True):
    """Microseconds on this machine, while nothing else runs.

    Attributes:
        meeting_us: Ranks wait for each other and copy a row of 64 bytes.
        gather_us: They gather a row of `HIDDEN_SIZE`.
        frame_us: A stage passes on a step of one token, from send to receive.
        chunk_us: The same of a step of `CHUNK_TOKENS`.
    """

    meeting_us: float
    gather_us: float
    frame_us: float
    chunk_us: float


def measured_link_costs() -> LinkCosts | None:
    """Measure for less than a second; None without native kernels. Raises EngineError when the
    other process cannot be started, or ends.
    """
    if load_native(1) is None:
        return None
    memories = [RankMemory.create(num_bytes, _MESSAGE_BYTES, 2) for num_bytes in _ROW_BYTES]
    descriptors = [memory.descriptor for memory in memories]
    try:
        launched = launch((*_COMMAND, *map(str, descriptors)), shared=descriptors)
        try:
            if not launched.connection.recv(1):
                raise EngineError("the process with which links are measured has ended")
            meeting_s, gather_s = (_gather_s(memory, 0) for memory in memories)
            frame_s = _frame_s(launched.connection, 1, _NUM_FRAMES)
            chunk_s = _frame_s(launched.connection, CHUNK_TOKENS, _NUM_CHUNKS)
        finally:
            launched.end()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    times = meeting_s, gather_s, frame_s, chunk_s
    return LinkCosts(*(round(1e6 * seconds, 2) for seconds in times))


def _gather_s(memory: RankMemory, rank: int) -> float:
    """Seconds that two ranks need to gather a row, of which each has a half; both call it."""
    native = load_native(1)
    assert native is not None and native.steps is not None
    ranks = native.steps.ranks(memory, rank)
    num_columns = memory.stage_bytes // BFLOAT16.itemsize
    half = num_columns // 2
    x = HostTensor(np.zeros((_NUM_ROWS, half), BFLOAT16.storage), BFLOAT16)
    times = []
    for _ in range(_NUM_REPEATS):
        begin_s = time.perf_counter()
        ranks.gather(x, range(rank * half, (rank + 1) * half), num_columns)
        times.append(time.perf_counter() - begin_s)
    return min(times) / _NUM_ROWS


def _frame_s(connection: socket.socket, num_tokens: int, count: int) -> float:
    """Seconds of half the way of a step there and back."""
    none = np.empty(0, np.int64)
    rows = np.zeros(FIELDS_PER_ROW, np.int64)
    token_ids, block_ids = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int32)
    arrays = StepArrays(rows, token_ids, np.zeros(2, np.int64), none, none, none, block_ids)
    carried = np.zeros((NUM_CARRIED * num_tokens, HIDDEN_SIZE), BFLOAT16.storage)
    times = []
    for step_id in range(count):
        frame = StageFrame(step_id, False, arrays, [0.0, 0.0], carried=(carried,))
        begin_s = time.perf_counter()
        frame.send(connection)  # the other process receives all of it before it answers
        if StageFrame.receive(connection) is None:
            raise EngineError("the process with which links are measured has ended")
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times) / 2


def main() -> int:
    """The other process: gather, then send frames back until the first one closes."""
    leave_signals()  # its parent ends it
    *descriptors, socket_fd, parent_pid = map(int, sys.argv[1:])
    die_with(parent_pid)
    with socket.socket(fileno=socket_fd) as connection:
        connection.sendall(b"1")
        for descriptor, row_bytes in zip(descriptors, _ROW_BYTES, strict=True):
            _gather_s(RankMemory(descriptor, row_bytes, _MESSAGE_BYTES, 2), 1)
        while (frame := StageFrame.receive(connection)) is not None:
            frame.send(connection)
    return 0


if __name__ == "__main__":
    sys.exit(main())
