"""Packed weights as parts of a file: their form and bytes, and weights that are mapped from one."""

from __future__ import annotations

import ctypes
import mmap
from ctypes import c_int16, c_int32, c_int64, c_uint8, c_void_p
from functools import cached_property
from typing import Any, Self

from quickstep.ops.native.library import library_path, raise_for_status
from quickstep.ops.native.packed import (
    UNREADABLE,
    PackedQuantized,
    PackedWeight,
    plain_dtype,
    stacked_weight,
)
from quickstep.ops.weights import LinearWeight, PackedForm

_PARTS = 4
_NUM_LEVELS = 16
_PAGE_BYTES = 4096


class _PackedForm(ctypes.Structure):
    """`qs_packed_form` of csrc/quickstep.h, field by field."""

    _fields_ = (
        ("bits", c_int32),
        ("dtype", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("group_size", c_int64),
        ("has_bias", c_int16),
        ("has_zeros", c_int16),
        ("half_scales", c_int16),
        ("has_sub_scales", c_int16),
        ("has_minimums", c_int16),
        ("has_super_scales", c_int16),
        ("has_levels", c_int16),
        ("levels", c_uint8 * _NUM_LEVELS),
    )


class _Parts(ctypes.Structure):
    """`qs_packed_parts` of csrc/quickstep.h, field by field."""

    _fields_ = (("memory", c_void_p * _PARTS), ("bytes", c_int64 * _PARTS))


class NativePackedFiles:
    """`OpTable.packed_files` of one `qs_context`, whose owner outlives this object."""

    page_bytes = _PAGE_BYTES

    @classmethod
    def of(cls, library: ctypes.CDLL, context: int) -> Self | None:
        """None on a machine with other pages, where parts of a file could not be mapped."""
        return cls(library, context) if mmap.PAGESIZE == _PAGE_BYTES else None

    def __init__(self, library: ctypes.CDLL, context: int) -> None:
        self._context = context
        self._library = library

    @cached_property
    def layout(self) -> str:
        """Names what decides the bytes of a form: the library's code and the level that runs."""
        level: str = self._library.qs_context_isa(self._context).decode()
        with (
            library_path().open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content,
        ):
            first = ctypes.c_char.from_buffer(content)
            parts = _Parts((ctypes.addressof(first),), (len(content),))
            checksum = self._checksum(parts)
            del first  # the mapping is closed without it
        return f"{level}-{checksum:016x}"

    def form(self, weight: LinearWeight) -> PackedForm:
        """How a weight is packed, and its checksum."""
        forms = tuple(self._form(*self._form_and_parts(packed)) for packed in _matrices(weight))
        if len(forms) == 1:
            return forms[0]
        sizes = tuple(size for form in forms for size in form.part_bytes)
        fields = _fields_of(_PackedForm(n=weight.num_outputs, k=weight.num_inputs))
        return PackedForm(**fields, part_bytes=sizes, checksum=0, stacked=forms)

    def parts(self, weight: LinearWeight) -> list[memoryview]:
        """The bytes of its parts, which are there as long as the weight."""
        return [
            memoryview((ctypes.c_char * size).from_address(memory)).cast("B")
            for packed in _matrices(weight)
            for memory, size in _held(self._form_and_parts(packed)[1])
        ]

    def map(self, form: PackedForm, file: int, offset: int) -> LinearWeight | None:
        """The weight whose parts are in an open file from `offset` on, each from a page on; None if
        it cannot be mapped, or its bytes have another checksum.
        """
        weights = []
        for matrix in form.stacked or (form,):
            weight = self._map(matrix, file, offset)
            if weight is None:
                return None
            weights.append(weight)
            offset += sum(size + -size % _PAGE_BYTES for size in matrix.part_bytes)
        return weights[0] if len(weights) == 1 else stacked_weight(self._library, weights)

    def _map(self, form: PackedForm, file: int, offset: int) -> LinearWeight | None:
        call = _PackedForm(*(getattr(form, name) for name, _ in _PackedForm._fields_))
        handle = ctypes.c_void_p()
        library = self._library
        open_weight = library.qs_quantized_map if form.bits else library.qs_linear_map
        status = open_weight(self._context, ctypes.byref(call), file, offset, ctypes.byref(handle))
        if status == UNREADABLE:
            return None
        raise_for_status(status, f"mapping a {form.n} x {form.k} weight")
        assert handle.value is not None
        packed: PackedQuantized | PackedWeight
        if form.bits:
            packed = PackedQuantized(library, handle.value)
        else:
            packed = PackedWeight(library, handle.value, plain_dtype(form.dtype))
        _, parts = self._form_and_parts(packed)
        if self._checksum(parts) != form.checksum:
            return None
        return LinearWeight(packed, None, form.n, form.k, packed.nbytes)

    def _checksum(self, parts: _Parts) -> int:
        return int(self._library.qs_parts_checksum(self._context, ctypes.byref(parts)))

    def _form(self, form: _PackedForm, parts: _Parts) -> PackedForm:
        return PackedForm(
            **_fields_of(form),
            part_bytes=tuple(size for _, size in _held(parts)),
            checksum=self._checksum(parts),
        )

    def _form_and_parts(self, packed: PackedQuantized | PackedWeight) -> tuple[_PackedForm, _Parts]:
        form, parts = _PackedForm(), _Parts()
        library = self._library
        is_quantized = isinstance(packed, PackedQuantized)
        read = library.qs_quantized_parts if is_quantized else library.qs_linear_parts
        read(packed.handle, ctypes.byref(form), ctypes.byref(parts))
        return form, parts


def _fields_of(form: _PackedForm) -> dict[str, Any]:
    """As `PackedForm` has them."""
    fields = {name: getattr(form, name) for name, _ in _PackedForm._fields_}
    return fields | {"levels": tuple(form.levels)}


def _matrices(weight: LinearWeight) -> tuple[PackedQuantized | PackedWeight, ...]:
    """Those of a stack, or the one."""
    packed = weight.data
    assert isinstance(packed, PackedQuantized | PackedWeight)
    return (packed.stacked if isinstance(packed, PackedQuantized) else ()) or (packed,)


def _held(parts: _Parts) -> list[tuple[int, int]]:
    """Address and bytes of the parts that there are."""
    return [pair for pair in zip(parts.memory, parts.bytes, strict=True) if pair[0]]
