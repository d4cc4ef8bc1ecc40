"""Element types, tensors and devices for code that runs with and without torch.

`import torch` takes a second and 150 MB. The native path does not need it: its matrices are in
packed weights and a step is one native call, so its tensors are only containers. A `HostTensor` is
a NumPy array with an element type and the few methods, named as in torch, that the engine calls on
both kinds; it computes nothing but conversions between floating-point types. A `DType` takes the
place of a `torch.dtype`; its text is torch's, because fingerprints contain it.

The last part is the layout of a KV cache, [B, S, K, W]. In a float dtype W is the head size D. In
int8 it is D + 4: D quantized values, then the four bytes of their float32 scale, one for each token
and head. So a block is copied as one piece, and a masked slot's scale is masked with it. In fp8
(e4m3) it is D: the values themselves, without a scale. In int4, whose type is uint8, each 32
elements are a group of 20 bytes: scale and minimum in bfloat16, then 16 bytes of two quantized
values each, the first in the low half. The last group has as many bytes as it needs; D is even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DType(msgspec.Struct, frozen=True):
    """An element type; `storage` is NumPy's type that holds it, bits of bfloat16 in uint16."""

    name: str
    itemsize: int
    storage: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


FLOAT32 = DType("float32", 4, "float32")
BFLOAT16 = DType("bfloat16", 2, "uint16")
FLOAT16 = DType("float16", 2, "float16")
INT8 = DType("int8", 1, "int8")
UINT8 = DType("uint8", 1, "uint8")
INT32 = DType("int32", 4, "int32")
INT64 = DType("int64", 8, "int64")
FLOAT8 = DType("float8_e4m3fn", 1, "uint8")

_ALL = (FLOAT32, BFLOAT16, FLOAT16, FLOAT8, INT8, UINT8, INT32, INT64)
_BY_TEXT = {str(dtype): dtype for dtype in _ALL}
_KV_NAMES = {"fp8": FLOAT8, "int4": UINT8}


def find_dtype(name: str) -> DType:
    """The type with this name, such as `bfloat16`; `fp8` is e4m3, `int4` the type of bytes with two
    quantized values each. Raises KeyError.
    """
    return _KV_NAMES.get(name) or _BY_TEXT[f"torch.{name}"]


def host_dtype(dtype: DType | torch.dtype) -> DType | None:
    """The `DType` of either; None for a type that only torch has."""
    return dtype if isinstance(dtype, DType) else _BY_TEXT.get(str(dtype))


def torch_dtype(dtype: DType | torch.dtype) -> torch.dtype:
    """The same type as a `torch.dtype`."""
    if not isinstance(dtype, DType):
        return dtype
    import torch

    found: torch.dtype = getattr(torch, dtype.name)
    return found


Array = npt.NDArray[Any]

_ALIGNMENT = 64  # a cache line, and the widest load of the kernels
_FLOATS = (FLOAT32, BFLOAT16, FLOAT16)


class Device(msgspec.Struct, frozen=True):
    """Where tensors are, like `torch.device`; `index` is the number of a GPU."""

    type: str
    index: int | None = None


CPU = Device("cpu")


def torch_device(device: torch.device | Device) -> torch.device:
    """The same device as a `torch.device`."""
    if not isinstance(device, Device):
        return device
    import torch

    if device.index is None:
        return torch.device(device.type)
    return torch.device(device.type, device.index)


def integers_on(device: torch.device, values: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Integers copied to a device, which is not waited for."""
    import torch

    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def use_device(device: torch.device | Device) -> None:
    """Make a GPU the current one of this thread: kernels are launched there."""
    if device.type == "cuda":
        import torch

        if device.index is not None:  # else it is the current one
            torch.cuda.set_device(torch_device(device))


class HostTensor:
    """Elements of `dtype` in a NumPy array, which keeps the memory alive."""

    __slots__ = ("_address", "_array", "dtype")

    def __init__(self, array: Array, dtype: DType) -> None:
        assert array.dtype == dtype.storage
        self._array = array
        self._address: int | None = None
        self.dtype = dtype

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: DType) -> HostTensor:
        """New aligned memory, not initialized."""
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
        """Always the CPU."""
        return CPU

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._array.nbytes

    def dim(self) -> int:
        """Number of dimensions."""
        return self._array.ndim

    def numel(self) -> int:
        """Number of elements."""
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
        """Whether its elements are in order and without gaps."""
        return self._array.flags.c_contiguous

    def contiguous(self) -> HostTensor:
        """Itself, or a contiguous copy."""
        return self if self.is_contiguous() else HostTensor(self._array.copy(), self.dtype)

    def new_empty(self, shape: tuple[int, ...], dtype: DType | None = None) -> HostTensor:
        """Another tensor, of the same type by default."""
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
        """The same elements in float32."""
        return self.to(FLOAT32)

    def to(self, dtype: DType) -> HostTensor:
        """Floating point in another type, rounded to nearest, ties to even; itself if unchanged."""
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


# A tensor of either class: a weight, a KV cache, or a result of a step.
AnyTensor: TypeAlias = "Tensor | HostTensor"

# The class of an argument that is also that of the result.
TensorT = TypeVar("TensorT", "Tensor", HostTensor, AnyTensor)


def _bfloat16_bits(wide: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(wide).view(np.uint32)
    even = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(wide), np.uint32(0x7FC0), even).astype(np.uint16)


def rounded(value: float, dtype: DType | torch.dtype) -> float:
    """A number rounded to floating point of `dtype`."""
    if not isinstance(dtype, DType):
        import torch

        return float(torch.tensor(value, dtype=dtype).item())
    one = HostTensor(np.array([value], dtype=np.float32), FLOAT32)
    return float(one.to(dtype).float().numpy()[0])


def to_numpy(x: AnyTensor) -> Array:
    """The elements as an array of the same shape on the host; bfloat16 as bits."""
    if isinstance(x, HostTensor):
        return x.numpy()
    import torch

    host = x.cpu()
    return (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()


def on_host(x: AnyTensor) -> AnyTensor:
    """The same elements in memory of the host: x itself if it is there."""
    return x if isinstance(x, HostTensor) else x.cpu()


def as_float64(x: AnyTensor) -> npt.NDArray[np.float64]:
    """Floating point in float64, as an array of the same shape on the host."""
    if isinstance(x, HostTensor):
        return x.float().numpy().astype(np.float64)
    values: npt.NDArray[np.float64] = x.double().cpu().numpy()
    return values


def to_torch(x: AnyTensor) -> Tensor:
    """A tensor of torch with the same memory: itself, or a view of a `HostTensor`."""
    return x.to_torch() if isinstance(x, HostTensor) else x


def to_dtype(x: AnyTensor, dtype: DType) -> AnyTensor:
    """Floating point in another type, as a tensor of the same class; itself if unchanged."""
    return x.to(dtype) if isinstance(x, HostTensor) else x.to(torch_dtype(dtype))


def new_empty(x: AnyTensor, shape: tuple[int, ...], dtype: DType) -> AnyTensor:
    """A new tensor of the same class as `x`, on its device; not initialized."""
    if isinstance(x, HostTensor):
        return x.new_empty(shape, dtype)
    return x.new_empty(shape, dtype=torch_dtype(dtype))


def transposed(x: AnyTensor) -> AnyTensor:
    """x [N, M] -> [M, N], contiguous, of the same class."""
    if isinstance(x, HostTensor):
        return HostTensor(np.ascontiguousarray(x.numpy().T), x.dtype)
    return x.t().contiguous()


def negative_exponential(x: AnyTensor) -> AnyTensor:
    """-exp(x) of float32 numbers, rounded once, of the same class."""
    wide = -np.exp(as_float64(x))
    result = HostTensor(wide.astype(np.float32), FLOAT32)
    return result if isinstance(x, HostTensor) else result.to_torch().to(x.device)


SCALE_BYTES = 4  # of an int8 head: a float32; of a group of int4: two bfloat16
INT4_GROUP = 32  # elements with a scale and a minimum
_NAN_BITS = 0x7FC0  # of bfloat16
_LEAST = 1e-30  # below it a scale's reciprocal would overflow; such a head is stored as zero


def head_width(head_size: int, dtype: DType | torch.dtype) -> int:
    """W, the number of elements of a head of D in a cache of this dtype."""
    if is_int4(dtype):
        if head_size % 2:
            raise ConfigError(
                f"--kv-cache-dtype int4 holds heads of an even size, this model's have {head_size} "
                "elements; use int8"
            )
        return head_size // 2 + SCALE_BYTES * -(-head_size // INT4_GROUP)
    return head_size + SCALE_BYTES if host_dtype(dtype) == INT8 else head_size


def head_size_of(cache: AnyTensor) -> int:
    """D of a cache [B, S, K, W]."""
    width: int = cache.shape[-1]
    if is_int4(cache.dtype):
        num_groups, rest = divmod(width, SCALE_BYTES + INT4_GROUP // 2)
        return num_groups * INT4_GROUP + (2 * (rest - SCALE_BYTES) if rest else 0)
    return width - SCALE_BYTES if host_dtype(cache.dtype) == INT8 else width


def is_int4(dtype: DType | torch.dtype) -> bool:
    """Whether a cache of this dtype holds two quantized values in a byte."""
    return host_dtype(dtype) == UINT8


FLOAT8_MAX = 448.0  # of e4m3


def to_float8(x: Tensor) -> Tensor:
    """Floating point in e4m3, half to even; beyond 448 it is 448, and infinity is NaN."""
    import torch

    wide = x.float()
    bounded = wide.clamp(-FLOAT8_MAX, FLOAT8_MAX).masked_fill(~wide.isfinite(), torch.nan)
    return bounded.to(torch.float8_e4m3fn)


def bytes_of_float8(x: Tensor) -> Tensor:
    """E4m3 as uint8, for kernels on GPUs that have no such type; others as they are."""
    import torch

    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def store_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D] -> [..., W] as a cache of this dtype has them."""
    import torch

    if dtype == torch.int8:
        return quantize_heads(x)
    if dtype == torch.uint8:
        return quantize_int4(x)
    return to_float8(x) if dtype == torch.float8_e4m3fn else x.to(dtype)


def quantize_heads(x: Tensor) -> Tensor:
    """[..., D] -> [..., D + 4] int8: quantized values x * (127 / max|x|) rounded half to even,
    scale max|x| / 127, all in float32. A head with NaN or infinity gets NaN as its scale.
    """
    import torch

    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    largest = torch.full_like(most, 127.0)
    is_finite, is_zero = most.isfinite(), most < _LEAST
    is_used = is_finite & ~is_zero
    quants = (wide * torch.div(largest, most)).round().masked_fill(~is_used, 0.0)
    scale = torch.div(most, largest).masked_fill(is_zero, 0.0).masked_fill(~is_finite, torch.nan)
    return torch.cat((quants.to(torch.int8), scale.contiguous().view(torch.int8)), -1)


def quantize_int4(x: Tensor) -> Tensor:
    """[..., D] -> [..., W] uint8: for each 32 elements minimum and (maximum - minimum) / 15 in
    bfloat16, and (x - minimum) / scale rounded half to even, from 0 to 15, in float32. A group with
    NaN or infinity gets NaN as both.
    """
    import torch

    parts = [_int4_group(group) for group in torch.split(x.float(), INT4_GROUP, -1)]
    return torch.cat(parts, -1)


def _int4_group(x: Tensor) -> Tensor:
    """[..., up to 32] float32 -> its bytes."""
    import torch

    def near(value: Tensor) -> Tensor:
        return value.bfloat16().float()

    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    steps, one = torch.full_like(low, 15.0), torch.ones_like(low)
    least = near(low + 0.0)  # -0 becomes 0
    # the difference of the parts, as that of the values may overflow
    scale = near(torch.div(high, steps) - torch.div(least, steps))
    is_finite = x.isfinite().all(-1, keepdim=True) & least.isfinite()
    is_used = is_finite & (scale >= _LEAST)
    quants = ((x - least) * torch.div(one, scale)).clamp(0.0, 15.0).round()
    quants = quants.masked_fill(~is_used, 0.0).to(torch.uint8)
    pair = torch.cat((scale.masked_fill(~is_used, 0.0), least), -1).bfloat16()
    bits = pair.view(torch.int16).masked_fill(~is_finite, _NAN_BITS).view(torch.uint8)
    return torch.cat((bits, quants[..., 0::2] | quants[..., 1::2] << 4), -1)


def _read_int4(rows: Tensor) -> Tensor:
    import torch

    parts = []
    for group in torch.split(rows, SCALE_BYTES + INT4_GROUP // 2, -1):
        pair = group[..., :SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        scale, least = torch.split(pair.view(torch.bfloat16).float(), 1, -1)
        packed = group[..., SCALE_BYTES:]
        quants = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        # each operation rounds, as in the kernels; the value is one of bfloat16
        parts.append((quants.float() * scale + least).bfloat16())
    return torch.cat(parts, -1).double()


def read_heads(rows: Tensor) -> Tensor:
    """[..., W] of a cache -> [..., D] in float64, exactly."""
    import torch

    if rows.dtype == torch.uint8:
        return _read_int4(rows)
    if rows.dtype != torch.int8:
        return rows.double()
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    scale = scale.view(torch.float32)
    return rows[..., :-SCALE_BYTES].double() * scale.double()
