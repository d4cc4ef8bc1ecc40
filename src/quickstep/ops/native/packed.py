"""Packed weights on libquickstep: their owners, quantized weights, and loading from files.

Used by `ops.native.kernels`, which checks the shapes of activations and chooses by the kind of the
weight. The memory of a packed weight is freed with its Python object. Loading reads some rows at a
time with `pread`, rounds or decodes them and packs them, on all threads: no second copy of the
matrix exists. Also here: the library's numbers of element types.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import c_double, c_int16, c_int32, c_int64, c_void_p
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from quickstep.errors import ConfigError
from quickstep.ops.block_grids import block_grid
from quickstep.ops.kv_pairs import in_pairs
from quickstep.ops.native.library import QuantizeCall, QuantizedWeightCall, raise_for_status
from quickstep.ops.tensors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    UINT8,
    AnyTensor,
    DType,
    HostTensor,
    TensorT,
    to_dtype,
)
from quickstep.ops.weights import (
    REQUANTIZED_GROUPS,
    SUB_BLOCK_INPUTS,
    LinearWeight,
    QuantizedWeight,
    StoredMatrix,
    StoredRows,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# qs_dtype of csrc/quickstep.h, by the type's text
_KERNEL_DTYPES = {str(FLOAT32): 0, str(BFLOAT16): 1, str(FLOAT16): 2}

# what a KV cache may hold: qs_kv_dtype adds int8, int4 in bytes, and bfloat16 in pairs
_KV_DTYPES = {**_KERNEL_DTYPES, str(INT8): 3, str(UINT8): 4}
_BF16_PAIRS = 5


def kernel_dtype(dtype: DType | torch.dtype) -> int | None:
    """`qs_dtype`; None for a type that has no native kernels."""
    return _KERNEL_DTYPES.get(str(dtype))


def kv_kernel_dtype(cache: AnyTensor) -> int | None:
    """`qs_kv_dtype` of keys or values; None for a type that no native KV cache holds."""
    return _BF16_PAIRS if in_pairs(cache) else _KV_DTYPES.get(str(cache.dtype))


def plain_dtype(number: int) -> DType:
    """The type of a `qs_dtype`."""
    return _PLAIN[number]


class PackedWeight:
    """Owns one `qs_linear`; its memory is freed with this object."""

    __slots__ = ("__weakref__", "dtype", "handle", "nbytes")

    def __init__(self, library: ctypes.CDLL, handle: int, dtype: DType) -> None:
        self.handle = handle
        self.dtype = dtype
        self.nbytes: int = library.qs_linear_bytes(handle)
        finalizer = weakref.finalize(self, library.qs_linear_destroy, handle)
        finalizer.atexit = False  # the process's end frees it, and a daemon thread may still read


class PackedQuantized:
    """Owns one `qs_quantized`; its memory is freed with this object.

    `stacked`: the matrices of a stack, which are in memory of their own; empty for one matrix.
    """

    __slots__ = ("__weakref__", "handle", "nbytes", "stacked")

    def __init__(
        self, library: ctypes.CDLL, handle: int, stacked: tuple[PackedQuantized, ...] = ()
    ) -> None:
        self.handle = handle
        self.stacked = stacked
        self.nbytes: int = library.qs_quantized_bytes(handle)
        finalizer = weakref.finalize(self, library.qs_quantized_destroy, handle)
        finalizer.atexit = False  # the process's end frees it, and a daemon thread may still read


def stacked_weight(library: ctypes.CDLL, weights: Sequence[LinearWeight]) -> LinearWeight:
    """Quantized matrices [n, C] one below another, each in its own form: as one weight [N, C]."""
    matrices: list[PackedQuantized] = []
    for weight in weights:
        assert isinstance(weight.data, PackedQuantized)
        matrices.append(weight.data)
    handles = (c_void_p * len(matrices))(*(matrix.handle for matrix in matrices))
    handle = c_void_p()
    status = library.qs_quantized_stack(handles, len(matrices), ctypes.byref(handle))
    outputs, inputs = sum(weight.num_outputs for weight in weights), weights[0].num_inputs
    raise_for_status(status, f"stacking {len(matrices)} matrices to {outputs} x {inputs}")
    assert handle.value is not None
    packed = PackedQuantized(library, handle.value, tuple(matrices))
    return LinearWeight(packed, None, outputs, inputs, packed.nbytes)


class NativeQuantized:
    """The low-bit ops of one `qs_context`, whose owner outlives this object."""

    def __init__(self, library: ctypes.CDLL, context: int) -> None:
        self._context = context
        self._library = library
        self._run = library.qs_quantized_run
        self._scratch_bytes = library.qs_quantized_scratch_bytes

    def quantize(
        self,
        weight: Tensor,
        bits: int,
        group_size: int | None,
        has_zeros: bool,
        has_sub_scales: bool,
    ) -> QuantizedWeight:
        """Quantized values of a weight [N, C] with contiguous rows."""
        import torch

        outputs, inputs = weight.shape
        groups = 1 if group_size is None else inputs // group_size
        quants = weight.new_empty((outputs, inputs), dtype=torch.uint8)
        scales = weight.new_empty((outputs, groups), dtype=torch.float32)
        zeros = weight.new_empty((outputs, groups), dtype=torch.float32) if has_zeros else None
        sub_scales = None
        if has_sub_scales:
            shape = (outputs, inputs // SUB_BLOCK_INPUTS)
            sub_scales = weight.new_empty(shape, dtype=torch.int8)
        call = QuantizeCall(
            dtype=kernel_dtype(weight.dtype),
            bits=bits,
            n=outputs,
            k=inputs,
            row_stride=weight.stride(0) if outputs > 1 else inputs,
            group_size=group_size or 0,
            weight=weight.data_ptr(),
            quants=quants.data_ptr(),
            scales=scales.data_ptr(),
            zeros=None if zeros is None else zeros.data_ptr(),
            sub_scales=None if sub_scales is None else sub_scales.data_ptr(),
        )
        status = self._library.qs_quantize(self._context, ctypes.byref(call))
        raise_for_status(status, f"rounding a {outputs} x {inputs} weight to {bits} bits")
        return QuantizedWeight(quants, scales, zeros, bits, group_size or inputs, sub_scales)

    def pack(self, weight: QuantizedWeight, bias: AnyTensor | None) -> LinearWeight:
        """Copy quantized values [N, C], scales and bias [N] into the kernel's layout, in memory of
        the library's own.
        """
        quants, scales = weight.quants.contiguous(), weight.scales.float().contiguous()
        zeros = None if weight.zeros is None else weight.zeros.float().contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        sub_scales = None if weight.sub_scales is None else weight.sub_scales.contiguous()
        outputs, inputs = quants.shape
        call = QuantizedWeightCall(
            bits=weight.bits,
            has_minimums=weight.has_minimums,
            n=outputs,
            k=inputs,
            group_size=weight.group_size,
            quants=quants.data_ptr(),
            scales=scales.data_ptr(),
            zeros=None if zeros is None else zeros.data_ptr(),
            bias=None if wide_bias is None else wide_bias.data_ptr(),
            sub_scales=None if sub_scales is None else sub_scales.data_ptr(),
        )
        handle = ctypes.c_void_p()
        status = self._library.qs_quantized_create(
            self._context, ctypes.byref(call), ctypes.byref(handle)
        )
        raise_for_status(
            status,
            f"packing a {outputs} x {inputs} weight of {weight.bits} bits in groups of "
            f"{weight.group_size}",
        )
        assert handle.value is not None
        packed = PackedQuantized(self._library, handle.value)
        return LinearWeight(packed, None, outputs, inputs, packed.nbytes)

    def linear(self, x: TensorT, weight: LinearWeight, packed: PackedQuantized) -> TensorT:
        """X [T, C] with contiguous rows -> [T, N]."""
        num_tokens = x.shape[0]
        out = x.new_empty((num_tokens, weight.num_outputs))
        scratch = HostTensor.empty((self._scratch_bytes(packed.handle, num_tokens),), UINT8)
        status = self._run(
            self._context,
            packed.handle,
            kernel_dtype(x.dtype),
            x.data_ptr(),
            x.stride(0),
            num_tokens,
            out.data_ptr(),
            scratch.data_ptr(),
        )
        if status:
            raise_for_status(status, "linear")
        return out

    def rows(self, token_ids: Tensor, weight: LinearWeight, out: Tensor) -> None:
        """Rows of the weight into `out` [T, C]; a token id outside raises EngineError."""
        packed = weight.data
        assert isinstance(packed, PackedQuantized)
        status = self._library.qs_quantized_rows(
            self._context,
            packed.handle,
            kernel_dtype(out.dtype),
            token_ids.data_ptr(),
            token_ids.numel(),
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "embedding")


UNREADABLE = 5  # qs_status of csrc/quickstep.h
_PLAIN = (FLOAT32, BFLOAT16, FLOAT16)  # by qs_rows_kind


class _Form(msgspec.Struct, frozen=True):
    """What a kind of quantized values holds; group size 0: one scale per row."""

    bits: int
    group_size: int
    has_zeros: bool


# qs_rows_kind of csrc/quickstep.h
_LOADED_KINDS: Mapping[str, int] = MappingProxyType(
    {
        **{"F32": 0, "BF16": 1, "F16": 2, "I8": 3, "Q4_0": 4, "Q8_0": 5, "Q4_K": 6, "Q5_K": 7},
        **{"Q6_K": 8, "Q4_1": 9, "Q5_0": 10, "Q5_1": 11, "Q2_K": 12, "Q3_K": 13},
        **{"IQ4_NL": 14, "IQ4_XS": 15, "TQ1_0": 16, "TQ2_0": 17, "MXFP4": 18},
        **{"IQ1_S": 19, "IQ1_M": 20, "IQ2_XXS": 21, "IQ2_XS": 22, "IQ2_S": 23, "IQ3_XXS": 24},
        **{"IQ3_S": 25, "NVFP4": 26},
        **{"U8": 64, "I4": 65, "U4": 66, "LEVELS": 67, "LEVELS_HIGH": 68, "E4M3": 69},
    }
)
_FORMS = {
    "Q4_0": _Form(4, 32, False),
    "Q4_1": _Form(4, 32, True),
    "Q5_0": _Form(6, 32, False),
    "Q5_1": _Form(6, 32, True),
    "Q8_0": _Form(8, 32, False),
    "Q4_K": _Form(4, 32, True),
    "Q5_K": _Form(6, 32, True),
    "Q6_K": _Form(6, 16, False),
    "Q2_K": _Form(4, 16, True),
    "Q3_K": _Form(4, 16, False),
    "IQ4_NL": _Form(8, 32, False),
    "IQ4_XS": _Form(8, 32, False),
    "TQ1_0": _Form(4, 256, False),
    "TQ2_0": _Form(4, 256, False),
    "MXFP4": _Form(6, 32, False),
    "IQ1_S": _Form(4, 32, True),
    "IQ1_M": _Form(4, 16, True),
    "IQ2_XXS": _Form(8, 32, False),
    "IQ2_XS": _Form(8, 16, False),
    "IQ2_S": _Form(8, 16, False),
    "IQ3_XXS": _Form(8, 32, False),
    "IQ3_S": _Form(4, 32, True),
    "NVFP4": _Form(6, 16, False),
}


_LAYOUTS = {"rows": 0, "columns": 1, "awq": 2}  # qs_rows_layout
# of kinds whose scales are in other tensors
_BITS = {"I8": 8, "U8": 8, "I4": 4, "U4": 4, "LEVELS": 6, "LEVELS_HIGH": 8}


def _part_form(kind: str, part: StoredRows, num_inputs: int) -> _Form:
    if part.scales is None:
        return _FORMS[kind]
    if part.order is not None:
        sizes = (size for size in REQUANTIZED_GROUPS if num_inputs % size == 0)
        return _Form(8, next(sizes, num_inputs), False)
    return _Form(_BITS[kind], num_inputs // part.scales.shape[1], part.zeros is not None)


def _has_rows(part: StoredRows) -> bool:
    return part.num_rows > 0


def _in_forms(stored: StoredMatrix) -> list[tuple[_Form, StoredMatrix]]:
    """The matrices of a stack of quantized values, each in a form of its own: parts of one kind and
    form that follow one another are one.
    """

    def form_of(part: StoredRows) -> tuple[str, _Form, bool, bytes]:
        kind = part.kind or stored.kind
        levels = b"" if part.levels is None else part.levels.numpy().tobytes()
        return kind, _part_form(kind, part, stored.num_inputs), part.factor == 1.0, levels

    return [
        (form, StoredMatrix(kind, tuple(parts), stored.num_inputs))
        for (kind, form, *_), parts in groupby(filter(_has_rows, stored.parts), form_of)
    ]


class _FileRows(ctypes.Structure):
    """`qs_file_rows` of csrc/quickstep.h, field by field."""

    _fields_ = (
        ("fd", c_int32),
        ("kind", c_int16),
        ("layout", c_int16),
        ("offset", c_int64),
        ("first_row", c_int64),
        ("num_rows", c_int64),
        ("stored_rows", c_int64),
        ("head_size", c_int64),
        ("num_groups", c_int64),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("order", c_void_p),
        ("levels", c_void_p),
        ("factor", c_double),
        ("content", c_void_p),
    )


class _Matrix(ctypes.Structure):
    """`qs_stored_matrix` of csrc/quickstep.h, field by field."""

    _fields_ = (
        ("kind", c_int32),
        ("num_parts", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("parts", c_void_p),
    )


class _QuantizedForm(ctypes.Structure):
    """`qs_code_form` of csrc/quickstep.h, field by field."""

    _fields_ = (
        ("bits", c_int32),
        ("has_zeros", c_int16),
        ("has_sub_scales", c_int16),
        ("group_size", c_int64),
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

    def load_linear(self, stored: StoredMatrix, bias: AnyTensor | None) -> LinearWeight:
        """`OpTable.load_linear`. Raises ConfigError for a file that cannot be read to its end."""
        rounding = stored.rounding
        if rounding is not None:
            form = _Form(rounding.bits, rounding.group_size or 0, rounding.has_zeros)
            return self._quantized(stored, form, bias)
        if not stored.is_quantized:
            return self._plain(stored, bias)
        weights, end = [], 0
        for form, matrix in _in_forms(stored):
            start, end = end, end + sum(part.num_rows for part in matrix.parts)
            weights.append(self._quantized(matrix, form, None if bias is None else bias[start:end]))
        return weights[0] if len(weights) == 1 else stacked_weight(self._library, weights)

    def _plain(self, stored: StoredMatrix, bias: AnyTensor | None) -> LinearWeight:
        dtype = _PLAIN[_LOADED_KINDS[stored.kind]]
        if bias is not None:
            bias = to_dtype(bias, dtype).contiguous()
        handle = ctypes.c_void_p()
        with _opened(stored) as matrix:
            status = self._library.qs_linear_load(
                self._context,
                ctypes.byref(matrix),
                None if bias is None else bias.data_ptr(),
                ctypes.byref(handle),
            )
        _raise_for_load(status, stored)
        assert handle.value is not None
        packed = PackedWeight(self._library, handle.value, dtype)
        return LinearWeight(packed, None, matrix.n, matrix.k, packed.nbytes)

    def _quantized(self, stored: StoredMatrix, form: _Form, bias: AnyTensor | None) -> LinearWeight:
        rounding = stored.rounding
        wide_bias = None if bias is None else bias.float().contiguous()
        call = _QuantizedForm(
            bits=form.bits,
            has_zeros=form.has_zeros,
            has_sub_scales=rounding is not None and rounding.has_sub_scales,
            group_size=form.group_size,
            bias=None if wide_bias is None else wide_bias.data_ptr(),
            sample_step=1 if rounding is None else rounding.sample_step,
        )
        handle = ctypes.c_void_p()
        with _opened(stored) as matrix:
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
def _opened(stored: StoredMatrix) -> Iterator[_Matrix]:
    """The matrix with the files of its parts open, each file once."""
    with ExitStack() as stack:
        parts = (_FileRows * len(stored.parts))()
        descriptors: dict[Path, int] = {}
        for part, rows in zip(parts, stored.parts, strict=True):
            if rows.file not in descriptors:
                try:
                    file = stack.enter_context(rows.file.open("rb", buffering=0))
                except OSError as error:
                    raise ConfigError(f"{rows.file} cannot be read: {error}") from None
                descriptors[rows.file] = file.fileno()
            part.fd = descriptors[rows.file]
            part.offset, part.first_row, part.num_rows = rows.offset, rows.first_row, rows.num_rows
            kind = rows.kind or stored.kind
            part.kind, part.head_size = _LOADED_KINDS[kind], rows.head_size
            part.layout, part.stored_rows = _LAYOUTS[rows.layout], rows.stored_rows
            if rows.scales is not None:
                part.num_groups = rows.scales.shape[1]
            part.scales, part.zeros = _address(rows.scales), _address(rows.zeros)
            part.order, part.factor = _address(rows.order), rows.factor
            part.levels = _address(block_grid(kind) if rows.levels is None else rows.levels)
        yield _Matrix(
            kind=_LOADED_KINDS[stored.kind],
            num_parts=len(stored.parts),
            n=sum(part.num_rows for part in stored.parts),
            k=stored.num_inputs,
            parts=ctypes.addressof(parts),
        )


def _address(tensor: HostTensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _raise_for_load(status: int, stored: StoredMatrix) -> None:
    """Turn a status other than QS_OK into the exception that names the file and its size."""
    if status == UNREADABLE:
        files = " or ".join(sorted({str(part.file) for part in stored.parts}))
        raise ConfigError(
            f"{files} ended within a tensor, or cannot be read; download the checkpoint again"
        )
    rows = sum(part.num_rows for part in stored.parts)
    raise_for_status(status, f"loading a {rows} x {stored.num_inputs} weight")
