"""`DeviceBlockBytes`: KV blocks of a device, copied to and from the host next to the steps.

    steps     ── step 7 ── step 8 ──────────── step 9 ── step 10 (reads a block that was written)
                     │ what was launched                  │ planned after it was reported as filled
    copies           └──> copy, copy, copy ──> a thread that waits for their end ──> reported

Copies run on a stream of their own, after everything that was launched for steps before: a block is
never copied with half a step, nor written to before a step that still uses it has ended. The thread
that moves the blocks waits for the copies; steps wait for none. Only a sequence that needs blocks
which are being written waits, in the scheduler's queue, until they are reported.

Not yet run on a GPU: tests run it with a double of the device, which does everything as late as its
stream allows (`tests/support/late_copies.py`). Imported only where the cache is on a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from quickstep.errors import EngineError
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import to_torch
from quickstep.runtime.cache.block_bytes import BlockForm, BlockParts, num_at_once, tensors_of


class CopyStream(Protocol):
    """A queue of copies that a device carries out in order, next to the steps. Any thread may use
    it. Tests have another one than `CudaCopies`.
    """

    def host_memory(self, num_bytes: int) -> Tensor:
        """uint8 [N] on the host which the device can read and write by itself."""

    def follow_steps(self) -> None:
        """Let the copies that follow begin after all that was launched for steps until now."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between host memory and the device; returns at once."""

    def wait(self) -> None:
        """Return when all copies that were queued until now have ended."""


class CudaCopies:
    """The `CopyStream` of a GPU, whose steps run on the device's default stream. Their graphs are
    captured on another one, so that the event is in none of them.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream

    @staticmethod
    def open(kv: KVCache) -> CudaCopies:
        """A new stream of the cache's device."""
        device = to_torch(tensors_of(kv)[0]).device
        return CudaCopies(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def host_memory(self, num_bytes: int) -> Tensor:
        """`CopyStream.host_memory`: pinned, else copies would not be asynchronous."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def follow_steps(self) -> None:
        """`CopyStream.follow_steps`."""
        launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.record(torch.cuda.default_stream(self._device))
        self._stream.wait_event(launched)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """`CopyStream.copy`."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """`CopyStream.wait`: the thread sleeps, and other threads have Python meanwhile."""
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        copied.synchronize()


class _Staging(msgspec.Struct, frozen=True):
    """Host memory for the most blocks N that are moved at once: [N, bytes] of each layer."""

    layers: tuple[Tensor, ...]

    def blocks(self, num_blocks: int) -> list[BlockParts]:
        """The first so many, to be read or written."""
        rows = [layer[:num_blocks].numpy() for layer in self.layers]
        return [[memoryview(row[block].data) for row in rows] for block in range(num_blocks)]


class DeviceBlockBytes(BlockForm):
    """`BlockBytes` of a cache on a device. Each `reading` and `writing` has host memory of its own,
    which later ones use again: a reader that waits for a socket delays no other.
    """

    def __init__(self, kv: KVCache, copies: CopyStream) -> None:
        tensors = list(map(to_torch, tensors_of(kv)))
        self._layers = [tensor.view(tensor.shape[0], -1).view(torch.uint8) for tensor in tensors]
        num_bytes = sum(layer.shape[1] for layer in self._layers)
        super().__init__([(tensor.shape[1:], tensor.dtype) for tensor in tensors], num_bytes)
        self._copies = copies
        self._free: deque[_Staging] = deque()

    @contextmanager
    def reading(self, block_ids: Sequence[int]) -> Iterator[list[BlockParts]]:
        """`BlockBytes.reading`."""
        with self._staging(block_ids) as staging:
            self._copy(block_ids, staging, is_to_device=False)
            yield staging.blocks(len(block_ids))

    @contextmanager
    def writing(self, block_ids: Sequence[int]) -> Iterator[list[BlockParts]]:
        """`BlockBytes.writing`."""
        with self._staging(block_ids) as staging:
            yield staging.blocks(len(block_ids))
            self._copy(block_ids, staging, is_to_device=True)

    @contextmanager
    def _staging(self, block_ids: Sequence[int]) -> Iterator[_Staging]:
        assert len(block_ids) <= num_at_once(self.num_bytes), "more blocks than are moved at once"
        try:
            staging = self._free.pop()
        except IndexError:
            staging = self._new_staging()
        try:
            yield staging
        finally:
            self._free.append(staging)

    def _new_staging(self) -> _Staging:
        num_blocks = num_at_once(self.num_bytes)
        with _as_engine_error():
            memory = self._copies.host_memory(num_blocks * self.num_bytes)
        parts, start = [], 0
        for size in (layer.shape[1] for layer in self._layers):
            end = start + num_blocks * size
            parts.append(memory[start:end].view(num_blocks, size))
            start = end
        return _Staging(tuple(parts))

    def _copy(self, block_ids: Sequence[int], staging: _Staging, is_to_device: bool) -> None:
        """Copy blocks from or to the beginning of `staging`; returns when that is done."""
        with _as_engine_error(), torch.inference_mode():  # where steps run too
            self._copies.follow_steps()
            try:
                for place, first, num in _runs(block_ids):
                    for on_device, on_host in zip(self._layers, staging.layers, strict=True):
                        there = on_device[first : first + num]
                        here = on_host[place : place + num]
                        self._copies.copy(*((there, here) if is_to_device else (here, there)))
            finally:  # neither the memory nor the blocks are used again before
                self._copies.wait()


@contextmanager
def _as_engine_error() -> Iterator[None]:
    """What torch raises, so that what moves blocks gives up one transfer or file."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(f"KV blocks are not copied: {error}") from error


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Blocks that follow each other, which one copy moves: the place of the first one in
    `block_ids`, its id, and how many.
    """
    start = 0
    for end in range(1, len(block_ids) + 1):
        if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
            yield start, block_ids[start], end - start
            start = end
