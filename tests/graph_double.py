"""A `GraphBackend` for a CPU: a replay runs the recorded code again, on the same tensors.

Numbers of Python that a graph would have frozen are frozen here as well: the code sees only the
tensors that it was recorded with, and reading one of them on the host is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostRead(RuntimeError):
    """Recorded code read a tensor's element: a graph would not read it again."""


class _NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise HostRead("a tensor was read on the host")
        return func(*args, **(kwargs or {}))


class Reexecution:
    """`captured` counts the graphs, `replays` what ran of them."""

    def __init__(self) -> None:
        self.captured = 0
        self.replays = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            with _NoHostReads():
                run()

        def count_and_replay() -> None:
            self.replays += 1
            replay()

        replay()
        self.captured += 1
        return count_and_replay

    def used_bytes(self) -> int:
        return 0
