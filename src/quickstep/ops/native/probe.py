"""What the machine can do at most, measured by the native kernels: streaming reads, multiply-adds.

Used by `quickstep bench` and `quickstep doctor`, on the thread count and the ISA level that a model
would run on. Each call does a fixed amount of work and says how much; the caller has the clock.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

from quickstep.ops.dtypes import INT8, DType, host_dtype
from quickstep.ops.native.library import raise_for_status
from quickstep.ops.native.packed import kernel_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["NativeProbe"]


class NativeProbe:
    """A context and a buffer of its own, `num_bytes` long; both go with this object."""

    def __init__(self, library: ctypes.CDLL, context: int, num_bytes: int) -> None:
        self._library = library
        self._context = context
        finalizer = weakref.finalize(self, library.qs_context_destroy, context)
        finalizer.atexit = False
        self.isa: str = library.qs_context_isa(context).decode()
        handle = ctypes.c_void_p()
        status = library.qs_probe_create(context, num_bytes, ctypes.byref(handle))
        raise_for_status(status, f"allocating {num_bytes} bytes to read")
        assert handle.value is not None
        self._handle = handle.value
        freed = weakref.finalize(self, library.qs_probe_destroy, handle.value)
        freed.atexit = False
        self.num_bytes: int = library.qs_probe_bytes(handle.value)

    def read(self) -> int:
        """Read the buffer once. Gives the sum of its 32-bit words, modulo 2^32."""
        total = ctypes.c_uint32()
        status = self._library.qs_probe_read(self._context, self._handle, ctypes.byref(total))
        raise_for_status(status, "reading the probe's buffer")
        return total.value

    def multiply(self, dtype: DType | torch.dtype, rounds: int) -> int:
        """Multiply and add in registers as `linear` does for `dtype` (`int8`: as it does for
        quantized values of 8 bits). Gives the operations done.
        """
        num_flops = ctypes.c_int64()
        found = ctypes.byref(num_flops)
        if host_dtype(dtype) == INT8:
            status = self._library.qs_probe_multiply_int8(self._context, rounds, found)
        else:
            status = self._library.qs_probe_multiply(
                self._context, kernel_dtype(dtype), rounds, found
            )
        raise_for_status(status, "multiplying in registers")
        return num_flops.value
