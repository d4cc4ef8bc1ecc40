"""Tensors in this process's memory without torch: what the native path holds instead of them.

`import torch` takes a second and 150 MB, and where matrices stand in packed weights and a step is
one native call, tensors are containers only. A `HostTensor` is an array with an element type, and
the few methods, by torch's names, that code for either calls. It computes nothing but conversions
of floating point.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "CPU",
    "AnyTensor",
    "Device",
    "HostTensor",
    "as_float64",
    "rounded",
    "to_numpy",
    "to_torch",
    "torch_device",
]

Array = npt.NDArray[Any]

AnyTensor: TypeAlias = "Tensor | HostTensor"

_ALIGNMENT = 64  # a cache line, and the widest load of the kernels
_FLOATS = (FLOAT32, BFLOAT16, FLOAT16)


class Device(msgspec.Struct, frozen=True):
    """Where tensors are, as `torch.device` has it."""

    type: str


CPU = Device("cpu")


def torch_device(device: Device) -> torch.device:
    """The same device as torch has it."""
    import torch

    return torch.device(device.type)


class HostTensor:
    """Elements of `dtype` in `array`, which keeps the memory alive."""

    __slots__ = ("_address", "_array", "dtype")

    def __init__(self, array: Array, dtype: DType) -> None:
        assert array.dtype == dtype.storage
        self._array = array
        self._address: int | None = None
        self.dtype = dtype

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: DType) -> HostTensor:
        """Memory of its own, aligned, holding anything."""
        nbytes = math.prod(shape) * dtype.itemsize
        raw = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return cls(raw[start : start + nbytes].view(dtype.storage).reshape(shape), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension."""
        return self._array.shape

    @property
    def device(self) -> Device:
        """The CPU."""
        return CPU

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._array.nbytes

    def dim(self) -> int:
        """How many dimensions it has."""
        return self._array.ndim

    def numel(self) -> int:
        """How many elements it has."""
        return self._array.size

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def stride(self, dim: int) -> int:
        """Elements from one to the next along a dimension."""
        return self._array.strides[dim] // self.dtype.itemsize

    def data_ptr(self) -> int:
        """The address of its first element."""
        if self._address is None:
            self._address = self._array.ctypes.data
        return self._address

    def is_contiguous(self) -> bool:
        """Whether its elements stand one after another."""
        return self._array.flags.c_contiguous

    def contiguous(self) -> HostTensor:
        """Itself, or a contiguous copy."""
        return self if self.is_contiguous() else HostTensor(self._array.copy(), self.dtype)

    def new_empty(self, shape: tuple[int, ...], dtype: DType | None = None) -> HostTensor:
        """Another tensor, of the same type unless said."""
        return HostTensor.empty(shape, dtype or self.dtype)

    def view(self, *shape: int) -> HostTensor:
        """The same contiguous elements in another shape."""
        assert self.is_contiguous()
        return HostTensor(self._array.reshape(shape), self.dtype)

    def __getitem__(self, key: int | slice | tuple[int | slice, ...]) -> HostTensor:
        return HostTensor(self._array[key], self.dtype)

    def numpy(self) -> Array:
        """The array itself; bfloat16 as bits."""
        return self._array

    def float(self) -> HostTensor:
        """In float32."""
        return self.to(FLOAT32)

    def to(self, dtype: DType) -> HostTensor:
        """Floating point in another type, rounded to nearest, ties to even; itself if it has it."""
        if dtype == self.dtype:
            return self
        assert dtype in _FLOATS and self.dtype in _FLOATS
        if self.dtype == BFLOAT16:
            wide = (self._array.astype(np.uint32) << 16).view(np.float32)
        else:
            wide = self._array.astype(np.float32)
        if dtype == BFLOAT16:
            return HostTensor(_bfloat16_bits(wide), dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # beyond float16 is infinity
            return HostTensor(wide.astype(dtype.storage, copy=False), dtype)

    def to_torch(self) -> Tensor:
        """A tensor of torch on the same memory."""
        import torch

        if self.dtype == BFLOAT16:
            return torch.from_numpy(self._array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(self._array)


def _bfloat16_bits(wide: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(wide).view(np.uint32)
    even = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(wide), np.uint32(0x7FC0), even).astype(np.uint16)


def rounded(value: float, dtype: DType | torch.dtype) -> float:
    """A number as floating point of `dtype` holds it."""
    if not isinstance(dtype, DType):
        import torch

        return float(torch.tensor(value, dtype=dtype).item())
    one = HostTensor(np.array([value], dtype=np.float32), FLOAT32)
    return float(one.to(dtype).float().numpy()[0])


def to_numpy(x: AnyTensor) -> Array:
    """The elements of either kind as an array, on the host."""
    if isinstance(x, HostTensor):
        return x.numpy()
    return x.cpu().numpy()


def as_float64(x: AnyTensor) -> npt.NDArray[np.float64]:
    """Floating point of either kind in float64, on the host."""
    if isinstance(x, HostTensor):
        return x.float().numpy().astype(np.float64)
    return cast("npt.NDArray[np.float64]", x.double().cpu().numpy())


def to_torch(x: AnyTensor) -> Tensor:
    """Either kind as a tensor of torch, on the same memory."""
    return x.to_torch() if isinstance(x, HostTensor) else x
