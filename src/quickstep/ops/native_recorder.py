"""Records a model's forward pass as a list of native calls.

The model runs once, as it always does, on an op table whose ops compute nothing: each notes its
call and hands out an empty tensor of two rows. What the model does beside its ops, a function mode
sees: views cost nothing, sums, multiples and table rows have calls of their own. Anything else,
and any tensor that is neither a weight nor the work of a recorded call, raises NotCapturable: such
a model runs eagerly. Nothing here depends on how many tokens a step has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quickstep.ops.native_attention import MAX_HEAD_SIZE
from quickstep.ops.native_packed import KV_DTYPES, PackedCodes, PackedWeight
from quickstep.ops.native_step_abi import OpKind, RowsOf
from quickstep.ops.native_tape import NUM_ROWS, NotCapturable, Tape
from quickstep.ops.recording import Numbers, Recording
from quickstep.ops.table import AttentionParams, LinearWeight, OpTable, PagedLayout

__all__ = ["NativeRecorder", "NotCapturable"]

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class _BesideOps(TorchFunctionMode):
    """Hands what torch is asked while a model is recorded to the recorder.

    Not a TorchDispatchMode: the first of those imports torch's compiler, which takes a second.
    """

    def __init__(self, recorder: NativeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._recorder.beside_ops(func, args, dict(kwargs or {}))


class NativeRecorder:
    """One recording. Use it as a context around the model's calls, then `finish`."""

    def __init__(self, block_size: int) -> None:
        self._tape = Tape()
        self._mode = _BesideOps(self)
        self._token_ids = self._tape.new((), torch.int64, RowsOf.TOKENS)
        self._positions = self._tape.new((), torch.int64, RowsOf.TOKENS)
        self._emitting = self._tape.new((), torch.int64, RowsOf.EMITTING)
        for inputs in (self._token_ids, self._positions, self._emitting):
            inputs.zero_()
        self._layout = PagedLayout(
            positions=self._positions,
            slot_mapping=torch.zeros(NUM_ROWS, dtype=torch.int64),
            row_offsets=(0, NUM_ROWS),
            context_lens=(NUM_ROWS,),
            block_tables=torch.zeros((1, 1), dtype=torch.int32),
            block_size=block_size,
        )
        self._emitting_layout = replace(
            self._layout, row_offsets=tuple(range(NUM_ROWS + 1)), context_lens=(1,) * NUM_ROWS
        )

    def __enter__(self) -> Self:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    @property
    def token_ids(self) -> Tensor:
        """What `forward` gets as token ids."""
        return self._token_ids

    @property
    def layout(self) -> PagedLayout:
        """What `forward` gets as layout."""
        return self._layout

    @property
    def emitting(self) -> tuple[Tensor, PagedLayout]:
        """The tokens that emit, and their layout: what `forward` gets, or indexes its result by."""
        return self._emitting, self._emitting_layout

    def table(self, ops: OpTable) -> OpTable:
        """An op table that records; weights must be packed by `ops`."""

        def pack(*_: object) -> LinearWeight:
            raise NotCapturable("a weight is packed within the step")

        return OpTable(
            name=ops.name,
            pack_linear=pack,
            pack_quantized=pack,
            quantize=ops.quantize,
            linear=self._linear,
            embedding=self._embedding,
            rms_norm=self._rms_norm,
            add_rms_norm=self._add_rms_norm,
            rotary=self._rotary,
            write_kv=self._write_kv,
            paged_attention=self._paged_attention,
            gated_activation=self._gated_activation,
            logits=self._logits,
            scratch_bytes=ops.scratch_bytes,
        )

    def finish(self, hidden: Tensor, logits: Tensor) -> Recording:
        """The recording, after the model's calls gave these."""
        token_ids, positions, emitting, final, scores = (
            self._tape.buffer_of(x)
            for x in (self._token_ids, self._positions, self._emitting, hidden, logits)
        )
        for index in (token_ids, positions, emitting, final, scores):
            self._tape.buffers[index].last = len(self._tape.ops)
        return Recording(
            ops=tuple(self._tape.ops),
            buffers=tuple(self._tape.buffers),
            token_ids=token_ids,
            positions=positions,
            emitting=emitting,
            hidden=final,
            logits=scores,
            weights=tuple(self._tape.kept),
        )

    # -- the ops ----------------------------------------------------------------------------------

    def _linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        packed = weight.data
        is_native = isinstance(packed, PackedCodes) or (
            isinstance(packed, PackedWeight) and packed.dtype == x.dtype
        )
        if not is_native or x.stride(1) != 1:
            raise NotCapturable("a weight has no native kernel for these activations")
        kind = OpKind.QUANTIZED if isinstance(packed, PackedCodes) else OpKind.LINEAR
        inputs = (self._tape.operand(x), self._handle(weight))
        out = self._tape.new((weight.num_outputs,), x.dtype, self._tape.rows_of(x))
        self._tape.record(kind, x, inputs, (out,), Numbers(stride=(x.stride(0),)))
        return out

    def _handle(self, weight: LinearWeight) -> int:
        packed = weight.data
        assert isinstance(packed, (PackedWeight, PackedCodes))
        self._tape.kept.append(packed)
        return packed.handle

    def _embedding(
        self, token_ids: Tensor, weight: Tensor | LinearWeight, dtype: torch.dtype
    ) -> Tensor:
        if isinstance(weight, Tensor):
            return self._gather(token_ids, weight, dtype)
        packed = weight.data
        if not isinstance(packed, (PackedWeight, PackedCodes)):
            raise NotCapturable("the embedding is not packed by the native ops")
        kind = OpKind.QUANTIZED_ROWS if isinstance(packed, PackedCodes) else OpKind.LINEAR_ROWS
        inputs = (self._tape.whole(token_ids), self._handle(weight))
        out = self._tape.new((weight.num_inputs,), dtype, self._tape.rows_of(token_ids))
        self._tape.record(kind, out, inputs, (out,))
        return out

    def _gather(self, ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of a weight [rows, C]."""
        inputs = (self._tape.whole(ids), self._tape.fixed(table, dtype))
        out = self._tape.new(table.shape[1:], table.dtype, self._tape.rows_of(ids))
        size = (table.shape[0], out.nbytes // NUM_ROWS)
        self._tape.record(OpKind.GATHER, ids, inputs, (out,), Numbers(size=size))
        return out

    def _take(self, ids: Tensor, x: Tensor) -> Tensor:
        """The emitting tokens' rows of what was computed for every token."""
        if ids is not self._emitting or not x[0].is_contiguous():
            raise NotCapturable("tokens are chosen by other than whether they emit")
        inputs = (self._tape.whole(ids), self._tape.operand(x))
        out = self._tape.new(x.shape[1:], x.dtype, self._tape.rows_of(ids))
        size, stride = (out.nbytes // NUM_ROWS,), (x.stride(0) * x.element_size(),)
        self._tape.record(OpKind.TAKE, out, inputs, (out,), Numbers(size=size, stride=stride))
        return out

    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        if x.stride(-1) != 1:
            raise NotCapturable("a norm would have to copy its input")
        inputs = (self._tape.operand(x), self._tape.fixed(weight, x.dtype))
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        out = self._tape.new(x.shape[1:], x.dtype, self._tape.rows_of(x))
        size, stride = (inner, x.shape[-1]), (x.stride(0), inner_stride)
        numbers = Numbers(size=size, stride=stride, scalar=(eps, offset))
        self._tape.record(OpKind.RMS_NORM, x, inputs, (out,), numbers)
        return out

    def _add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        inputs = (
            self._tape.whole(x),
            self._tape.whole(residual),
            self._tape.fixed(weight, x.dtype),
        )
        out, total = (self._tape.new(x.shape[1:], x.dtype, self._tape.rows_of(x)) for _ in range(2))
        size, scalar = (x.shape[-1],), (eps, offset)
        self._tape.record(
            OpKind.ADD_NORM, x, inputs, (out, total), Numbers(size=size, scalar=scalar)
        )
        return out, total

    def _rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        if cos.dtype != torch.float32 or sin.dtype != torch.float32:
            raise NotCapturable("the rotary tables are not float32")
        inputs = (self._tape.heads(x), self._tape.whole(cos), self._tape.whole(sin))
        out = self._tape.new(x.shape[1:], x.dtype, self._tape.rows_of(x))
        size = (x.shape[1], x.shape[2], cos.shape[1])
        numbers = Numbers(size=size, stride=(x.stride(0),), option=int(interleaved))
        self._tape.record(OpKind.ROTARY, x, inputs, (out,), numbers)
        return out

    def _gated_activation(self, gate_up: Tensor, kind: str) -> Tensor:
        if kind not in _ACTIVATIONS:
            raise NotCapturable(f"there is no native {kind}")
        width = gate_up.shape[1] // 2
        inputs = (self._tape.whole(gate_up),)
        out = self._tape.new((width,), gate_up.dtype, self._tape.rows_of(gate_up))
        option = _ACTIVATIONS[kind]
        self._tape.record(
            OpKind.GATED, gate_up, inputs, (out,), Numbers(size=(width,), option=option)
        )
        return out

    def _write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if slot_mapping is not self._layout.slot_mapping:
            raise NotCapturable("KV is written to other slots than the step's")
        caches, kv_dtype = self._caches(k_cache, v_cache)
        num_slots = k_cache.shape[0] * k_cache.shape[1]
        self._tape.record(
            OpKind.WRITE_KV,
            k,
            (self._tape.heads(k), self._tape.heads(v)),
            caches,
            Numbers(
                size=(k.shape[1], k.shape[2], num_slots),
                stride=(k.stride(0), v.stride(0)),
                option=kv_dtype,
            ),
        )

    def _caches(self, k_cache: Tensor, v_cache: Tensor) -> tuple[tuple[int, int], int]:
        """The addresses of a layer's caches, and how they hold heads."""
        kv_dtype = KV_DTYPES.get(k_cache.dtype)
        if kv_dtype is None:
            raise NotCapturable(f"there is no native KV cache of {k_cache.dtype}")
        return (self._tape.fixed(k_cache), self._tape.fixed(v_cache, k_cache.dtype)), kv_dtype

    def _paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        layout: PagedLayout,
        params: AttentionParams,
    ) -> Tensor:
        is_emitting = self._tape.rows_of(q) == RowsOf.EMITTING
        expected = self._emitting_layout if is_emitting else self._layout
        if layout is not expected or q.shape[2] > MAX_HEAD_SIZE:
            raise NotCapturable("attention over another layout, or over too wide heads")
        caches, kv_dtype = self._caches(k_cache, v_cache)
        inputs = (self._tape.heads(q), *caches)
        out = self._tape.new(q.shape[1:], q.dtype, self._tape.rows_of(q))
        num_blocks, _, num_kv_heads, _ = k_cache.shape
        self._tape.record(
            OpKind.ATTENTION,
            q,
            inputs,
            (out,),
            Numbers(
                size=(q.shape[1], num_kv_heads, q.shape[2], num_blocks, params.window or 0),
                stride=(q.stride(0),),
                scalar=(params.scale, params.softcap or 0.0),
                option=kv_dtype,
            ),
        )
        return out

    def _logits(
        self, hidden: Tensor, weight: LinearWeight, divisor: float, softcap: float | None
    ) -> Tensor:
        product = self._linear(hidden, weight)
        if product.dtype == torch.float32 and divisor == 1.0 and softcap is None:
            return product
        out = self._tape.new(product.shape[1:], torch.float32, self._tape.rows_of(product))
        scalar = (divisor, softcap or 0.0)
        inputs = (self._tape.whole(product),)
        size = (weight.num_outputs,)
        self._tape.record(OpKind.LOGITS, product, inputs, (out,), Numbers(size=size, scalar=scalar))
        return out

    # -- beside the ops ---------------------------------------------------------------------------

    def beside_ops(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch is asked: about no recorded tensor, of one's shape, a view, or a call."""
        recorded = [x for x in _tensors(args) if self._tape.is_recorded(x)]
        call = _CALLS.get(func)
        if recorded and call is not None and not kwargs:
            found = call(self, *args)
            if found is not None:
                return found
        versions = [x._version for x in recorded]
        result = func(*args, **kwargs)
        if not recorded or func.__name__ == "__get__" or func in _QUESTIONS:
            return result
        views = result if isinstance(result, (list, tuple)) else (result,)
        is_view = all(isinstance(x, Tensor) and self._tape.is_recorded(x) for x in views)
        if not is_view or versions != [x._version for x in recorded]:
            raise NotCapturable(f"{func.__name__} is not a native call")
        return result

    def _add(self, a: Tensor, b: Tensor) -> Tensor:
        if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            raise NotCapturable("a sum of unlike tensors")
        inputs = (self._tape.whole(a), self._tape.whole(b))
        out = self._tape.new(a.shape[1:], a.dtype, self._tape.rows_of(a))
        self._tape.record(OpKind.ADD, a, inputs, (out,), Numbers(size=(a.numel() // NUM_ROWS,)))
        return out

    def _scale(self, x: Tensor, factor: Any) -> Tensor:
        if isinstance(factor, Tensor) and (factor.dim() or self._tape.is_recorded(factor)):
            raise NotCapturable("a product of tensors")
        value = factor.item() if isinstance(factor, Tensor) else factor
        inputs = (self._tape.whole(x),)
        out = self._tape.new(x.shape[1:], x.dtype, self._tape.rows_of(x))
        size = (x.numel() // NUM_ROWS,)
        self._tape.record(
            OpKind.SCALE, x, inputs, (out,), Numbers(size=size, scalar=(float(value),))
        )
        return out

    def _index(self, table: Tensor, ids: Any) -> Tensor | None:
        """Rows of a weight or of a recorded tensor; None for a view of the latter."""
        if not isinstance(ids, Tensor):
            return None
        if self._tape.is_recorded(table):
            return self._take(ids, table)
        if ids.dtype != torch.int64 or table.dim() != 2:
            raise NotCapturable("indexing by other than token")
        return self._gather(ids, table, table.dtype)


_CALLS: Mapping[Any, Callable[..., Tensor | None]] = {
    Tensor.add: NativeRecorder._add,
    Tensor.__add__: NativeRecorder._add,
    Tensor.mul: NativeRecorder._scale,
    Tensor.__mul__: NativeRecorder._scale,
    Tensor.__getitem__: NativeRecorder._index,
}

# What does not depend on values.
_QUESTIONS = frozenset(
    (
        Tensor.data_ptr,
        Tensor.dim,
        Tensor.element_size,
        Tensor.is_contiguous,
        Tensor.numel,
        Tensor.size,
        Tensor.storage_offset,
        Tensor.stride,
        Tensor.untyped_storage,
    )
)


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    flat: list[Any] = []
    for one in args:
        flat.extend(one if isinstance(one, (list, tuple)) else (one,))
    return [x for x in flat if isinstance(x, Tensor)]
