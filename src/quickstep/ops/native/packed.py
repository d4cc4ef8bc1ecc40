"""Weights that libquickstep has packed: owners of its objects, freed with the Python object.

And the library's numbers of element types, which tensors of torch and `HostTensor`s are asked for
alike.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

from quickstep.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, DType

if TYPE_CHECKING:
    import torch

__all__ = ["PackedQuantized", "PackedWeight", "kernel_dtype", "kv_kernel_dtype"]

# qs_dtype of csrc/quickstep.h, by the type's text
_KERNEL_DTYPES = {str(FLOAT32): 0, str(BFLOAT16): 1, str(FLOAT16): 2}

# what a KV cache may hold: qs_kv_dtype beside those
_KV_DTYPES = {**_KERNEL_DTYPES, str(INT8): 3}


def kernel_dtype(dtype: DType | torch.dtype) -> int | None:
    """`qs_dtype`; None for a type that has no native kernels."""
    return _KERNEL_DTYPES.get(str(dtype))


def kv_kernel_dtype(dtype: DType | torch.dtype) -> int | None:
    """`qs_kv_dtype`; None for a type that no native KV cache holds."""
    return _KV_DTYPES.get(str(dtype))


class PackedWeight:
    """Owns one `qs_linear`; its memory goes back to the system with this object."""

    __slots__ = ("__weakref__", "dtype", "handle", "nbytes")

    def __init__(self, library: ctypes.CDLL, handle: int, dtype: DType) -> None:
        self.handle = handle
        self.dtype = dtype
        self.nbytes: int = library.qs_linear_bytes(handle)
        finalizer = weakref.finalize(self, library.qs_linear_destroy, handle)
        finalizer.atexit = False  # the process's end frees it, and a daemon thread may still read


class PackedQuantized:
    """Owns one `qs_quantized`; its memory goes back to the system with this object."""

    __slots__ = ("__weakref__", "handle", "nbytes")

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self.handle = handle
        self.nbytes: int = library.qs_quantized_bytes(handle)
        finalizer = weakref.finalize(self, library.qs_quantized_destroy, handle)
        finalizer.atexit = False  # the process's end frees it, and a daemon thread may still read
