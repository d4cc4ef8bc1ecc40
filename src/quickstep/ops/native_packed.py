"""Weights that libquickstep has packed: owners of its objects, freed with the Python object."""

from __future__ import annotations

import ctypes
import weakref

import torch

__all__ = ["DTYPES", "KV_DTYPES", "PackedCodes", "PackedWeight"]

# qs_dtype of csrc/quickstep.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# what a KV cache may hold: qs_kv_dtype beside those
KV_DTYPES = {**DTYPES, torch.int8: 3}


class PackedWeight:
    """Owns one `qs_linear`; its memory goes back to the system with this object."""

    __slots__ = ("__weakref__", "dtype", "handle", "nbytes")

    def __init__(self, library: ctypes.CDLL, handle: int, dtype: torch.dtype) -> None:
        self.handle = handle
        self.dtype = dtype
        self.nbytes: int = library.qs_linear_bytes(handle)
        finalizer = weakref.finalize(self, library.qs_linear_destroy, handle)
        finalizer.atexit = False  # the process's end frees it, and a daemon thread may still read


class PackedCodes:
    """Owns one `qs_quantized`; its memory goes back to the system with this object."""

    __slots__ = ("__weakref__", "handle", "nbytes")

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self.handle = handle
        self.nbytes: int = library.qs_quantized_bytes(handle)
        finalizer = weakref.finalize(self, library.qs_quantized_destroy, handle)
        finalizer.atexit = False  # the process's end frees it, and a daemon thread may still read
