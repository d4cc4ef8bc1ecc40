"""Attention over latents on libquickstep: `OpTable.latent`.

Part of `ops.native.kernels`; types without a kernel go to the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

import numpy as np

from quickstep.ops.native.attention import heads_in_place
from quickstep.ops.native.library import raise_for_status
from quickstep.ops.native.packed import PackedWeight, kernel_dtype
from quickstep.ops.table import LatentOps, OpTable
from quickstep.ops.tensors import AnyTensor, HostTensor
from quickstep.ops.weights import HeadWeight, LinearWeight

if TYPE_CHECKING:
    from torch import Tensor

PANEL = 16  # kPanel of csrc/kernels/kernels.h: outputs that are packed together


class _HeadLinearCall(ctypes.Structure):
    """`qs_head_linear_call`."""

    _fields_ = (
        ("num_heads", c_int64),
        ("n", c_int64),
        ("num_tokens", c_int64),
        ("x_stride", c_int64),
        ("x_head_stride", c_int64),
        ("x", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("half", c_int64),
        ("interleaved", c_int64),
        ("out", c_void_p),
    )


class _LatentKeysCall(ctypes.Structure):
    """`qs_latent_keys_call`."""

    _fields_ = (
        ("dtype", c_int32),
        ("interleaved", c_int32),
        ("num_tokens", c_int64),
        ("size", c_int64),
        ("x_stride", c_int64),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("eps", c_double),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("half", c_int64),
        ("out", c_void_p),
    )


class NativeLatent:
    """`OpTable.latent` of one `qs_context`, whose owner outlives this object."""

    def __init__(
        self,
        library: ctypes.CDLL,
        context: int,
        pack_linear: Callable[[AnyTensor, None], LinearWeight],
        reference: Callable[[], OpTable],
    ) -> None:
        self._library = library
        self._context = context
        self._pack_linear = pack_linear
        self._of_table = reference

    def ops(self) -> LatentOps:
        """The methods as `OpTable.latent`."""
        return LatentOps(self.pack_heads, self.keys, self.queries, self.values)

    def _reference(self) -> LatentOps:
        latent = self._of_table().latent
        assert latent is not None
        return latent

    def pack_heads(self, weight: AnyTensor) -> HeadWeight:
        """`LatentOps.pack_heads`: one packed weight, the outputs of a head in complete panels."""
        if kernel_dtype(weight.dtype) is None:
            return self._reference().pack_heads(weight)
        num_heads, num_outputs, num_inputs = weight.shape
        padded = _with_outputs(weight, -(-num_outputs // PANEL) * PANEL)
        packed = self._pack_linear(padded.view(-1, num_inputs), None)
        return HeadWeight(packed.data, num_heads, num_outputs, num_inputs, packed.nbytes)

    def keys(
        self, x: Tensor, weight: AnyTensor, eps: float, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> Tensor:
        """`LatentOps.keys`."""
        dtype, (size,) = kernel_dtype(x.dtype), weight.shape
        if dtype is None or weight.dtype != x.dtype:
            return self._reference().keys(x, weight, eps, cos, sin, interleaved)
        x = x if x.stride(1) == 1 else x.contiguous()
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        assert weight.is_contiguous() and x.shape[1] == size + 2 * cos.shape[1]
        out = x.new_empty((x.shape[0], 1, x.shape[1]))
        call = _LatentKeysCall(
            dtype=dtype,
            interleaved=interleaved,
            num_tokens=x.shape[0],
            size=size,
            x_stride=x.stride(0),
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            eps=eps,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            half=cos.shape[1],
            out=out.data_ptr(),
        )
        status = self._library.qs_latent_keys(self._context, ctypes.byref(call))
        raise_for_status(status, "latent_keys")
        return out

    def queries(
        self, q: Tensor, weight: HeadWeight, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> Tensor:
        """`LatentOps.queries`."""
        if not isinstance(weight.data, PackedWeight):
            return self._reference().queries(q, weight, cos, sin, interleaved)
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        assert q.shape[2] == weight.num_inputs + 2 * cos.shape[1]
        return self._multiply(q, weight, weight.data, (cos, sin), interleaved)

    def values(self, x: Tensor, weight: HeadWeight) -> Tensor:
        """`LatentOps.values`."""
        if not isinstance(weight.data, PackedWeight):
            return self._reference().values(x, weight)
        return self._multiply(x, weight, weight.data, None, interleaved=False)

    def _multiply(
        self,
        x: Tensor,
        weight: HeadWeight,
        packed: PackedWeight,
        turns: tuple[Tensor, Tensor] | None,
        interleaved: bool,
    ) -> Tensor:
        x = heads_in_place(x)
        num_tokens, num_heads, _ = x.shape
        half = 0 if turns is None else turns[0].shape[1]
        out = x.new_empty((num_tokens, num_heads, weight.num_outputs + 2 * half))
        call = _HeadLinearCall(
            num_heads=num_heads,
            n=weight.num_outputs,
            num_tokens=num_tokens,
            x_stride=x.stride(0),
            x_head_stride=x.shape[2],
            x=x.data_ptr(),
            cos=None if turns is None else turns[0].data_ptr(),
            sin=None if turns is None else turns[1].data_ptr(),
            half=half,
            interleaved=interleaved,
            out=out.data_ptr(),
        )
        status = self._library.qs_head_linear_run(self._context, packed.handle, ctypes.byref(call))
        raise_for_status(status, "head_linear")
        return out


def _with_outputs(weight: AnyTensor, num_outputs: int) -> AnyTensor:
    """Weight [H, N, C] with zeros up to so many outputs of each head, contiguous."""
    num_heads, outputs, inputs = weight.shape
    if outputs == num_outputs:
        return weight.contiguous()
    if isinstance(weight, HostTensor):
        padded = np.zeros((num_heads, num_outputs, inputs), weight.dtype.storage)
        padded[:, :outputs] = weight.numpy()
        return HostTensor(padded, weight.dtype)
    zeros = weight.new_zeros((num_heads, num_outputs, inputs))
    zeros[:, :outputs] = weight
    return zeros
