"""Residual streams of a token on libquickstep: `OpTable.streams`.

Part of `ops.native.kernels`; `ops.native.recorder` records the same calls.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

from quickstep.ops.native.library import StreamsKind, raise_for_status
from quickstep.ops.native.packed import kernel_dtype
from quickstep.ops.table import StreamOps
from quickstep.ops.tensors import AnyTensor

if TYPE_CHECKING:
    from torch import Tensor

MAX_STREAMS = 8  # kMaxStreams of csrc/kernels/kernels.h


class _StreamsCall(ctypes.Structure):
    """`qs_streams_call`."""

    _fields_ = (
        ("dtype", c_int32),
        ("kind", c_int32),
        ("num_tokens", c_int64),
        ("num_streams", c_int64),
        ("n", c_int64),
        ("active", c_int64),
        ("x", c_void_p),
        ("delta", c_void_p),
        ("scores", c_void_p),
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("out", c_void_p),
        ("scaled", c_void_p),
    )


class _MatchCall(ctypes.Structure):
    """`qs_match_call`."""

    _fields_ = (
        ("dtype", c_int32),
        ("num_tokens", c_int64),
        ("n", c_int64),
        ("x_stride", c_int64),
        ("like_stride", c_int64),
        ("total_stride", c_int64),
        ("x", c_void_p),
        ("like", c_void_p),
        ("total", c_void_p),
        ("out", c_void_p),
    )


class NativeStreams:
    """The ops, in a dtype of the kernels."""

    def __init__(self, library: ctypes.CDLL, context: int) -> None:
        self._library = library
        self._context = context

    def ops(self) -> StreamOps:
        """These methods."""
        return StreamOps(self.spread, self.mix, self.correct, self.add, self.match, self.cut)

    def spread(self, x: Tensor, others: Tensor) -> Tensor:
        """`SpreadStreamsOp`."""
        num_streams = 1 + others.shape[1] // x.shape[1]
        out = x.new_empty((x.shape[0], num_streams * x.shape[1]))
        self._run(StreamsKind.SPREAD, x, num_streams, out, delta=others)
        return out

    def mix(
        self, x: Tensor, scores: Tensor, weight: AnyTensor, active: int
    ) -> tuple[Tensor, Tensor]:
        """`MixStreamsOp`."""
        num_streams = scores.shape[1]
        out = x.new_empty(tuple(x.shape))
        of_active = x.new_empty((x.shape[0], x.shape[1] // num_streams))
        parts = {"scores": scores, "weight": weight, "scaled": of_active}
        self._run(StreamsKind.MIX, x, num_streams, out, active, **parts)
        return out, of_active

    def correct(
        self,
        x: Tensor,
        delta: Tensor,
        scores: Tensor,
        weight: AnyTensor,
        scale: AnyTensor | None,
        active: int,
    ) -> tuple[Tensor, Tensor]:
        """`CorrectStreamsOp`."""
        out, scaled = x.new_empty(tuple(x.shape)), x.new_empty(tuple(delta.shape))
        parts = {"delta": delta, "scores": scores, "weight": weight, "scaled": scaled}
        given = {**parts, "scale": scale} if scale is not None else parts
        self._run(StreamsKind.CORRECT, x, scores.shape[1], out, active, **given)
        return out, scaled

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        """`AddToStreamsOp`."""
        out = x.new_empty(tuple(x.shape))
        self._run(StreamsKind.ADD, x, x.shape[1] // delta.shape[1], out, delta=delta)
        return out

    def _run(
        self,
        kind: int,
        x: Tensor,
        num_streams: int,
        out: Tensor,
        active: int = 0,
        **parts: AnyTensor,
    ) -> None:
        """One call; every tensor but those of the result is made contiguous."""
        inputs = {name: part.contiguous() for name, part in parts.items()}
        x = x.contiguous()
        call = _StreamsCall(dtype=_dtype(x), kind=kind, num_tokens=x.shape[0], active=active)
        call.num_streams, call.n = num_streams, out.shape[1] // num_streams
        call.x, call.out = x.data_ptr(), out.data_ptr()
        for name, part in inputs.items():
            setattr(call, name, part.data_ptr())
        status = self._library.qs_streams(self._context, ctypes.byref(call))
        raise_for_status(status, "residual streams")

    def match(self, x: Tensor, like: Tensor, total: Tensor | None) -> Tensor:
        """`MatchMagnitudeOp`."""
        out = x.new_empty(tuple(x.shape))
        call = _MatchCall(_dtype(x), x.shape[0], x.shape[1], x.stride(0), like.stride(0))
        call.x, call.like, call.out = x.data_ptr(), like.data_ptr(), out.data_ptr()
        if total is not None:
            call.total, call.total_stride = total.data_ptr(), total.stride(0)
        status = self._library.qs_match_magnitude(self._context, ctypes.byref(call))
        raise_for_status(status, "magnitude")
        return out

    def cut(self, gate_up: Tensor, num_deviations: float) -> Tensor:
        """`CutGatesOp`."""
        gate_up = gate_up.contiguous()
        out, width = gate_up.new_empty(tuple(gate_up.shape)), gate_up.shape[1] // 2
        sizes = (gate_up.shape[0], width, num_deviations)
        pointers = gate_up.data_ptr(), out.data_ptr()
        status = self._library.qs_cut_gates(
            self._context, _dtype(gate_up), pointers[0], *sizes, pointers[1]
        )
        raise_for_status(status, "cutoff of gates")
        return out


def _dtype(x: Tensor) -> int:
    dtype = kernel_dtype(x.dtype)
    assert dtype is not None, "activations are in a dtype of the kernels"
    return dtype
