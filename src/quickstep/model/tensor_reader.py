"""Tensors of a checkpoint in the dtype and on the device of the model, one after another.

The loader asks for a layer's tensors, packs them and drops them before it asks for the next
layer's, so at no time do two copies of the whole model exist. Counts the bytes it has read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from quickstep.errors import ConfigError
from quickstep.model.safetensors_files import TensorFiles
from quickstep.ops.table import QuantizedWeight

__all__ = ["STORED_DTYPES", "Progress", "TensorReader", "TensorSource"]

Progress = Callable[[int, int], None]

STORED_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)


class TensorSource(Protocol):
    """Where the packing takes tensors from: a checkpoint's files, or `random_weights`."""

    def tensor(self, name: str) -> Tensor:
        """One tensor."""

    def stacked(self, names: tuple[str, ...]) -> Tensor:
        """Several tensors, one below the other along the first dimension."""

    def linear(self, names: tuple[str, ...]) -> Tensor | QuantizedWeight:
        """A matrix of `stacked` tensors as it is to be packed: whole, or in integer codes."""


class TensorReader:
    """Reads by name; `progress(done_bytes, total_bytes)` is called after each tensor."""

    def __init__(
        self,
        files: TensorFiles,
        dtype: torch.dtype,
        device: torch.device,
        total_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._files = files
        self._dtype = dtype
        self._device = device
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress

    def tensor(self, name: str) -> Tensor:
        """One tensor."""
        return self.stacked((name,))

    def stacked(self, names: tuple[str, ...]) -> Tensor:
        """Several tensors, one below the other along the first dimension."""
        dtypes = [self._stored_dtype(name) for name in names]
        if len(set(dtypes)) > 1:
            return torch.cat([self.stacked((name,)) for name in names])
        shapes = [self._files.tensors[name].shape for name in names]
        rows = sum(shape[0] for shape in shapes)
        stored = torch.empty((rows, *shapes[0][1:]), dtype=dtypes[0])
        shared = stored.flatten().view(torch.uint8).numpy()
        raw = memoryview(shared)  # type: ignore[arg-type]
        start = 0
        for name in names:
            stop = start + self._files.tensors[name].nbytes
            self._files.read_into(name, raw[start:stop])
            self._count(stop - start)
            start = stop
        return stored.to(self._device, self._dtype)

    def linear(self, names: tuple[str, ...]) -> Tensor | QuantizedWeight:
        """The stored matrix, whole."""
        return self.stacked(names)

    def _stored_dtype(self, name: str) -> torch.dtype:
        code = self._files.tensors[name].dtype
        if code not in STORED_DTYPES:
            known = ", ".join(STORED_DTYPES)
            raise ConfigError(f"tensor {name!r} is stored as {code}; supported are {known}")
        return STORED_DTYPES[code]

    def _count(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
