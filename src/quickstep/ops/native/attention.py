"""The KV ops on libquickstep: new keys and values to their slots, and attention over them.

Part of `ops.native.kernels`. The caches may hold another dtype than the activations, or int8
quantized values (`ops.tensors`); types without a kernel go to the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from quickstep.ops.kv_pairs import in_pairs, sizes_of_keys
from quickstep.ops.native.library import (
    AttentionCall,
    KVMoveCall,
    KVWriteCall,
    TextAttentionCall,
    raise_for_status,
)
from quickstep.ops.native.packed import kernel_dtype, kv_kernel_dtype
from quickstep.ops.table import AttentionParams, KVCache, OpTable, PagedLayout
from quickstep.ops.tensors import (
    FLOAT32,
    INT32,
    UINT8,
    AnyTensor,
    HostTensor,
    host_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEAD_SIZE = 576  # QS_MAX_HEAD_SIZE
_KV_SLOTS, _KEY_PAIRS, _VALUE_PAIRS = range(3)  # qs_kv_part
_MAX_TEXT_HEAD_SIZE = 256  # QS_MAX_TEXT_HEAD_SIZE


class _AttentionLayout:
    """The arrays that one `PagedLayout` needs in C, made once and used by every layer."""

    __slots__ = (
        "block_tables",
        "context_lens",
        "layout",
        "row_offsets",
        "scratch",
        "tail_offsets",
        "tail_slots",
    )

    def __init__(self, layout: PagedLayout) -> None:
        assert host_dtype(layout.block_tables.dtype) == INT32
        self.layout = layout
        self.row_offsets = (ctypes.c_int64 * len(layout.row_offsets))(*layout.row_offsets)
        self.context_lens = (ctypes.c_int64 * len(layout.context_lens))(*layout.context_lens)
        self.block_tables = layout.block_tables.contiguous()
        self.scratch: dict[tuple[int, int, int, int], HostTensor] = {}
        offsets = tuple(accumulate(map(len, layout.tails), initial=0))
        self.tail_offsets = (ctypes.c_int64 * len(offsets))(*offsets)
        self.tail_slots = (ctypes.c_int64 * offsets[-1])(*chain.from_iterable(layout.tails))


class NativeAttention:
    """`OpTable.write_kv` and `OpTable.paged_attention` of one `qs_context`."""

    def __init__(
        self, library: ctypes.CDLL, context: int, reference: Callable[[], OpTable]
    ) -> None:
        self._context = context
        self._library = library
        self._reference = reference
        self._write_kv = library.qs_write_kv
        self._paged_attention = library.qs_paged_attention
        self._move_kv = library.qs_move_kv
        # The newest layout; one assignment replaces it, so a reader sees the old or the new one.
        self._layout: _AttentionLayout | None = None

    def text_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Sequence[int],
        scale: float,
        window: int | None,
    ) -> Tensor:
        """`OpTable.text_attention`."""
        dtype = kernel_dtype(q.dtype)
        num_tokens, num_heads, head_size = q.shape
        if dtype is None or head_size > _MAX_TEXT_HEAD_SIZE:
            from quickstep.ops.reference.text_attention import text_attention

            return text_attention(q, k, v, offsets, scale, window)
        assert offsets[-1] == num_tokens and k.shape == q.shape and v.shape == q.shape
        q, k, v = (heads_in_place(part) for part in (q, k, v))
        out = q.new_empty(q.shape)
        starts = (ctypes.c_int64 * len(offsets))(*offsets)
        call = TextAttentionCall(
            dtype=dtype,
            num_heads=num_heads,
            head_size=head_size,
            scale=scale,
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            num_texts=len(offsets) - 1,
            window=-1 if window is None else window,
            offsets=ctypes.addressof(starts),
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            out=out.data_ptr(),
        )
        status = self._library.qs_text_attention(self._context, ctypes.byref(call))
        if status:
            raise_for_status(status, "text_attention")
        return out

    def write_kv(
        self,
        k: Tensor,
        v: Tensor | None,
        k_cache: AnyTensor,
        v_cache: AnyTensor | None,
        slot_mapping: Tensor,
    ) -> None:
        """`OpTable.write_kv`; a slot outside the cache raises EngineError."""
        assert k_cache.is_contiguous() and (v is None) == (v_cache is None)
        if v is not None and v_cache is not None:
            assert v_cache.is_contiguous() and k.shape == v.shape
            assert k.dtype == v.dtype and k_cache.dtype == v_cache.dtype
        dtype, kv_dtype = kernel_dtype(k.dtype), kv_kernel_dtype(k_cache)
        if dtype is None or kv_dtype is None:
            self._reference().write_kv(k, v, k_cache, v_cache, slot_mapping)
            return
        sizes = sizes_of_keys(k_cache)
        assert k.shape[1:] == sizes[2:]
        k, v = heads_in_place(k), None if v is None else heads_in_place(v)
        slot_mapping = slot_mapping.contiguous()
        call = KVWriteCall(
            dtype=dtype,
            kv_dtype=kv_dtype,
            num_kv_heads=k.shape[1],
            head_size=k.shape[2],
            num_tokens=k.shape[0],
            num_slots=sizes.num_blocks * sizes.block_size,
            block_size=sizes.block_size,
            k_stride=k.stride(0),
            v_stride=0 if v is None else v.stride(0),
            k=k.data_ptr(),
            v=None if v is None else v.data_ptr(),
            slots=slot_mapping.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=None if v_cache is None else v_cache.data_ptr(),
        )
        status = self._write_kv(self._context, ctypes.byref(call))
        if status:
            raise_for_status(status, "write_kv")

    def move_kv(self, kv: KVCache, moves: Sequence[tuple[int, int]]) -> None:
        """`OpTable.move_kv`; a slot outside the cache raises EngineError."""
        flat = (ctypes.c_int64 * (2 * len(moves)))(*chain.from_iterable(moves))
        for keys, values in kv.by_shape():
            sizes = sizes_of_keys(keys[0])
            parts = (_KEY_PAIRS, _VALUE_PAIRS) if in_pairs(keys[0]) else (_KV_SLOTS, _KV_SLOTS)
            for part, caches in zip(parts, (keys, values), strict=True):
                assert all(cache.is_contiguous() for cache in caches)
                addresses = (ctypes.c_void_p * len(caches))(*[cache.data_ptr() for cache in caches])
                call = KVMoveCall(
                    part=part,
                    num_kv_heads=sizes.num_kv_heads,
                    head_size=sizes.head_size,
                    block_size=sizes.block_size,
                    num_caches=len(caches),
                    slot_bytes=keys[0].nbytes // (sizes.num_blocks * sizes.block_size),
                    num_slots=sizes.num_blocks * sizes.block_size,
                    num_moves=len(moves),
                    caches=ctypes.addressof(addresses),
                    moves=ctypes.addressof(flat),
                )
                status = self._move_kv(ctypes.byref(call))
                if status:
                    raise_for_status(status, "move_kv")

    def paged_attention(
        self,
        q: Tensor,
        k_cache: AnyTensor,
        v_cache: AnyTensor | None,
        layout: PagedLayout,
        params: AttentionParams,
        sinks: AnyTensor | None,
    ) -> Tensor:
        """`OpTable.paged_attention`."""
        dtype, kv_dtype = kernel_dtype(q.dtype), kv_kernel_dtype(k_cache)
        if dtype is None or kv_dtype is None or q.shape[2] > MAX_HEAD_SIZE:
            return self._reference().paged_attention(q, k_cache, v_cache, layout, params, sinks)
        assert k_cache.is_contiguous() and (v_cache is None) == (params.value_size is not None)
        if v_cache is not None:
            assert v_cache.is_contiguous()
            assert v_cache.dtype == k_cache.dtype and k_cache.nbytes == v_cache.nbytes
        sizes = sizes_of_keys(k_cache)
        assert q.shape[2] == sizes.head_size
        assert sinks is None or are_sinks(sinks, q.shape[1])
        q = heads_in_place(q)
        prepared = self._layout
        if prepared is None or prepared.layout is not layout:
            prepared = self._layout = _AttentionLayout(layout)
        out = q.new_empty((*q.shape[:2], params.value_size or q.shape[2]))
        call = AttentionCall(
            dtype=dtype,
            num_heads=q.shape[1],
            num_kv_heads=sizes.num_kv_heads,
            head_size=q.shape[2],
            kv_dtype=kv_dtype,
            value_size=params.value_size or 0,
            q_stride=q.stride(0),
            num_rows=len(layout.context_lens),
            block_size=layout.block_size,
            max_blocks=prepared.block_tables.shape[1],
            num_blocks=sizes.num_blocks,
            window=params.kernel_window,
            scale=params.scale,
            softcap=params.softcap or 0.0,
            q=q.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=None if v_cache is None else v_cache.data_ptr(),
            row_offsets=ctypes.addressof(prepared.row_offsets),
            context_lens=ctypes.addressof(prepared.context_lens),
            block_tables=prepared.block_tables.data_ptr(),
            tail_offsets=ctypes.addressof(prepared.tail_offsets) if layout.tails else None,
            tail_slots=ctypes.addressof(prepared.tail_slots) if layout.tails else None,
            sinks=None if sinks is None else sinks.data_ptr(),
            out=out.data_ptr(),
        )
        scratch = self._scratch(prepared, call)
        call.scratch = scratch.data_ptr() if scratch.nbytes else None
        status = self._paged_attention(self._context, ctypes.byref(call))
        if status:
            raise_for_status(status, "paged_attention")
        return out

    def _scratch(self, prepared: _AttentionLayout, call: AttentionCall) -> HostTensor:
        """Memory for the partial results of one layout, shared by the layers (they run in turn)."""
        key = (call.num_heads, call.num_kv_heads, call.head_size, call.value_size)
        scratch = prepared.scratch.get(key)
        if scratch is None:
            nbytes = self._library.qs_attention_scratch_bytes(self._context, ctypes.byref(call))
            scratch = prepared.scratch[key] = HostTensor.empty((nbytes,), UINT8)
        return scratch


def are_sinks(x: AnyTensor, num_heads: int) -> bool:
    """Whether the kernels can read it as the sinks of so many heads: [H] float32."""
    return tuple(x.shape) == (num_heads,) and host_dtype(x.dtype) == FLOAT32 and x.is_contiguous()


def heads_in_place(x: Tensor) -> Tensor:
    """[T, H, D] whose tokens are contiguous (any stride between them): itself, or a copy."""
    _, heads, size = x.shape
    in_place = x.stride(2) == 1 and (x.stride(1) == size or heads == 1)
    return x if in_place else x.contiguous()
