"""Layers that keep a state of each sequence, and gates, on libquickstep.

Used by `ops.native.kernels`; `ops.native.recorder` records the same calls.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING

from quickstep.ops.native.library import (
    DeltaCall,
    MambaCall,
    ShortConvCall,
    StateRowsCall,
    raise_for_status,
)
from quickstep.ops.native.packed import kernel_dtype
from quickstep.ops.table import DeltaWeights, MambaWeights, ShortConvWeights, StateRows
from quickstep.ops.tensors import AnyTensor, TensorT

if TYPE_CHECKING:
    from torch import Tensor

# of csrc/kernels/kernels.h
MAX_CONV_WIDTH, MAX_DELTA_SIZE, MAX_DELTA_GROUP = 8, 256, 8


class NativeStates:
    """The three ops, in a dtype of the kernels."""

    def __init__(self, library: ctypes.CDLL, context: int) -> None:
        self._library = library
        self._context = context

    def gate(self, x: TensorT, gates: TensorT) -> TensorT:
        """`OpTable.gate`."""
        x = x.contiguous()
        out = x.new_empty(tuple(x.shape))
        status = self._library.qs_gate(
            self._context,
            _dtype(x),
            x.data_ptr(),
            gates.data_ptr(),
            gates.stride(0),
            x.shape[0],
            x.shape[1],
            gates.shape[1],
            out.data_ptr(),
        )
        raise_for_status(status, "gate")
        return out

    def short_conv(
        self, x: Tensor, weights: ShortConvWeights, states: AnyTensor, rows: StateRows
    ) -> Tensor:
        """`OpTable.short_conv`."""
        width, num_channels = weights.taps.shape
        out = x.new_empty((x.shape[0], num_channels))
        packed = _PackedRows(states, rows)
        call = ShortConvCall(
            _dtype(x),
            width,
            num_channels,
            x.stride(0),
            x.data_ptr(),
            weights.taps.data_ptr(),
            None if weights.bias is None else weights.bias.data_ptr(),
            packed.call,
            out.data_ptr(),
        )
        status = self._library.qs_short_conv(self._context, ctypes.byref(call))
        raise_for_status(status, "short convolution")
        return out

    def gated_delta(
        self, x: Tensor, weights: DeltaWeights, states: AnyTensor, rows: StateRows
    ) -> Tensor:
        """`OpTable.gated_delta`."""
        num_heads, value_size = weights.rates.shape[0], weights.norm.shape[0]
        out = x.new_empty((x.shape[0], num_heads * value_size))
        packed = _PackedRows(states, rows)
        call = DeltaCall(
            _dtype(x),
            weights.taps.shape[0],
            weights.num_key_heads,
            num_heads,
            weights.key_size,
            value_size,
            x.stride(0),
            weights.shared_stride,
            weights.eps,
            x.data_ptr(),
            weights.taps.data_ptr(),
            weights.rates.data_ptr(),
            weights.biases.data_ptr(),
            weights.norm.data_ptr(),
            packed.call,
            out.data_ptr(),
        )
        status = self._library.qs_delta(self._context, ctypes.byref(call))
        raise_for_status(status, "gated delta rule")
        return out

    def mamba(self, x: Tensor, weights: MambaWeights, states: AnyTensor, rows: StateRows) -> Tensor:
        """`OpTable.mamba`."""
        out = x.new_empty((x.shape[0], weights.rates.shape[0] * weights.head_size))
        packed = _PackedRows(states, rows)
        call = mamba_call(weights, x.stride(0))
        call.dtype, call.x, call.rows = _dtype(x), x.data_ptr(), packed.call
        call.out = out.data_ptr()
        status = self._library.qs_mamba(self._context, ctypes.byref(call))
        raise_for_status(status, "Mamba-2")
        return out


def mamba_call(weights: MambaWeights, x_stride: int) -> MambaCall:
    """The parts of a call that do not change: the caller keeps the weights."""

    def address(tensor: AnyTensor | None) -> int | None:
        return None if tensor is None else int(tensor.data_ptr())

    return MambaCall(
        width=weights.taps.shape[0],
        num_heads=weights.rates.shape[0],
        num_groups=weights.num_groups,
        head_size=weights.head_size,
        state_size=weights.state_size,
        x_stride=x_stride,
        eps=weights.eps,
        least_step=weights.least_step,
        most_step=weights.most_step,
        gate_factor=weights.gate_factor,
        step_factor=weights.step_factor,
        norms_first=weights.norms_first,
        taps=address(weights.taps),
        conv_bias=address(weights.conv_bias),
        rates=address(weights.rates),
        biases=address(weights.biases),
        skips=address(weights.skips),
        norm=address(weights.norm),
    )


class _PackedRows:
    """Rows as the library reads them, kept while a call runs."""

    def __init__(self, states: AnyTensor, rows: StateRows) -> None:
        self._offsets = array("q", rows.row_offsets)
        columns = rows.sources, rows.targets, rows.num_replayed, rows.num_drafts
        self._rows = array("q", [number for row in zip(*columns, strict=True) for number in row])
        self._saves = array("q", [number for save in rows.saves for number in save])
        self.call = StateRowsCall(
            len(rows.sources),
            self._offsets.buffer_info()[0],
            self._rows.buffer_info()[0],
            self._saves.buffer_info()[0] if rows.saves else None,
            len(rows.saves),
            states.data_ptr(),
            states.shape[0],
            states.shape[1],
        )


def _dtype(x: AnyTensor) -> int:
    dtype = kernel_dtype(x.dtype)
    assert dtype is not None, "the model's activations have native kernels"
    return dtype
