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
from quickstep.model.gguf_file import BLOCKS
from quickstep.model.safetensors_files import TensorFiles
from quickstep.ops.table import QuantizedWeight, StoredMatrix, StoredRows

__all__ = ["STORED_DTYPES", "Progress", "TensorReader", "TensorSource"]

Progress = Callable[[int, int], None]

STORED_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
_CODE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
)


class TensorSource(Protocol):
    """Where the packing takes tensors from: a checkpoint's files, or `random_weights`."""

    def tensor(self, name: str) -> Tensor:
        """One tensor."""

    def stacked(self, names: tuple[str, ...]) -> Tensor:
        """Several tensors, one below the other along the first dimension."""

    def linear(self, names: tuple[str, ...]) -> Tensor | QuantizedWeight:
        """A matrix of `stacked` tensors as it is to be packed: whole, or in integer codes."""

    def stored(self, names: tuple[str, ...]) -> StoredMatrix | None:
        """The same as it stands in files; None unless `OpTable.load_linear` may take it there."""


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

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self._dtype

    def linear(self, names: tuple[str, ...]) -> Tensor | QuantizedWeight:
        """The stored matrix, whole."""
        return self.stacked(names)

    def stored(self, names: tuple[str, ...]) -> StoredMatrix | None:
        """The matrix in its files, where they hold it in the model's dtype."""
        if self._device.type != "cpu":
            return None
        if any(STORED_DTYPES.get(self._files.tensors[name].dtype) != self._dtype for name in names):
            return None
        return self.placed(names)

    def placed(self, names: tuple[str, ...]) -> StoredMatrix:
        """Where tensors of one dtype stand, one below the other; they count as read."""
        tensors = [self._files.tensors[name] for name in names]
        self._count(sum(tensor.nbytes for tensor in tensors))
        parts = tuple(StoredRows(one.file, one.offset, one.shape[0]) for one in tensors)
        return StoredMatrix(tensors[0].dtype, parts, tensors[0].shape[1])

    @property
    def device(self) -> torch.device:
        """Where tensors go."""
        return self._device

    def raw(self, name: str) -> Tensor:
        """One tensor in the dtype it is stored in; [blocks, bytes] where it is in ggml's blocks."""
        stored = self._files.tensors[name]
        shape: tuple[int, ...] = stored.shape
        block = BLOCKS.get(stored.dtype)
        if block is not None and stored.dtype not in STORED_DTYPES:
            shape, dtype = (stored.nbytes // block[1], block[1]), torch.uint8
        elif stored.dtype in _CODE_DTYPES:
            dtype = _CODE_DTYPES[stored.dtype]
        else:
            dtype = self._stored_dtype(name)
        tensor = torch.empty(shape, dtype=dtype)
        shared = tensor.flatten().view(torch.uint8).numpy()
        self._files.read_into(name, memoryview(shared))  # type: ignore[arg-type]
        self._count(stored.nbytes)
        return tensor.to(self._device)

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
