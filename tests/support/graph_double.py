"""A `GraphBackend` for a CPU: a replay runs the recorded code again, on the same tensors.

Numbers of Python that a graph would have frozen are frozen here as well: the code sees only the
tensors that it was recorded with. Reading one of them on the host is an error, and so is whatever
else waits for a device: a result whose shape depends on values, and a tensor made on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_READS = {
    _ATEN._local_scalar_dense,
    _ATEN._unique2,
    _ATEN.masked_select,
    _ATEN.nonzero,
    _ATEN.repeat_interleave,
    _ATEN.unique_consecutive,
    _ATEN.unique_dim,
}
# on a CPU these copy nothing that a dispatcher sees
_READS_OF_PYTHON = {
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.as_tensor,
    torch.from_numpy,
    torch.tensor,
}


class HostRead(RuntimeError):
    """Recorded code read a tensor's element: a graph would not read it again."""


class _NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = args[1] if func.overloadpacket is _ATEN.index else ()
        is_masked = any(mask is not None and mask.dtype == torch.bool for mask in masks)
        if is_masked or func.overloadpacket in _READS:
            raise HostRead(f"{func} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


class _NoHostReadsOfPython(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_OF_PYTHON:
            raise HostRead(f"{func} copies between host and device")
        return func(*args, **(kwargs or {}))


class Reexecution:
    """`captured` counts the graphs, `replays` what ran of them; `free` is what the device has."""

    def __init__(self) -> None:
        self.captured = 0
        self.replays = 0
        self.free = 1 << 40

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        def replay() -> None:
            with _NoHostReads(), _NoHostReadsOfPython():
                run()

        def count_and_replay() -> None:
            self.replays += 1
            replay()

        replay()
        self.captured += 1
        return count_and_replay

    def free_bytes(self) -> int:
        return self.free
