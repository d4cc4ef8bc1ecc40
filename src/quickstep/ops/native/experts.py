"""A mixture of experts on libquickstep: the router's choice, and the products of a token's experts.

Used by `ops.native.kernels`; `ops.native.recorder` records the same calls.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

from quickstep.ops.native.library import EXPERT_ACTIVATIONS, raise_for_status
from quickstep.ops.native.lora import PackedLoRA, lora_groups
from quickstep.ops.native.packed import PackedQuantized, PackedWeight, kernel_dtype
from quickstep.ops.native.ranks import NativeRanks
from quickstep.ops.table import (
    ExpertLoRA,
    ExpertParts,
    ExpertWeights,
    OpTable,
    Routing,
    RoutingRule,
)
from quickstep.ops.tensors import (
    FLOAT32,
    INT64,
    UINT8,
    AnyTensor,
    DType,
    HostTensor,
    host_dtype,
    torch_dtype,
)
from quickstep.ops.weights import LinearWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_PER_TOKEN = 64  # kMaxPerToken of csrc/kernels/kernels.h


class _Expert(ctypes.Structure):
    """`qs_expert`."""

    _fields_ = (("linear", c_void_p * 2), ("quantized", c_void_p * 2))


class _RouteCall(ctypes.Structure):
    """`qs_route_call`."""

    _fields_ = (
        ("dtype", c_int32),
        ("normalise", c_int32),
        ("num_tokens", c_int64),
        ("num_experts", c_int64),
        ("per_token", c_int64),
        ("num_groups", c_int64),
        ("groups_per_token", c_int64),
        ("counted_per_group", c_int64),
        ("sigmoid", c_int64),
        ("scale", c_double),
        ("scores", c_void_p),
        ("bias", c_void_p),
        ("factors", c_void_p),
        ("chosen", c_void_p),
        ("weights", c_void_p),
    )


class _ExpertsCall(ctypes.Structure):
    """`qs_experts_call`."""

    _fields_ = (
        ("dtype", c_int32),
        ("activation", c_int32),
        ("num_tokens", c_int64),
        ("per_token", c_int64),
        ("weighs_inputs", c_int64),
        ("x_stride", c_int64),
        ("x", c_void_p),
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("first_module", c_int64),
        ("num_groups", c_int64),
        ("groups", c_void_p),
        ("tokens", c_void_p),
        ("ranks", c_void_p),
        ("first_column", c_int64),
        ("out", c_void_p),
        ("scratch", c_void_p),
    )


class PackedExperts:
    """Owns one `qs_experts`, which points to the matrices that this object keeps.

    Attributes:
        dtype: Of the activations that plain matrices take; None if all are quantized: any.
    """

    __slots__ = ("__weakref__", "_matrices", "dtype", "handle")

    def __init__(
        self,
        library: ctypes.CDLL,
        handle: int,
        matrices: tuple[LinearWeight, ...],
        dtype: DType | None,
    ) -> None:
        self.handle = handle
        self.dtype = dtype
        self._matrices = matrices
        finalizer = weakref.finalize(self, library.qs_experts_destroy, handle)
        finalizer.atexit = False  # the process's end frees it, and a daemon thread may still read

    def takes(self, dtype: DType | torch.dtype) -> bool:
        """Whether activations of a type have native kernels."""
        return kernel_dtype(dtype) is not None and self.dtype in (None, host_dtype(dtype))


class NativeExperts:
    """The ops of mixtures of one `qs_context`, whose owner outlives this object. `ops` are the
    table's other ops: where these here cannot, they compute the experts one by one.
    """

    def __init__(self, library: ctypes.CDLL, context: int, ops: Callable[[], OpTable]) -> None:
        self._library = library
        self._context = context
        self._ops = ops

    def pack(
        self, gate_up: tuple[LinearWeight, ...], down_proj: tuple[LinearWeight, ...]
    ) -> PackedExperts | None:
        """`OpTable.pack_experts`; None where a matrix has no native kernel."""
        dtypes: set[DType] = set()
        experts = (_Expert * len(gate_up))()
        for expert, matrices in zip(experts, zip(gate_up, down_proj, strict=True), strict=True):
            for which, matrix in enumerate(matrices):
                packed = matrix.data
                if isinstance(packed, PackedQuantized):
                    expert.quantized[which] = packed.handle
                elif isinstance(packed, PackedWeight):
                    expert.linear[which] = packed.handle
                    dtypes.add(packed.dtype)
                else:
                    return None
        if len(dtypes) > 1:
            return None
        handle = ctypes.c_void_p()
        create = self._library.qs_experts_create
        raise_for_status(create(experts, len(experts), ctypes.byref(handle)), "packing experts")
        assert handle.value is not None
        kept = (*gate_up, *down_proj)
        return PackedExperts(self._library, handle.value, kept, next(iter(dtypes), None))

    def route(
        self,
        scores: Tensor,
        rule: RoutingRule,
        selection_bias: AnyTensor | None,
        factors: AnyTensor | None = None,
    ) -> Routing:
        """`OpTable.route`."""
        dtype, num_experts = kernel_dtype(scores.dtype), scores.shape[1]
        if dtype is None or rule.per_token > MAX_PER_TOKEN:
            from quickstep.ops.reference.experts import route

            return route(scores, rule, selection_bias, factors)
        scores = scores.contiguous()
        shape = (scores.shape[0], rule.per_token)
        chosen = scores.new_empty(shape, dtype=torch_dtype(INT64))
        weights = scores.new_empty(shape, dtype=torch_dtype(FLOAT32))
        call = _RouteCall(
            dtype=dtype,
            normalise=rule.normalise,
            num_tokens=shape[0],
            num_experts=num_experts,
            per_token=rule.per_token,
            num_groups=rule.num_groups,
            groups_per_token=rule.groups_per_token,
            counted_per_group=rule.counted_per_group,
            sigmoid=rule.sigmoid,
            scale=rule.scale,
            scores=scores.data_ptr(),
            bias=None if selection_bias is None else _floats(selection_bias).data_ptr(),
            factors=None if factors is None else _floats(factors).data_ptr(),
            chosen=chosen.data_ptr(),
            weights=weights.data_ptr(),
        )
        raise_for_status(self._library.qs_route(self._context, ctypes.byref(call)), "route")
        return Routing(chosen, weights)

    def experts(
        self,
        x: Tensor,
        routing: Routing,
        weights: ExpertWeights,
        activation: str,
        lora: ExpertLoRA | None,
        parts: ExpertParts | None,
    ) -> Tensor:
        """`OpTable.experts`."""
        packed = weights.data
        assert isinstance(packed, PackedExperts)
        groups = () if lora is None else lora.mapping.groups
        is_native = packed.takes(x.dtype) and activation in EXPERT_ACTIVATIONS
        is_native &= parts is None or isinstance(parts.ranks, NativeRanks)
        if not is_native or not all(isinstance(one.data, PackedLoRA) for one, _ in groups):
            from quickstep.ops.reference.experts import experts

            return experts(self._ops(), x, routing, weights, activation, lora, parts)
        x = x if x.stride(1) == 1 else x.contiguous()
        chosen, shares = routing.chosen.contiguous(), routing.weights.contiguous()
        calls, tokens = lora_groups(groups)
        out = x.new_empty((x.shape[0], weights.down_proj[0].num_outputs))
        call = _ExpertsCall(
            dtype=kernel_dtype(x.dtype),
            activation=EXPERT_ACTIVATIONS[activation],
            num_tokens=x.shape[0],
            per_token=chosen.shape[1],
            weighs_inputs=weights.weighs_inputs,
            x_stride=x.stride(0),
            x=x.data_ptr(),
            chosen=chosen.data_ptr(),
            weights=shares.data_ptr(),
            first_module=0 if lora is None else lora.first_module,
            num_groups=len(groups),
            groups=ctypes.addressof(calls),
            tokens=ctypes.addressof(tokens),
            ranks=parts.ranks.handle if parts and isinstance(parts.ranks, NativeRanks) else None,
            first_column=0 if parts is None else parts.own.start,
            out=out.data_ptr(),
        )
        library, of_call = self._library, ctypes.byref(call)
        size = library.qs_experts_scratch_bytes(packed.handle, of_call)
        scratch = HostTensor.empty((size,), UINT8)
        call.scratch = scratch.data_ptr()
        raise_for_status(library.qs_experts_run(self._context, packed.handle, of_call), "experts")
        return out


def _floats(bias: AnyTensor) -> AnyTensor:
    """A number of each expert, as the loader made it."""
    assert host_dtype(bias.dtype) == FLOAT32 and bias.is_contiguous()
    return bias
