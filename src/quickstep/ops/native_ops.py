"""The ops of the table on libquickstep: tensors in, raw pointers through ctypes, tensors out.

`ops.native` makes one `NativeOps` and hands its methods out as the `OpTable`. Each op allocates
its result and makes one call. Element types that have no native kernel go to the reference, op by
op, which keeps both kinds of op exact. Arguments are checked by assertions of our own invariants;
what a request could get wrong was checked long before.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from quickstep.ops.native_library import AttentionCall, raise_for_status
from quickstep.ops.native_logits import NativeLogits
from quickstep.ops.native_packed import DTYPES, PackedCodes, PackedWeight
from quickstep.ops.native_quantized import NativeQuantized
from quickstep.ops.table import (
    AttentionParams,
    LinearWeight,
    OpTable,
    PagedLayout,
    QuantizedWeight,
)

__all__ = ["DTYPES", "NativeOps", "PackedWeight"]

# qs_activation of csrc/quickstep.h
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}

# Results of ops that are alive together at a layer's widest point, per element of it.
_SCRATCH_BYTES = 8


class _AttentionLayout:
    """The arrays that one `PagedLayout` needs in C, made once and used by every layer."""

    __slots__ = ("block_tables", "context_lens", "layout", "row_offsets", "scratch")

    def __init__(self, layout: PagedLayout) -> None:
        assert layout.block_tables.dtype == torch.int32
        self.layout = layout
        self.row_offsets = (ctypes.c_int64 * len(layout.row_offsets))(*layout.row_offsets)
        self.context_lens = (ctypes.c_int64 * len(layout.context_lens))(*layout.context_lens)
        self.block_tables = layout.block_tables.contiguous()
        self.scratch: dict[tuple[int, int, int], Tensor] = {}


class NativeOps:
    """One `qs_context` (kernel table and threads) and the ops that run on it.

    Calls from several threads are safe; loops of one context run one after another.
    """

    def __init__(self, library: ctypes.CDLL, context: int, reference: OpTable) -> None:
        self._context = context
        self._library = library
        self._reference = reference
        self._quantized = NativeQuantized(library, context)
        self._linear_run = library.qs_linear_run
        self._embedding = library.qs_embedding
        self._rms_norm = library.qs_rms_norm
        self._add_rms_norm = library.qs_add_rms_norm
        self._rotary = library.qs_rotary
        self._gated_activation = library.qs_gated_activation
        self._write_kv = library.qs_write_kv
        self._paged_attention = library.qs_paged_attention
        # The layout seen last; replaced whole, so that a reader sees an old one or a new one.
        self._attention_layout: _AttentionLayout | None = None
        finalizer = weakref.finalize(self, library.qs_context_destroy, context)
        finalizer.atexit = False

    def table(self, name: str) -> OpTable:
        """The op table of these methods, under the kernel set's name."""
        return OpTable(
            name=name,
            pack_linear=self.pack_linear,
            pack_quantized=self.pack_quantized,
            quantize=self.quantize,
            linear=self.linear,
            embedding=self.embedding,
            rms_norm=self.rms_norm,
            add_rms_norm=self.add_rms_norm,
            rotary=self.rotary,
            write_kv=self.write_kv,
            paged_attention=self.paged_attention,
            gated_activation=self.gated_activation,
            logits=NativeLogits(self._library, self._context, self.linear).logits,
            scratch_bytes=_SCRATCH_BYTES,
            kernel_s=self.kernel_s,
        )

    def kernel_s(self) -> float:
        """`OpTable.kernel_s`."""
        return int(self._library.qs_context_loop_ns(self._context)) / 1e9

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> LinearWeight:
        """Copy weight [N, C] into the kernel's layout, in memory of the library's own."""
        dtype = DTYPES.get(weight.dtype)
        if dtype is None or weight.numel() == 0:
            return self._reference.pack_linear(weight, bias)
        weight = _rows(weight)
        if bias is not None:
            bias = bias.to(weight.dtype).contiguous()
        outputs, inputs = weight.shape
        handle = ctypes.c_void_p()
        status = self._library.qs_linear_create(
            self._context,
            dtype,
            weight.data_ptr(),
            outputs,
            inputs,
            weight.stride(0) if outputs > 1 else inputs,
            None if bias is None else bias.data_ptr(),
            ctypes.byref(handle),
        )
        raise_for_status(status, f"packing a {outputs} x {inputs} weight")
        assert handle.value is not None
        packed = PackedWeight(self._library, handle.value, weight.dtype)
        return LinearWeight(packed, bias, outputs, inputs, packed.nbytes)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> LinearWeight:
        """`OpTable.pack_quantized`."""
        return self._quantized.pack(weight, bias)

    def quantize(
        self, weight: Tensor, bits: int, group_size: int | None, has_zeros: bool
    ) -> QuantizedWeight:
        """`OpTable.quantize`."""
        return self._quantized.quantize(_rows(weight), bits, group_size, has_zeros)

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """`OpTable.linear`."""
        packed = weight.data
        if isinstance(packed, PackedCodes):
            assert x.shape[1] == weight.num_inputs
            return self._quantized.linear(_rows(x), DTYPES[x.dtype], weight, packed)
        if not isinstance(packed, PackedWeight):
            return self._reference.linear(x, weight)
        assert x.dtype == packed.dtype and x.shape[1] == weight.num_inputs
        x = _rows(x)
        num_tokens = x.shape[0]
        out = torch.empty((num_tokens, weight.num_outputs), dtype=x.dtype)
        status = self._linear_run(
            self._context, packed.handle, x.data_ptr(), x.stride(0), num_tokens, out.data_ptr()
        )
        if status:
            raise_for_status(status, "linear")
        return out

    def embedding(
        self, token_ids: Tensor, weight: Tensor | LinearWeight, dtype: torch.dtype
    ) -> Tensor:
        """`OpTable.embedding`; a token id outside the table raises EngineError."""
        assert token_ids.dtype == torch.int64
        token_ids = token_ids.contiguous()
        if isinstance(weight, LinearWeight):
            return self._packed_rows(token_ids, weight, dtype)
        assert weight.is_contiguous() and weight.dtype == dtype
        num_rows, size = weight.shape
        num_tokens = token_ids.numel()
        out = torch.empty((num_tokens, size), dtype=dtype)
        status = self._embedding(
            self._context,
            token_ids.data_ptr(),
            num_tokens,
            weight.data_ptr(),
            num_rows,
            size * weight.element_size(),
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "embedding")
        return out

    def _packed_rows(self, token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
        packed = weight.data
        out = torch.empty((token_ids.numel(), weight.num_inputs), dtype=dtype)
        if isinstance(packed, PackedCodes):
            self._quantized.rows(token_ids, weight, out, DTYPES[dtype])
            return out
        if not isinstance(packed, PackedWeight):
            return self._reference.embedding(token_ids, weight, dtype)
        assert packed.dtype == dtype
        status = self._library.qs_linear_rows(
            self._context,
            packed.handle,
            token_ids.data_ptr(),
            token_ids.numel(),
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "embedding")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """`OpTable.rms_norm` over the last dimension of [T, C] or [T, H, D]."""
        dtype = DTYPES.get(x.dtype)
        if dtype is None or weight.dtype != x.dtype:
            return self._reference.rms_norm(x, weight, eps, offset)
        if x.stride(-1) != 1:
            x = x.contiguous()
        size = x.shape[-1]
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        assert weight.is_contiguous() and weight.numel() == size and x.dim() in (2, 3)
        out = torch.empty(x.shape, dtype=x.dtype)
        status = self._rms_norm(
            self._context,
            dtype,
            x.data_ptr(),
            x.shape[0],
            inner,
            size,
            x.stride(0),
            inner_stride,
            weight.data_ptr(),
            eps,
            offset,
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "rms_norm")
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        """`OpTable.add_rms_norm` on [T, C]."""
        dtype = DTYPES.get(x.dtype)
        if dtype is None or weight.dtype != x.dtype or residual.dtype != x.dtype:
            return self._reference.add_rms_norm(x, residual, weight, eps, offset)
        x, residual = x.contiguous(), residual.contiguous()
        size = x.shape[-1]
        assert weight.is_contiguous() and weight.numel() == size and x.shape == residual.shape
        out, total = torch.empty_like(x), torch.empty_like(x)
        status = self._add_rms_norm(
            self._context,
            dtype,
            x.data_ptr(),
            residual.data_ptr(),
            x.shape[0],
            size,
            weight.data_ptr(),
            eps,
            offset,
            out.data_ptr(),
            total.data_ptr(),
        )
        if status:
            raise_for_status(status, "add_rms_norm")
        return out, total

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """`OpTable.rotary` on [T, H, D]; the rows of x may be slices of a wider tensor."""
        dtype = DTYPES.get(x.dtype)
        if dtype is None:
            return self._reference.rotary(x, cos, sin, interleaved)
        x = _heads(x)
        cos, sin = cos.to(torch.float32).contiguous(), sin.to(torch.float32).contiguous()
        num_tokens, num_heads, head_size = x.shape
        assert cos.shape == sin.shape and cos.shape[0] == num_tokens
        out = torch.empty(x.shape, dtype=x.dtype)
        status = self._rotary(
            self._context,
            dtype,
            x.data_ptr(),
            num_tokens,
            num_heads,
            head_size,
            x.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            interleaved,
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "rotary")
        return out

    def gated_activation(self, gate_up: Tensor, kind: str) -> Tensor:
        """`OpTable.gated_activation`."""
        dtype = DTYPES.get(gate_up.dtype)
        if dtype is None or kind not in _ACTIVATIONS:
            return self._reference.gated_activation(gate_up, kind)
        gate_up = gate_up.contiguous()
        num_tokens, width = gate_up.shape
        out = torch.empty((num_tokens, width // 2), dtype=gate_up.dtype)
        status = self._gated_activation(
            self._context,
            dtype,
            _ACTIVATIONS[kind],
            gate_up.data_ptr(),
            num_tokens,
            width // 2,
            out.data_ptr(),
        )
        if status:
            raise_for_status(status, "gated_activation")
        return out

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """`OpTable.write_kv`; a slot outside the cache raises EngineError."""
        assert k_cache.is_contiguous() and v_cache.is_contiguous()
        assert k.dtype == k_cache.dtype and v.dtype == v_cache.dtype
        assert k.shape[1:] == k_cache.shape[2:] and k.shape == v.shape
        k, v = _heads(k), _heads(v)
        slot_mapping = slot_mapping.contiguous()
        size = k.element_size()
        status = self._write_kv(
            self._context,
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0) * size,
            v.stride(0) * size,
            k.shape[1] * k.shape[2] * size,
            slot_mapping.data_ptr(),
            k.shape[0],
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.shape[0] * k_cache.shape[1],
        )
        if status:
            raise_for_status(status, "write_kv")

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        layout: PagedLayout,
        params: AttentionParams,
    ) -> Tensor:
        """`OpTable.paged_attention`."""
        dtype = DTYPES.get(q.dtype)
        if dtype is None or k_cache.dtype != q.dtype or q.shape[2] > _MAX_HEAD_SIZE:
            return self._reference.paged_attention(q, k_cache, v_cache, layout, params)
        assert k_cache.is_contiguous() and v_cache.is_contiguous()
        assert v_cache.dtype == q.dtype and k_cache.shape == v_cache.shape
        q = _heads(q)
        prepared = self._attention_layout
        if prepared is None or prepared.layout is not layout:
            prepared = self._attention_layout = _AttentionLayout(layout)
        out = torch.empty(q.shape, dtype=q.dtype)
        call = AttentionCall(
            dtype=dtype,
            num_heads=q.shape[1],
            num_kv_heads=k_cache.shape[2],
            head_size=q.shape[2],
            q_stride=q.stride(0),
            num_rows=len(layout.context_lens),
            block_size=layout.block_size,
            max_blocks=prepared.block_tables.shape[1],
            num_blocks=k_cache.shape[0],
            window=params.window or 0,
            scale=params.scale,
            softcap=params.softcap or 0.0,
            q=q.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            row_offsets=ctypes.addressof(prepared.row_offsets),
            context_lens=ctypes.addressof(prepared.context_lens),
            block_tables=prepared.block_tables.data_ptr(),
            out=out.data_ptr(),
        )
        scratch = self._scratch(prepared, call)
        call.scratch = scratch.data_ptr() if scratch.numel() else None
        status = self._paged_attention(self._context, ctypes.byref(call))
        if status:
            raise_for_status(status, "paged_attention")
        return out

    def _scratch(self, prepared: _AttentionLayout, call: AttentionCall) -> Tensor:
        """Room for the partial results of one layout, shared by the layers (they run in turn)."""
        key = (call.num_heads, call.num_kv_heads, call.head_size)
        scratch = prepared.scratch.get(key)
        if scratch is None:
            nbytes = self._library.qs_attention_scratch_bytes(self._context, ctypes.byref(call))
            scratch = prepared.scratch[key] = torch.empty(nbytes, dtype=torch.uint8)
        return scratch


_MAX_HEAD_SIZE = 256


def _rows(x: Tensor) -> Tensor:
    """[T, C] with contiguous rows: itself, or a copy."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _heads(x: Tensor) -> Tensor:
    """[T, H, D] whose tokens are contiguous (any stride between them): itself, or a copy."""
    _, heads, size = x.shape
    whole = x.stride(2) == 1 and (x.stride(1) == size or heads == 1)
    return x if whole else x.contiguous()
