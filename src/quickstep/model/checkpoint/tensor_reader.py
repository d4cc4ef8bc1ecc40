"""Tensors of a checkpoint in the dtype and on the device of the model, one after another.

The loader reads a layer's tensors, packs them and frees them before it reads the next layer's, so
there are never two copies of the complete model. Counts the bytes that were read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.gguf_file import BLOCKS
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.ops.tensors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    INT32,
    INT64,
    UINT8,
    AnyTensor,
    Device,
    DType,
    HostTensor,
    host_dtype,
    to_numpy,
    to_torch,
    torch_device,
    torch_dtype,
)
from quickstep.ops.weights import QuantizedWeight, StoredMatrix, StoredRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quickstep.model.checkpoint.staged_copy import StagedCopy

Progress = Callable[[int, int], None]

STORED_DTYPES: Mapping[str, DType] = MappingProxyType(
    {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
)
_KINDS: Mapping[DType | None, str] = MappingProxyType(
    {dtype: kind for kind, dtype in STORED_DTYPES.items()}
)
_RAW_DTYPES: Mapping[str, DType] = MappingProxyType(
    {"U8": UINT8, "I8": INT8, "I32": INT32, "I64": INT64, "F8_E4M3": UINT8}
)


# Of tensors that are not rounded to the model's dtype: a choice depends on small differences.
_FLOAT32_NAMES = (".e_score_correction_bias",)


class TensorSource(Protocol):
    """Where packing reads tensors: a checkpoint's files, or `random_weights`."""

    def tensor(self, name: str) -> AnyTensor:
        """One tensor, in the architecture's shape and the model's dtype; a few stay in float32."""

    def stacked(self, names: tuple[str, ...]) -> AnyTensor:
        """Several tensors, one below the other along the first dimension: [n, ...] -> [N, ...]."""

    def linear(self, names: tuple[str, ...]) -> AnyTensor | QuantizedWeight:
        """A matrix [N, C] of `stacked` tensors as it is packed: quantized or not."""

    def stored(self, names: tuple[str, ...]) -> StoredMatrix | None:
        """The same matrix, still in files; None unless `OpTable.load_linear` can read it there."""


class TensorReader:
    """Reads by name; `progress(done_bytes, total_bytes)` is called after each tensor.

    Returns tensors of torch, or `HostTensor`s for a `Device`.
    """

    def __init__(
        self,
        files: TensorFiles,
        dtype: DType | torch.dtype,
        device: torch.device | Device,
        total_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._files = files
        self._dtype = dtype
        self._device = device
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress
        self._staged: StagedCopy | None = None

    def tensor(self, name: str) -> AnyTensor:
        """One tensor."""
        return self.stacked((name,))

    def stacked(self, names: tuple[str, ...]) -> AnyTensor:
        """Several tensors, one below the other along the first dimension."""
        dtypes = [self._stored_dtype(name) for name in names]
        if len(set(dtypes)) > 1:
            return self.joined([self.stacked((name,)) for name in names])
        shapes = [self._files.tensors[name].shape for name in names]
        rows = sum(shape[0] for shape in shapes)
        if self._device.type == "cuda":
            return self._on_device(names, (rows, *shapes[0][1:]), dtypes[0])
        stored = HostTensor.empty((rows, *shapes[0][1:]), dtypes[0])
        raw = _bytes_of(stored)
        start = 0
        for name in names:
            stop = start + self._files.tensors[name].nbytes
            self._files.read_into(name, raw[start:stop])
            self._count(stop - start)
            start = stop
        return self._as_model_dtype(stored, names[0].endswith(_FLOAT32_NAMES))

    def _on_device(
        self, names: tuple[str, ...], shape: tuple[int, ...], stored_dtype: DType
    ) -> Tensor:
        """Several tensors of one dtype, copied to a GPU while they are read."""
        import torch

        if self._staged is None:
            from quickstep.model.checkpoint.staged_copy import StagedCopy

            self._staged = StagedCopy(torch_device(self._device))
        num_bytes = math.prod(shape) * stored_dtype.itemsize
        raw = torch.empty(num_bytes, dtype=torch.uint8, device=torch_device(self._device))
        start = 0
        for name in names:
            stop = start + self._files.tensors[name].nbytes
            self._staged.fill_(raw[start:stop], partial(self._files.read_into, name))
            self._count(stop - start)
            start = stop
        return raw.view(torch_dtype(stored_dtype)).view(shape).to(torch_dtype(self._dtype))

    def _as_model_dtype(self, stored: HostTensor, is_float32: bool) -> AnyTensor:
        """As a tensor of the model: in its dtype or in float32, on its device."""
        if isinstance(self._dtype, DType):
            return stored.to(FLOAT32 if is_float32 else self._dtype)
        dtype = torch_dtype(FLOAT32) if is_float32 else self._dtype
        return stored.to_torch().to(torch_device(self._device), dtype)

    def joined(self, parts: Sequence[AnyTensor]) -> AnyTensor:
        """Tensors of the model's dtype, one below the other."""
        if isinstance(self._dtype, DType):
            return HostTensor(np.concatenate([to_numpy(part) for part in parts]), self._dtype)
        import torch

        return torch.cat([to_torch(part) for part in parts])

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return torch_dtype(self._dtype)

    def linear(self, names: tuple[str, ...]) -> AnyTensor | QuantizedWeight:
        """The stored matrix, not quantized."""
        return self.stacked(names)

    def stored(self, names: tuple[str, ...]) -> StoredMatrix | None:
        """The matrix in its files, floating point or ggml's blocks, to be converted to the model's
        dtype as it is loaded; None for other types, and on a GPU.
        """
        kind = _KINDS.get(host_dtype(self._dtype))
        if self._device.type != "cpu" or kind is None:
            return None
        tensors = [self._files.tensors.get(name) for name in names]
        if any(tensor is None or tensor.dtype not in BLOCKS for tensor in tensors):
            return None
        return replace(self.stored_matrix(names), kind=kind)

    def stored_matrix(self, names: tuple[str, ...]) -> StoredMatrix:
        """Tensors [n, C] in their files, one below the other; they count as read."""
        tensors = [self._files.tensors[name] for name in names]
        self._count(sum(tensor.nbytes for tensor in tensors))
        parts = tuple(
            StoredRows(tensor.file, tensor.offset, tensor.shape[0], tensor.dtype)
            for tensor in tensors
        )
        return StoredMatrix(tensors[0].dtype, parts, tensors[0].shape[1])

    @property
    def device(self) -> torch.device | Device:
        """Where tensors go."""
        return self._device

    def raw(self, name: str) -> Tensor:
        """One tensor in the dtype it is stored in, e4m3 as bytes; [blocks, bytes] where it is in
        ggml's blocks.
        """
        stored = self._files.tensors[name]
        shape: tuple[int, ...] = stored.shape
        block = BLOCKS.get(stored.dtype)
        if block is not None and stored.dtype not in STORED_DTYPES:
            shape, dtype = (stored.nbytes // block[1], block[1]), UINT8
        elif stored.dtype in _RAW_DTYPES:
            dtype = _RAW_DTYPES[stored.dtype]
        else:
            dtype = self._stored_dtype(name)
        tensor = HostTensor.empty(shape, dtype)
        self._files.read_into(name, _bytes_of(tensor))
        self._count(stored.nbytes)
        return tensor.to_torch().to(torch_device(self._device))

    def _stored_dtype(self, name: str) -> DType:
        stored = self._files.tensors[name].dtype
        if stored not in STORED_DTYPES:
            known = ", ".join(STORED_DTYPES)
            raise ConfigError(f"tensor {name!r} is stored as {stored}; supported are {known}")
        return STORED_DTYPES[stored]

    def _count(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _bytes_of(x: HostTensor) -> memoryview:
    return x.numpy().reshape(-1).view(np.uint8).data
