"""Bytes from files to a GPU through two pinned buffers: while one is copied, the other is read.

Used by `TensorReader`. No tensor is ever complete in host memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_CHUNK_BYTES = 32 << 20  # far above what a copy must have to reach the bus's bandwidth


class _Buffer:
    """Host memory; `copied` is recorded after each copy from it."""

    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.memory = memoryview(self.tensor.numpy())  # type: ignore[arg-type]
        self.copied: torch.cuda.Event | None = None
        if is_pinned:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


class StagedCopy:
    """Owns the buffers. For one thread."""

    def __init__(self, device: torch.device, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._buffers = [_Buffer(chunk_bytes, device.type == "cuda") for _ in range(2)]
        self._num_chunks = 0

    def fill_(self, target: Tensor, read: Callable[[memoryview, int], None]) -> None:
        """Fill target [bytes] uint8 on the device. `read` fills a part of the host's memory with
        the bytes from the given one on. Returns when all are read; the last copies may still run.
        """
        num_bytes = target.shape[0]
        for start in range(0, num_bytes, self._chunk_bytes):
            count = min(self._chunk_bytes, num_bytes - start)
            buffer = self._buffers[self._num_chunks % 2]
            self._num_chunks += 1
            if buffer.copied is not None:
                buffer.copied.synchronize()
            read(buffer.memory[:count], start)
            target[start : start + count].copy_(buffer.tensor[:count], non_blocking=True)
            if buffer.copied is not None:
                buffer.copied.record()
