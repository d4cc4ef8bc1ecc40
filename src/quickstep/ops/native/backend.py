"""The native CPU kernels as an op table, or the reason why there are none.

`ops.resolve` calls `load_native` once at load; `quickstep doctor` prints `native_status`. An
install without the library (`QUICKSTEP_NATIVE=OFF` in CMakeLists.txt) runs on the reference ops.
`NativeProbe` measures the machine's limits for `quickstep bench` and `quickstep doctor`, with the
thread count and the ISA level that a model would use.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.ops.native.kernels import NativeOps
from quickstep.ops.native.library import library_path, open_library, raise_for_status
from quickstep.ops.native.packed import kernel_dtype
from quickstep.ops.native.steps import NativeSteps
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import INT8, DType, host_dtype
from quickstep.ops.thread_placement import ThreadPlaces

if TYPE_CHECKING:
    import torch


class NativeStatus(msgspec.Struct, frozen=True):
    """What this machine has.

    Attributes:
        available: Whether `load_native` returns a table.
        isa: The best level that the machine runs, "" without the library.
        levels: All levels it runs, best first; each is a valid `isa` of `load_native`.
        reason: Why not, in one sentence; "" when available.
        path: Where the library is looked for.
    """

    available: bool
    isa: str
    levels: tuple[str, ...]
    reason: str
    path: str


def native_status() -> NativeStatus:
    """Whether the library is there and loads, and which ISA levels it offers here."""
    path = library_path()
    if not path.exists():
        reason = (
            f"the native kernels are not built (there is no {path}): install g++ or clang++, then "
            "install Quickstep again"
        )
        return NativeStatus(False, "", (), reason, str(path))
    try:
        library = open_library(path)
    except OSError as error:
        reason = f"the native kernels cannot be loaded: {error}"
        return NativeStatus(False, "", (), reason, str(path))
    levels = tuple(library.qs_isa_levels().decode().split())
    return NativeStatus(True, levels[0], levels, "", str(path))


def default_num_threads() -> int:
    """Threads for the kernels: the cores this process may use, at most torch's own number.

    torch reads OMP_NUM_THREADS at import, so that variable and `torch.set_num_threads` count here.
    The default where the caller names no number; an engine does.
    """
    import torch

    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(affinity or 1, torch.get_num_threads()))


def load_native(
    num_threads: int | None = None,
    isa: str | None = None,
    reference: OpTable | None = None,
    places: Callable[[int], ThreadPlaces] | None = None,
) -> OpTable | None:
    """The native op table with its own thread pool; None where `native_status().reason` is set.

    The pool lives as long as the table. After a fork it runs in the child on the calling thread
    only, with the same bits; a child that needs threads loads its own table.

    Args:
        num_threads: None for `default_num_threads()`.
        isa: A level of `native_status().levels`; None or "" for the best.
        reference: For the element types that have no native kernel; None for the PyTorch ops.
        places: Where that many threads run and weights are placed; None leaves both to the system.

    Raises:
        ConfigError: The machine does not run `isa`.
    """
    opened = _open_context(num_threads, isa, places)
    if opened is None:
        return None
    library, context = opened
    level = library.qs_context_isa(context).decode()
    ops = NativeOps(library, context, _lazily(reference))
    steps = NativeSteps(library, context, ops)
    return replace(ops.table(f"native-{level}"), steps=steps)


def _lazily(reference: OpTable | None) -> Callable[[], OpTable]:
    """The table, or torch's ops, made on first use: that imports torch."""
    if reference is not None:
        return lambda: reference

    @functools.cache
    def torch_ops() -> OpTable:
        from quickstep.ops.reference import reference_ops

        return reference_ops()

    return torch_ops


def load_probe(
    num_bytes: int, num_threads: int | None = None, isa: str | None = None
) -> NativeProbe | None:
    """Measures the machine with a buffer of `num_bytes`; the rest is as for `load_native`."""
    opened = _open_context(num_threads, isa)
    return None if opened is None else NativeProbe(*opened, num_bytes)


def _open_context(
    num_threads: int | None,
    isa: str | None,
    places: Callable[[int], ThreadPlaces] | None = None,
) -> tuple[ctypes.CDLL, int] | None:
    """The library and a kernel table with threads; None where there is no library."""
    status = native_status()
    if not status.available:
        return None
    if isa and isa not in status.levels:
        known = ", ".join(status.levels)
        raise ConfigError(f"QUICKSTEP_CPU_ISA is {isa!r}, this machine runs {known}")
    library = open_library(library_path())
    context = ctypes.c_void_p()
    threads = default_num_threads() if num_threads is None else num_threads
    code = library.qs_context_create((isa or "").encode(), threads, ctypes.byref(context))
    raise_for_status(code, f"starting {threads} threads for the native kernels")
    assert context.value is not None
    if places is not None:
        _place(library, context.value, places(threads))
    return library, context.value


def _place(library: ctypes.CDLL, context: int, places: ThreadPlaces) -> None:
    cpus = (ctypes.c_int32 * len(places.cpus))(*places.cpus)
    status = library.qs_context_place(context, cpus, len(cpus), places.node_mask)
    if status:
        library.qs_context_destroy(context)
    raise_for_status(status, f"pinning threads to the CPUs {', '.join(map(str, places.cpus))}")


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
        """Read the buffer once; return the sum of its 32-bit words, modulo 2^32."""
        total = ctypes.c_uint32()
        status = self._library.qs_probe_read(self._context, self._handle, ctypes.byref(total))
        raise_for_status(status, "reading the probe's buffer")
        return total.value

    def multiply(self, dtype: DType | torch.dtype, rounds: int) -> int:
        """Multiply and add in registers as `linear` does for `dtype` (`int8`: as it does for
        quantized values of 8 bits); return the number of operations.
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
