"""LoRA adapters on libquickstep: their memory, and the op by itself.

Used by `ops.native.kernels`; captured steps pass the handle of each row's adapter instead. The
memory of an adapter is freed with its Python object, so a step that uses it keeps that object.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

from quickstep.ops.native.library import (
    LoRAAddCall,
    LoRAGroupCall,
    LoRAPartCall,
    raise_for_status,
)
from quickstep.ops.native.packed import kernel_dtype
from quickstep.ops.table import LoRAAdapter, LoRAMapping, LoRAPart, OpTable
from quickstep.ops.tensors import (
    INT8,
    UINT8,
    AnyTensor,
    HostTensor,
    host_dtype,
    to_numpy,
    to_torch,
)

_INT8 = 3  # QS_I8


class PackedLoRA:
    """Owns one `qs_lora`; its memory is freed with this object."""

    __slots__ = ("__weakref__", "handle", "nbytes")

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self.handle = handle
        self.nbytes: int = library.qs_lora_bytes(handle)
        finalizer = weakref.finalize(self, library.qs_lora_destroy, handle)
        finalizer.atexit = False  # the process's end frees it, and a daemon thread may still read


class NativeLoRA:
    """The LoRA ops of one `qs_context`, whose owner outlives this object."""

    def __init__(
        self, library: ctypes.CDLL, context: int, reference: Callable[[], OpTable]
    ) -> None:
        self._library = library
        self._context = context
        self._reference = reference

    def pack_lora(self, modules: Sequence[Sequence[LoRAPart]]) -> LoRAAdapter:
        """`OpTable.pack_lora`: a copy, b in panels."""
        numbered = [(number, part) for number, parts in enumerate(modules) for part in parts]
        dtype = _lora_dtype(numbered[0][1].a) if numbered else None
        if dtype is None:
            return self._reference().pack_lora(modules)
        kept: list[AnyTensor] = []
        calls = (LoRAPartCall * len(numbered))()
        for call, (number, part) in zip(calls, numbered, strict=True):
            assert part.b is None or part.b.shape[1] == part.rank
            assert _lora_dtype(part.a) == dtype
            call.module, call.first_output, call.scale = number, part.first_output, part.scale
            call.n, call.rank, call.k = part.num_outputs, part.rank, part.num_inputs
            for name in ("a", "b", "rank_scales", "bias"):
                tensor: AnyTensor | None = getattr(part, name)
                if tensor is not None:
                    kept.append(tensor.contiguous())
                    setattr(call, name, kept[-1].data_ptr())
        handle = ctypes.c_void_p()
        create = self._library.qs_lora_create
        status = create(dtype, calls, len(calls), len(modules), ctypes.byref(handle))
        raise_for_status(status, "packing an adapter")
        assert handle.value is not None
        packed = PackedLoRA(self._library, handle.value)
        return LoRAAdapter(packed, packed.nbytes)

    def add_lora_(self, y: AnyTensor, x: AnyTensor, module: int, mapping: LoRAMapping) -> None:
        """`OpTable.add_lora_`."""
        native = tuple(group for group in mapping.groups if isinstance(group[0].data, PackedLoRA))
        dtype = kernel_dtype(y.dtype)
        if dtype is None or len(native) < len(mapping.groups):
            # all or none: adapters of one model have one dtype; one without tensors has no kernel
            others = tuple(
                group for group in mapping.groups if not isinstance(group[0].data, PackedLoRA)
            )
            reference = self._reference().add_lora_
            reference(to_torch(y), to_torch(x), module, LoRAMapping(others))
        if dtype is None or not native:
            return
        is_embedding = x.dim() == 1
        assert y.is_contiguous() and x.stride(-1) == 1 and (is_embedding or x.dtype == y.dtype)
        groups, tokens = lora_groups(native)
        call = LoRAAddCall(
            module=module,
            k=0 if is_embedding else x.shape[1],
            n=y.shape[1],
            x_stride=x.stride(0),
            num_groups=len(groups),
            groups=ctypes.addressof(groups),
            tokens=ctypes.addressof(tokens),
            x=None if is_embedding else x.data_ptr(),
            ids=x.data_ptr() if is_embedding else None,
            y=y.data_ptr(),
        )
        scratch_bytes = self._library.qs_lora_scratch_bytes(ctypes.byref(call))
        scratch = HostTensor.empty((scratch_bytes,), UINT8)
        call.scratch = scratch.data_ptr()
        status = self._library.qs_lora_add(self._context, dtype, ctypes.byref(call))
        if status:
            raise_for_status(status, "adding adapters")


def lora_groups(
    groups: Sequence[tuple[LoRAAdapter, AnyTensor]],
) -> tuple[ctypes.Array[LoRAGroupCall], ctypes.Array[ctypes.c_int64]]:
    """The `qs_lora_group` of each adapter, all of them packed here, and the tokens of all."""
    calls = (LoRAGroupCall * len(groups))()
    ids: list[int] = []
    for call, (adapter, tokens) in zip(calls, groups, strict=True):
        assert isinstance(adapter.data, PackedLoRA)
        call.adapter, call.num_tokens = adapter.data.handle, tokens.shape[0]
        ids += to_numpy(tokens).tolist()
    return calls, (ctypes.c_int64 * len(ids))(*ids)


def _lora_dtype(weight: AnyTensor) -> int | None:
    """The number of the dtype of an adapter's weights in the C ABI."""
    return _INT8 if host_dtype(weight.dtype) == INT8 else kernel_dtype(weight.dtype)
