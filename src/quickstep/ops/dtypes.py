"""Element types by themselves, for the path that runs without torch.

A `DType` stands where a `torch.dtype` stands in tensors of torch; its text is torch's, which
fingerprints are made of. Functions that meet either ask `host_dtype` which it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "INT8",
    "INT32",
    "INT64",
    "UINT8",
    "DType",
    "find_dtype",
    "host_dtype",
    "of_kind",
    "torch_dtype",
]


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

_ALL = (FLOAT32, BFLOAT16, FLOAT16, INT8, UINT8, INT32, INT64)
_BY_TEXT = {str(dtype): dtype for dtype in _ALL}


def find_dtype(name: str) -> DType:
    """The type of a name, `bfloat16`. Raises KeyError."""
    return _BY_TEXT[f"torch.{name}"]


def host_dtype(dtype: DType | torch.dtype) -> DType | None:
    """The type of either; None for one that only torch has."""
    return dtype if isinstance(dtype, DType) else _BY_TEXT.get(str(dtype))


def torch_dtype(dtype: DType | torch.dtype) -> torch.dtype:
    """The same type as torch has it."""
    if not isinstance(dtype, DType):
        return dtype
    import torch

    found: torch.dtype = getattr(torch, dtype.name)
    return found


def of_kind(dtype: DType, other: DType | torch.dtype) -> Any:
    """`dtype` as the same kind of object as `other`, for tensors of that kind."""
    return dtype if isinstance(other, DType) else torch_dtype(dtype)
