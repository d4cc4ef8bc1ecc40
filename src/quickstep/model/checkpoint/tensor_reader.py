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
    Array,
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
    {
        **{"U8": UINT8, "I8": INT8, "I32": INT32, "I64": INT64},
        **{"F8_E4M3": UINT8, "F8_E8M0": UINT8},
    }
)


# Of tensors that are not rounded to the model's dtype: a choice depends on small differences, and
# rates of decay are exponentials of what was.
_FLOAT32_NAMES = (".e_score_correction_bias", ".linear_attn.A")


class TensorSource(Protocol):
    """Where packing reads tensors: a checkpoint's files, or `random_weights`."""

    def tensor(self, name: str) -> AnyTensor:
        """One tensor, in the architecture's shape and the model's dtype; a few stay in float32."""

    def stacked(self, names: tuple[str, ...]) -> AnyTensor:
        """Several tensors, one below the other along the first dimension: [n, ...] -> [N, ...]."""

    def linear(self, names: tuple[str, ...]) -> AnyTensor | QuantizedWeight:
        """A matrix [N, C] of `stacked` tensors as it is packed: quantized or not."""

    def stored(self, names: tuple[str, ...], *, floating: bool = False) -> StoredMatrix | None:
        """The same matrix, still in files; None unless `OpTable.load_linear` can read it there.
        `floating`: in the model's dtype, whichever way it is stored.
        """


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
        dtype = torch.float32 if names[0].endswith(_FLOAT32_NAMES) else torch_dtype(self._dtype)
        return raw.view(torch_dtype(stored_dtype)).view(shape).to(dtype)

    def _as_model_dtype(self, stored: HostTensor, is_float32: bool) -> AnyTensor:
        """As a tensor of the model: in its dtype or in float32, on its device."""
        if isinstance(self._dtype, DType):
            return stored.to(FLOAT32 if is_float32 else self._dtype)
        dtype = torch_dtype(FLOAT32) if is_float32 else self._dtype
        return stored.to_torch().to(torch_device(self._device), dtype)

    def joined(self, parts: Sequence[AnyTensor]) -> AnyTensor:
        """Tensors of one dtype, the model's or float32, one below the other."""
        if isinstance(self._dtype, DType):
            dtype = host_dtype(parts[0].dtype)
            assert dtype is not None
            return HostTensor(np.concatenate([to_numpy(part) for part in parts]), dtype)
        import torch

        return torch.cat([to_torch(part) for part in parts])

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return torch_dtype(self._dtype)

    def linear(self, names: tuple[str, ...]) -> AnyTensor | QuantizedWeight:
        """The stored matrix, not quantized."""
        return self.stacked(names)

    @property
    def loaded_kind(self) -> str | None:
        """The kind of matrices in the model's dtype; None where none is loaded from its files."""
        kind = _KINDS.get(host_dtype(self._dtype))
        return kind if self._device.type == "cpu" else None

    def stored(self, names: tuple[str, ...], *, floating: bool = False) -> StoredMatrix | None:
        """The matrix in its files, floating point or ggml's blocks, to be converted to the model's
        dtype as it is loaded; None for other types, and on a GPU.
        """
        del floating  # it always is
        kind = self.loaded_kind
        if kind is None:
            return None
        tensors = [self._files.tensors.get(name) for name in names]
        if any(tensor is None or tensor.dtype not in BLOCKS for tensor in tensors):
            return None
        parts = tuple(self.rows(name, self._files.tensors[name].shape[0]) for name in names)
        return StoredMatrix(kind, parts, self._files.tensors[names[0]].shape[1])

    def rows(
        self,
        name: str,
        num_rows: int,
        kind: str | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> StoredRows:
        """A tensor as rows of a matrix, which count as read; `part` i, n: the i-th of n equal parts
        of it. The caller adds what else `StoredRows` has.
        """
        stored = self._files.tensors[name]
        num_bytes = stored.nbytes // part[1]
        self._count(num_bytes)
        offset = stored.offset + part[0] * num_bytes
        return StoredRows(stored.file, offset, num_rows, kind or stored.dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, as it is stored."""
        return self._files.tensors[name].shape

    def stored_as(self, name: str) -> str:
        """The type of a tensor in its file."""
        return self._files.tensors[name].dtype

    def array(self, name: str, part: tuple[int, int] = (0, 1)) -> Array:
        """A small tensor in NumPy's type for the one it is stored in; e4m3 and e8m0 as bytes,
        bfloat16 as bits. `part` i, n: the i-th of n equal parts of its first dimension. Raises
        ConfigError.
        """
        return self._stored_array(name, part).numpy()

    def floats(self, name: str) -> Array:
        """A small tensor of floating point, in float32. Raises ConfigError."""
        stored = self._stored_array(name)
        if self._files.tensors[name].dtype not in STORED_DTYPES:
            self._stored_dtype(name)
        return stored.float().numpy()

    def _stored_array(self, name: str, part: tuple[int, int] = (0, 1)) -> HostTensor:
        stored = self._files.tensors[name]
        dtype = _RAW_DTYPES.get(stored.dtype) or self._stored_dtype(name)
        shape = stored.shape
        if part[1] > 1:
            shape = (shape[0] // part[1], *shape[1:])
        tensor = HostTensor.empty(shape, dtype)
        self._files.read_into(name, _bytes_of(tensor), part[0] * tensor.nbytes)
        self._count(tensor.nbytes)
        return tensor

    @property
    def device(self) -> torch.device | Device:
        """Where tensors go."""
        return self._device

    def raw(self, name: str) -> Tensor:
        """A tensor in ggml's blocks, as bytes: [blocks, bytes]. `rows` has counted them."""
        stored = self._files.tensors[name]
        block_bytes = BLOCKS[stored.dtype][1]
        tensor = HostTensor.empty((stored.nbytes // block_bytes, block_bytes), UINT8)
        self._files.read_into(name, _bytes_of(tensor))
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
