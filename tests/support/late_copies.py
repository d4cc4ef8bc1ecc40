"""A device that does everything as late as its order allows: steps and copies that are queued run
when a thread waits for them, and now and then a step runs earlier.

So a copy that does not come after a step sees the memory before it, and a thread that does not wait
for a copy sees what was there: `POISON` in host memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from quickstep.ops.table import KVCache
from quickstep.runtime.cache import opening
from quickstep.runtime.cache.device_block_bytes import DeviceBlockBytes

POISON = 0xA5


class LateDevice:
    """Steps, and a `CopyStream` next to them. Threads may share it."""

    def __init__(self, rng: Random | None = None) -> None:
        self._rng = rng or Random(0)
        self._steps: deque[Callable[[], object]] = deque()
        self._num_run = 0
        self._copies: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()
        self.num_copies = 0

    def launch(self, *parts: Callable[[], object]) -> None:
        """Queue a step, whose parts run one by one; nothing is waited for."""
        with self._lock:
            self._steps.extend(parts)

    def synchronize(self) -> None:
        """Run all steps, and no copy: a step waits for none."""
        with self._lock:
            self._run_until(self._num_run + len(self._steps))

    def host_memory(self, num_bytes: int) -> Tensor:
        """`CopyStream.host_memory`."""
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def follow_steps(self) -> None:
        """`CopyStream.follow_steps`."""
        with self._lock:
            end = self._num_run + len(self._steps)
            self._copies.append(lambda: self._run_until(end))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """`CopyStream.copy`."""
        assert target.dtype == source.dtype == torch.uint8 and target.shape == source.shape
        with self._lock:
            self.num_copies += 1
            self._copies.append(lambda: target.copy_(source))

    def wait(self) -> None:
        """`CopyStream.wait`."""
        with self._lock:
            while self._copies:
                if self._steps and self._rng.random() < 0.3:
                    self._run_until(self._num_run + 1)
                self._copies.popleft()()

    def _run_until(self, end: int) -> None:
        while self._num_run < end:
            self._num_run += 1
            self._steps.popleft()()


def use_late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines move their blocks as on a device, with the memory of the host."""

    def opened(kv: KVCache) -> DeviceBlockBytes:
        return DeviceBlockBytes(kv, LateDevice())

    monkeypatch.setattr(opening, "open_block_bytes", opened)
