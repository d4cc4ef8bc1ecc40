"""Matrices from checkpoint files into packed weights, in one native call each.

Used by `ops.native.kernels`. The library reads some rows at a time with `pread`, rounds or decodes
them and packs them, on all threads; nothing of the matrix is in memory beside the packed weight.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ctypes import c_double, c_int16, c_int32, c_int64, c_void_p
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from quickstep.errors import ConfigError
from quickstep.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, of_kind
from quickstep.ops.native.library import raise_for_status
from quickstep.ops.native.packed import PackedQuantized, PackedWeight
from quickstep.ops.table import LinearWeight, StoredMatrix

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LOADED_KINDS", "NativeLoading"]

_UNREADABLE = 5  # qs_status of csrc/quickstep.h
_PLAIN = (FLOAT32, BFLOAT16, FLOAT16)  # by qs_rows_kind


class _Codes(msgspec.Struct, frozen=True):
    """What a kind of quantized values holds; group size 0: one scale per row."""

    bits: int
    group_size: int
    has_zeros: bool


# qs_rows_kind of csrc/quickstep.h
LOADED_KINDS: Mapping[str, int] = MappingProxyType(
    {"F32": 0, "BF16": 1, "F16": 2, "I8": 3, "Q4_0": 4, "Q8_0": 5, "Q4_K": 6, "Q5_K": 7, "Q6_K": 8}
)
_CODES = {
    "Q4_0": _Codes(4, 32, False),
    "Q8_0": _Codes(8, 32, False),
    "Q4_K": _Codes(4, 32, True),
    "Q5_K": _Codes(8, 32, True),
    "Q6_K": _Codes(8, 16, False),
}


class _FileRows(ctypes.Structure):
    """`qs_file_rows` of csrc/quickstep.h, field by field."""

    _fields_ = (("fd", c_int32), ("unused", c_int32), ("offset", c_int64), ("num_rows", c_int64))


class _Matrix(ctypes.Structure):
    """`qs_stored_matrix` of csrc/quickstep.h, field by field."""

    _fields_ = (
        ("kind", c_int32),
        ("num_parts", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("parts", c_void_p),
    )


class _CodeForm(ctypes.Structure):
    """`qs_code_form` of csrc/quickstep.h, field by field."""

    _fields_ = (
        ("bits", c_int32),
        ("has_zeros", c_int16),
        ("has_sub_scales", c_int16),
        ("group_size", c_int64),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("sample_step", c_int64),
        ("exact", c_double),
        ("wrong", c_double),
    )


class NativeLoading:
    """Loads with one `qs_context`, whose owner outlives this object."""

    def __init__(self, library: ctypes.CDLL, context: int) -> None:
        self._context = context
        self._library = library

    def load_linear(self, stored: StoredMatrix, bias: Tensor | None) -> LinearWeight:
        """`OpTable.load_linear`. Raises ConfigError for a file that cannot be read to its end."""
        outputs = sum(part.num_rows for part in stored.parts)
        with _opened(stored) as parts:
            matrix = _Matrix(
                kind=LOADED_KINDS[stored.kind],
                num_parts=len(stored.parts),
                n=outputs,
                k=stored.num_inputs,
                parts=ctypes.addressof(parts),
            )
            if stored.rounding is None and LOADED_KINDS[stored.kind] < len(_PLAIN):
                return self._plain(stored, matrix, bias)
            return self._codes(stored, matrix, bias)

    def _plain(self, stored: StoredMatrix, matrix: _Matrix, bias: Tensor | None) -> LinearWeight:
        dtype = _PLAIN[matrix.kind]
        if bias is not None:
            bias = bias.to(of_kind(dtype, bias.dtype)).contiguous()
        handle = ctypes.c_void_p()
        status = self._library.qs_linear_load(
            self._context,
            ctypes.byref(matrix),
            None if bias is None else bias.data_ptr(),
            ctypes.byref(handle),
        )
        _raise_for_load(status, stored)
        assert handle.value is not None
        packed = PackedWeight(self._library, handle.value, dtype)
        return LinearWeight(packed, bias, matrix.n, matrix.k, packed.nbytes)

    def _codes(self, stored: StoredMatrix, matrix: _Matrix, bias: Tensor | None) -> LinearWeight:
        rounding, scales = stored.rounding, stored.scales
        wide_bias = None if bias is None else bias.float().contiguous()
        if rounding is not None:
            form = _Codes(rounding.bits, rounding.group_size or 0, rounding.has_zeros)
        elif scales is not None:
            scales = scales.float().contiguous()
            form = _Codes(8, matrix.k // scales.shape[1], False)
        else:
            form = _CODES[stored.kind]
        call = _CodeForm(
            bits=form.bits,
            has_zeros=form.has_zeros,
            has_sub_scales=rounding is not None and rounding.has_sub_scales,
            group_size=form.group_size,
            scales=None if scales is None else scales.data_ptr(),
            bias=None if wide_bias is None else wide_bias.data_ptr(),
            sample_step=1 if rounding is None else rounding.sample_step,
        )
        handle = ctypes.c_void_p()
        status = self._library.qs_quantized_load(
            self._context, ctypes.byref(matrix), ctypes.byref(call), ctypes.byref(handle)
        )
        _raise_for_load(status, stored)
        assert handle.value is not None
        if rounding is not None:
            rounding.report_error(math.sqrt(call.wrong / call.exact) if call.exact else 0.0)
        packed = PackedQuantized(self._library, handle.value)
        return LinearWeight(packed, None, matrix.n, matrix.k, packed.nbytes)


@contextmanager
def _opened(stored: StoredMatrix) -> Iterator[ctypes.Array[_FileRows]]:
    """The parts with their files open."""
    with ExitStack() as stack:
        parts = (_FileRows * len(stored.parts))()
        for part, rows in zip(parts, stored.parts, strict=True):
            try:
                part.fd = stack.enter_context(rows.file.open("rb", buffering=0)).fileno()
            except OSError as error:
                raise ConfigError(f"{rows.file} cannot be read: {error}") from None
            part.offset, part.num_rows = rows.offset, rows.num_rows
        yield parts


def _raise_for_load(status: int, stored: StoredMatrix) -> None:
    """Turn a status other than QS_OK into the exception that names the file and its size."""
    if status == _UNREADABLE:
        files = " or ".join(sorted({str(part.file) for part in stored.parts}))
        raise ConfigError(
            f"{files} ended within a tensor, or cannot be read; download the checkpoint again"
        )
    rows = sum(part.num_rows for part in stored.parts)
    raise_for_status(status, f"loading a {rows} x {stored.num_inputs} weight")
