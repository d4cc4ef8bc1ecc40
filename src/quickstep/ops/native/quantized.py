"""Low-bit weights on libquickstep: packing, products, and rows of packed weights.

Used by `ops.native.kernels` alone, which checks shapes of activations and picks by the weight's
kind.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from quickstep.ops.dtypes import FLOAT32, INT8, UINT8, of_kind
from quickstep.ops.host_tensor import HostTensor
from quickstep.ops.native.library import QuantizeCall, QuantizedWeightCall, raise_for_status
from quickstep.ops.native.packed import PackedQuantized, kernel_dtype
from quickstep.ops.table import SUB_BLOCK_INPUTS, LinearWeight, QuantizedWeight

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NativeQuantized"]


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
        outputs, inputs = weight.shape
        groups = 1 if group_size is None else inputs // group_size
        quants = weight.new_empty((outputs, inputs), dtype=of_kind(UINT8, weight.dtype))
        wide = of_kind(FLOAT32, weight.dtype)
        scales = weight.new_empty((outputs, groups), dtype=wide)
        zeros = weight.new_empty((outputs, groups), dtype=wide) if has_zeros else None
        sub_scales = None
        if has_sub_scales:
            shape = (outputs, inputs // SUB_BLOCK_INPUTS)
            sub_scales = weight.new_empty(shape, dtype=of_kind(INT8, weight.dtype))
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

    def pack(self, weight: QuantizedWeight, bias: Tensor | None) -> LinearWeight:
        """Copy quantized values and scales into the kernel's layout, in memory of the library's
        own.
        """
        quants, scales = weight.quants.contiguous(), weight.scales.float().contiguous()
        zeros = None if weight.zeros is None else weight.zeros.float().contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        sub_scales = None if weight.sub_scales is None else weight.sub_scales.contiguous()
        outputs, inputs = quants.shape
        call = QuantizedWeightCall(
            bits=weight.bits,
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

    def linear(self, x: Tensor, weight: LinearWeight, packed: PackedQuantized) -> Tensor:
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
