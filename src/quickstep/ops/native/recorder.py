"""Records a model's forward pass as a list of native calls.

The model runs once, unchanged, on an op table whose ops compute nothing: each records its call on
the `Tape` and returns a `StepTensor`, a place in a buffer and a shape without memory. A
`StepTensor` can be viewed, added to another and scaled. Everything else raises NotCapturable, and
such a model runs eagerly: an operation of torch, an operand that a call could not read in place, a
tensor that is neither a weight nor the result of a recorded call. Nothing here depends on the
number of tokens in a step.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from msgspec.structs import replace

from quickstep.ops.kv_pairs import sizes_of_keys
from quickstep.ops.native.attention import MAX_HEAD_SIZE
from quickstep.ops.native.experts import MAX_PER_TOKEN, PackedExperts
from quickstep.ops.native.library import (
    ACTIVATIONS,
    EXPERT_ACTIVATIONS,
    UNGATED,
    OpKind,
    RowsOf,
    StreamsKind,
)
from quickstep.ops.native.packed import (
    PackedQuantized,
    PackedWeight,
    kernel_dtype,
    kv_kernel_dtype,
)
from quickstep.ops.native.program import Buffer, Numbers, Operand, OpRecord, Recording
from quickstep.ops.native.ranks import NativeRanks
from quickstep.ops.native.states import (
    MAX_CONV_WIDTH,
    MAX_DELTA_GROUP,
    MAX_DELTA_SIZE,
    mamba_call,
)
from quickstep.ops.native.streams import MAX_STREAMS
from quickstep.ops.table import (
    AttentionParams,
    DeltaWeights,
    ExpertLoRA,
    ExpertParts,
    ExpertWeights,
    LatentOps,
    LoRAMapping,
    MambaWeights,
    OpTable,
    PagedLayout,
    Routing,
    RoutingRule,
    ShortConvWeights,
    StateRows,
    StreamOps,
)
from quickstep.ops.tensors import FLOAT32, INT32, INT64, AnyTensor, DType, host_dtype
from quickstep.ops.weights import HeadWeight, LinearWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NUM_ROWS = 2  # in a shape; with one row, a wrong distance between rows would not be noticed


class NotCapturable(Exception):
    """The forward pass is more than a list of native calls; the message says where."""


class StepTensor:
    """Rows of a buffer: one per token, or per emitting row, of any step.

    Without a buffer, it can be recognized but not read.
    """

    __slots__ = ("_tape", "buffer", "dtype", "offset", "shape", "strides")

    def __init__(
        self,
        tape: Tape,
        buffer: int | None,
        dtype: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int = 0,
    ) -> None:
        self._tape = tape
        self.buffer = buffer
        self.dtype = dtype
        self.shape = shape
        self.strides = strides  # in elements, as `offset`
        self.offset = offset

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def stride(self, dim: int) -> int:
        """Elements from one to the next along a dimension."""
        return self.strides[dim]

    @property
    def row_size(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    def is_contiguous(self) -> bool:
        """Whether its elements are in order and without gaps."""
        return self.strides == _packed(self.shape)

    def view(self, *shape: int) -> StepTensor:
        """The same elements, every row in another shape."""
        tail = shape[1:]
        rows_stay = shape[0] in (-1, NUM_ROWS) and math.prod(tail) == self.row_size
        if not rows_stay or self.strides[1:] != _packed(self.shape)[1:]:
            raise NotCapturable("a view crosses the tokens of a step")
        strides = (self.strides[0], *_packed((1, *tail))[1:])
        return StepTensor(
            self._tape, self.buffer, self.dtype, (NUM_ROWS, *tail), strides, self.offset
        )

    reshape = view

    def __getitem__(self, key: object) -> StepTensor:
        """Columns of [T, C], `x[:, start:stop]`, or the rows of the tokens that emit."""
        if isinstance(key, StepTensor):
            return self._tape.take(key, self)
        match key:
            case (slice() as rows, slice() as columns) if rows == slice(None) and self.dim() == 2:
                start, stop, step = columns.indices(self.shape[1])
            case _:
                raise NotCapturable("indexing that is no slice of every row")
        if step != 1 or stop <= start:
            raise NotCapturable("a slice that leaves columns out")
        shape, offset = (NUM_ROWS, stop - start), self.offset + start
        return StepTensor(self._tape, self.buffer, self.dtype, shape, self.strides, offset)

    def __add__(self, other: object) -> StepTensor:
        is_like = isinstance(other, StepTensor) and (other.dtype, other.shape) == (
            self.dtype,
            self.shape,
        )
        if not isinstance(other, StepTensor) or not is_like:
            raise NotCapturable("a sum of unlike tensors")
        inputs = (self._tape.contiguous(self), self._tape.contiguous(other))
        return self._tape.elementwise(OpKind.ADD, self, inputs)

    def __mul__(self, factor: object) -> StepTensor:
        if not isinstance(factor, (int, float)):
            raise NotCapturable("a product of tensors")
        return self._tape.elementwise(
            OpKind.SCALE, self, (self._tape.contiguous(self),), (float(factor),)
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # looked up by the interpreter and by libraries
            raise AttributeError(name)
        raise NotCapturable(f"{name} is not a native call")

    @classmethod
    def __torch_function__(cls, func: Any, *_: object) -> NoReturn:
        """What torch calls for its functions over one of these."""
        raise NotCapturable(f"{func.__name__} is not a native call")

    def _refused(self, *_: object) -> NoReturn:
        raise NotCapturable("arithmetic that is not a native call")

    __sub__ = __truediv__ = __pow__ = __neg__ = __matmul__ = _refused
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _refused
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __setitem__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __float__ = __int__ = __iter__ = _refused
    __array__ = _refused


class Tape:
    """Calls, buffers, and `kept`: objects that must live as long as they do."""

    def __init__(self) -> None:
        self.ops: list[OpRecord] = []
        self.buffers: list[Buffer] = []
        self.kept: list[object] = []

    def new(self, tail: Sequence[int], dtype: DType, rows: int) -> StepTensor:
        """A tensor of a new buffer, which the next op fills."""
        shape, now = (NUM_ROWS, *tail), len(self.ops)
        self.buffers.append(Buffer(math.prod(tail) * dtype.itemsize, rows, now, now))
        return StepTensor(self, len(self.buffers) - 1, dtype, shape, _packed(shape))

    def like(self, x: StepTensor) -> StepTensor:
        """A tensor of a new buffer, in the shape and type of this one."""
        return self.new(x.shape[1:], x.dtype, self.rows_of(x))

    def buffer_of(self, x: object) -> int:
        """Which buffer it is in."""
        if not isinstance(x, StepTensor) or x.buffer is None:
            raise NotCapturable("a tensor was computed outside the recorded calls")
        return x.buffer

    def operand(self, x: StepTensor) -> Operand:
        """The place of a tensor with a row per token, whose buffer the next op reads."""
        index = self.buffer_of(x)
        self.buffers[index].last = len(self.ops)
        return Operand(index, x.offset * x.dtype.itemsize)

    def contiguous(self, x: StepTensor) -> Operand:
        """The place of a contiguous tensor."""
        place = self.operand(x)
        if not x.is_contiguous():
            raise NotCapturable("an op would have to copy its input")
        return place

    def heads(self, x: StepTensor) -> Operand:
        """The place of [T, H, D] whose tokens are contiguous."""
        place = self.operand(x)
        if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
            raise NotCapturable("an op would have to copy its heads")
        return place

    def fixed(self, x: AnyTensor, dtype: DType | torch.dtype | None = None) -> int:
        """The address of a weight or of a KV tensor."""
        is_other = dtype is not None and host_dtype(dtype) != host_dtype(x.dtype)
        if isinstance(x, StepTensor) or not x.is_contiguous() or is_other:
            raise NotCapturable("a weight is not a plain tensor of the activations' dtype")
        self.kept.append(x)
        return int(x.data_ptr())

    def rows_of(self, x: StepTensor) -> int:
        """Whether it has a row per token or per emitting row: `RowsOf`."""
        return self.buffers[self.buffer_of(x)].rows

    def keep_inputs(self) -> None:
        """Keep the memory that the last op reads until the next one, which may run with it."""
        for place in self.ops[-1].inputs:
            if isinstance(place, Operand):
                self.buffers[place.buffer].last = len(self.ops)

    def elementwise(
        self,
        kind: int,
        x: StepTensor,
        inputs: tuple[Operand, ...],
        scalar: tuple[float, ...] = (),
    ) -> StepTensor:
        """Record a call whose result is like `x`, element by element."""
        out = self.like(x)
        self.record(kind, x, inputs, (out,), Numbers(size=(x.row_size,), scalar=scalar))
        return out

    def take(self, ids: StepTensor, x: StepTensor) -> StepTensor:
        """Record a call that selects the rows of the emitting tokens."""
        is_emitting = ids.dtype == INT64 and self.rows_of(ids) == RowsOf.EMITTING
        if not is_emitting or x.strides[1:] != _packed(x.shape)[1:]:
            raise NotCapturable("tokens are chosen by other than whether they emit")
        inputs = (self.contiguous(ids), self.operand(x))
        out = self.new(x.shape[1:], x.dtype, RowsOf.EMITTING)
        row_bytes, distance = (n * x.dtype.itemsize for n in (x.row_size, x.stride(0)))
        numbers = Numbers(size=(row_bytes,), stride=(distance,))
        self.record(OpKind.TAKE, out, inputs, (out,), numbers)
        return out

    def record(
        self,
        kind: int,
        x: StepTensor,
        inputs: tuple[Operand | int, ...],
        outputs: Sequence[StepTensor | int],
        numbers: Numbers | None = None,
    ) -> None:
        """Record a call over the rows and in the dtype of `x`; an int output is an address."""
        places = tuple(
            output if isinstance(output, int) else self.operand(output) for output in outputs
        )
        dtype = kernel_dtype(x.dtype)
        if dtype is None and kind not in (OpKind.GATHER, OpKind.LOCAL_IDS):
            raise NotCapturable(f"there are no native kernels for {x.dtype}")
        number = -1 if dtype is None else dtype
        self.ops.append(
            OpRecord(kind, number, self.rows_of(x), inputs, places, numbers or Numbers())
        )


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of contiguous elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class NativeRecorder:
    """One recording: let the model run on `table`, then `finish`."""

    def __init__(self, block_size: int) -> None:
        self._tape = Tape()
        self._token_ids = self._tape.new((), INT64, RowsOf.TOKENS)
        self._positions = self._tape.new((), INT64, RowsOf.TOKENS)
        self._emitting = self._tape.new((), INT64, RowsOf.EMITTING)
        self._layout = PagedLayout(
            positions=_as_tensor(self._positions),
            slot_mapping=_as_tensor(self._unread(INT64)),
            row_offsets=(),
            context_lens=(),
            block_tables=_as_tensor(self._unread(INT32)),
            block_size=block_size,
        )
        self._lora, self._emitting_lora = LoRAMapping(()), LoRAMapping(())
        self._state_rows = StateRows()
        self._features: list[StepTensor] = []
        self._emitting_layout = replace(
            self._layout, row_offsets=tuple(range(NUM_ROWS + 1)), context_lens=(1,) * NUM_ROWS
        )

    def _unread(self, dtype: DType) -> StepTensor:
        """A tensor of the layout, which ops only compare with the one that they expect."""
        return StepTensor(self._tape, None, dtype, (NUM_ROWS,), (1,))

    @property
    def token_ids(self) -> Tensor:
        """What `forward` gets as token ids."""
        return _as_tensor(self._token_ids)

    @property
    def layout(self) -> PagedLayout:
        """What `forward` gets as layout."""
        return self._layout

    @property
    def emitting(self) -> tuple[Tensor, PagedLayout]:
        """The tokens that emit, and their layout: what `forward` gets, or indexes its result by."""
        return _as_tensor(self._emitting), self._emitting_layout

    @property
    def lora(self) -> tuple[LoRAMapping, LoRAMapping]:
        """Adapters that each run decides, of a step's tokens and of the emitting ones: what
        `forward` gets where rows may have adapters.
        """
        return self._lora, self._emitting_lora

    @property
    def state_rows(self) -> StateRows:
        """What the rows do with states, which each run decides."""
        return self._state_rows

    def features(self, num_elements: int, dtype: DType) -> Tensor:
        """The next of what `forward` gets as features, [T, num_elements]; requested before it
        runs.
        """
        self._features.append(self._tape.new((num_elements,), dtype, RowsOf.TOKENS))
        return _as_tensor(self._features[-1])

    def table(self, ops: OpTable) -> OpTable:
        """An op table that records; weights must be packed by `ops`."""
        calls: Any = self  # its tensors are `StepTensor`s in place of torch's

        def pack(*_: object) -> NoReturn:
            raise NotCapturable("a weight is packed within the step")

        return OpTable(
            name=ops.name,
            pack_linear=pack,
            pack_quantized=pack,
            quantize=ops.quantize,
            linear=calls._linear,
            pack_lora=pack,
            add_lora_=calls._add_lora_,
            embedding=calls._embedding,
            rms_norm=calls._rms_norm,
            add_rms_norm=calls._add_rms_norm,
            rotary=calls._rotary,
            write_kv=calls._write_kv,
            paged_attention=calls._paged_attention,
            move_kv=ops.move_kv,
            gated_activation=calls._gated_activation,
            layer_norm=calls._layer_norm,
            add_layer_norm=calls._add_layer_norm,
            activation=calls._activation,
            logits=calls._logits,
            scratch_bytes=ops.scratch_bytes,
            route=calls._route,
            experts=calls._experts,
            gate=calls._gate,
            short_conv=calls._short_conv,
            gated_delta=calls._gated_delta,
            mamba=calls._mamba,
            streams=StreamOps(
                calls._spread,
                calls._mix,
                calls._correct,
                calls._add_to_streams,
                calls._match,
                calls._cut,
            ),
            row_ids=calls._row_ids,
            latent=LatentOps(pack, calls._latent_keys, calls._latent_queries, calls._latent_values),
            ranks=None if ops.ranks is None else cast("Any", _RecordedRanks(self._tape, ops.ranks)),
        )

    def finish(
        self, hidden: Tensor, logits: AnyTensor | None, aux_hidden: Sequence[Tensor] = ()
    ) -> Recording:
        """The recording of a model's calls, whose results are `hidden`, `logits` and `aux_hidden`,
        inputs of layers or of the next stage.
        """
        token_ids, positions, emitting, final = (
            self._tape.buffer_of(x)
            for x in (self._token_ids, self._positions, self._emitting, hidden)
        )
        scores = None if logits is None else self._tape.buffer_of(logits)
        aux = tuple(map(self._tape.buffer_of, aux_hidden))
        results = (final, *aux) if scores is None else (final, scores, *aux)
        for index in (token_ids, positions, emitting, *results):
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
            features=tuple(map(self._tape.buffer_of, self._features)),
            aux_hidden=aux,
        )

    # -- the ops ----------------------------------------------------------------------------------

    def _linear(self, x: StepTensor, weight: LinearWeight) -> StepTensor:
        packed = weight.data
        is_native = isinstance(packed, PackedQuantized) or (
            isinstance(packed, PackedWeight) and packed.dtype == x.dtype
        )
        if not is_native or x.stride(1) != 1:
            raise NotCapturable("a weight has no native kernel for these activations")
        kind = OpKind.QUANTIZED if isinstance(packed, PackedQuantized) else OpKind.LINEAR
        inputs = (self._tape.operand(x), self._handle(weight))
        out = self._tape.new((weight.num_outputs,), x.dtype, self._tape.rows_of(x))
        self._tape.record(kind, x, inputs, (out,), Numbers(stride=(x.stride(0),)))
        return out

    def _add_lora_(self, y: StepTensor, x: StepTensor, module: int, mapping: LoRAMapping) -> None:
        if mapping is not self._mapping(x):
            raise NotCapturable("adapters of other tokens than the step's")
        is_embedding = x is self._token_ids
        if x.stride(-1) != 1 or not (is_embedding or x.dtype == y.dtype):
            raise NotCapturable("an adapter would have to copy its input")
        inputs = (self._tape.operand(x), self._tape.contiguous(y))
        size = (module, 0 if is_embedding else x.shape[1], y.shape[1])
        numbers = Numbers(size=size, stride=(x.stride(0),), option=int(is_embedding))
        self._tape.record(OpKind.LORA, y, inputs, (y,), numbers)

    def _handle(self, weight: LinearWeight) -> int:
        packed = weight.data
        assert isinstance(packed, (PackedWeight, PackedQuantized))
        self._tape.kept.append(packed)
        return packed.handle

    def _embedding(
        self, token_ids: StepTensor, weight: AnyTensor | LinearWeight, dtype: DType | torch.dtype
    ) -> StepTensor:
        rows_dtype = host_dtype(dtype)
        if rows_dtype is None:
            raise NotCapturable(f"there are no native kernels for {dtype}")
        if not isinstance(weight, LinearWeight):
            return self._gather(token_ids, weight, rows_dtype)
        packed = weight.data
        if not isinstance(packed, (PackedWeight, PackedQuantized)):
            raise NotCapturable("the embedding is not packed by the native ops")
        kind = OpKind.QUANTIZED_ROWS if isinstance(packed, PackedQuantized) else OpKind.LINEAR_ROWS
        inputs = (self._tape.contiguous(token_ids), self._handle(weight))
        out = self._tape.new((weight.num_inputs,), rows_dtype, self._tape.rows_of(token_ids))
        self._tape.record(kind, out, inputs, (out,))
        return out

    def _gather(self, ids: StepTensor, table: AnyTensor, dtype: DType) -> StepTensor:
        """Rows of a weight [rows, C]."""
        num_rows, width = table.shape
        inputs = (self._tape.contiguous(ids), self._tape.fixed(table, dtype))
        out = self._tape.new((width,), dtype, self._tape.rows_of(ids))
        size = (num_rows, width * dtype.itemsize)
        self._tape.record(OpKind.GATHER, ids, inputs, (out,), Numbers(size=size))
        return out

    def _rms_norm(self, x: StepTensor, weight: AnyTensor, eps: float, offset: float) -> StepTensor:
        if x.stride(-1) != 1:
            raise NotCapturable("a norm would have to copy its input")
        inputs = (self._tape.operand(x), self._tape.fixed(weight, x.dtype))
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        out = self._tape.like(x)
        size, stride = (inner, x.shape[-1]), (x.stride(0), inner_stride)
        numbers = Numbers(size=size, stride=stride, scalar=(eps, offset))
        self._tape.record(OpKind.RMS_NORM, x, inputs, (out,), numbers)
        return out

    def _add_rms_norm(
        self, x: StepTensor, residual: StepTensor, weight: AnyTensor, eps: float, offset: float
    ) -> tuple[StepTensor, StepTensor]:
        inputs = (
            self._tape.contiguous(x),
            self._tape.contiguous(residual),
            self._tape.fixed(weight, x.dtype),
        )
        out, total = self._tape.like(x), self._tape.like(x)
        size, scalar = (x.shape[-1],), (eps, offset)
        self._tape.record(
            OpKind.ADD_NORM, x, inputs, (out, total), Numbers(size=size, scalar=scalar)
        )
        return out, total

    def _layer_norm(
        self, x: StepTensor, weight: AnyTensor, bias: AnyTensor | None, eps: float, offset: float
    ) -> StepTensor:
        if x.stride(-1) != 1:
            raise NotCapturable("a norm would have to copy its input")
        shifted = 0 if bias is None else self._tape.fixed(bias, x.dtype)
        inputs = (self._tape.operand(x), 0, self._tape.fixed(weight, x.dtype), shifted)
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        out, width = self._tape.like(x), x.shape[-1]
        numbers = Numbers(
            size=(inner, width, width), stride=(x.stride(0), inner_stride), scalar=(eps, offset)
        )
        self._tape.record(OpKind.LAYER_NORM, x, inputs, (out,), numbers)
        return out

    def _add_layer_norm(
        self,
        x: StepTensor,
        residual: StepTensor,
        weight: AnyTensor,
        bias: AnyTensor | None,
        eps: float,
        offset: float,
    ) -> tuple[StepTensor, StepTensor]:
        inputs = (
            self._tape.contiguous(x),
            self._tape.contiguous(residual),
            self._tape.fixed(weight, x.dtype),
            0 if bias is None else self._tape.fixed(bias, x.dtype),
        )
        out, total, width = self._tape.like(x), self._tape.like(x), x.shape[-1]
        numbers = Numbers(size=(1, width, width), stride=(width, 0), scalar=(eps, offset))
        self._tape.record(OpKind.LAYER_NORM, x, inputs, (out, total), numbers)
        return out, total

    def _activation(self, x: StepTensor, factor: StepTensor | None, kind: str) -> StepTensor:
        if kind not in UNGATED:
            raise NotCapturable(f"there is no native {kind} without a gate")
        strides = [tensor.stride(1) for tensor in (x, factor) if tensor is not None]
        if strides != [1] * len(strides):
            raise NotCapturable("an activation would have to copy its input")
        inputs = (self._tape.operand(x), 0 if factor is None else self._tape.operand(factor))
        width = x.shape[1]
        out = self._tape.new((width,), x.dtype, self._tape.rows_of(x))
        stride = (x.stride(0), 0 if factor is None else factor.stride(0))
        numbers = Numbers(size=(width,), stride=stride, option=UNGATED[kind])
        self._tape.record(OpKind.ACTIVATION, x, inputs, (out,), numbers)
        return out

    def _rotary(
        self, x: StepTensor, cos: StepTensor, sin: StepTensor, interleaved: bool
    ) -> StepTensor:
        if cos.dtype != FLOAT32 or sin.dtype != FLOAT32:
            raise NotCapturable("the rotary tables are not float32")
        inputs = (self._tape.heads(x), self._tape.contiguous(cos), self._tape.contiguous(sin))
        if self._tape.ops[-1].kind == OpKind.ROTARY:
            self._tape.keep_inputs()  # of the queries: the keys may be turned in the same loop
        out = self._tape.like(x)
        size = (x.shape[1], x.shape[2], cos.shape[1])
        numbers = Numbers(size=size, stride=(x.stride(0),), option=int(interleaved))
        self._tape.record(OpKind.ROTARY, x, inputs, (out,), numbers)
        return out

    def _gated_activation(self, gate_up: StepTensor, kind: str) -> StepTensor:
        if kind not in ACTIVATIONS:
            raise NotCapturable(f"there is no native {kind}")
        width = gate_up.shape[1] // 2
        inputs = (self._tape.contiguous(gate_up),)
        self._tape.keep_inputs()
        out = self._tape.new((width,), gate_up.dtype, self._tape.rows_of(gate_up))
        option = ACTIVATIONS[kind]
        self._tape.record(
            OpKind.GATED, gate_up, inputs, (out,), Numbers(size=(width,), option=option)
        )
        return out

    def _write_kv(
        self,
        k: StepTensor,
        v: StepTensor | None,
        k_cache: AnyTensor,
        v_cache: AnyTensor | None,
        slot_mapping: Tensor,
    ) -> None:
        if slot_mapping is not self._layout.slot_mapping:
            raise NotCapturable("KV is written to other slots than the step's")
        caches, kv_dtype = self._caches(k_cache, v_cache)
        sizes = sizes_of_keys(k_cache)
        num_slots = sizes.num_blocks * sizes.block_size
        self._tape.record(
            OpKind.WRITE_KV,
            k,
            (self._tape.heads(k), 0 if v is None else self._tape.heads(v)),
            caches,
            Numbers(
                size=(k.shape[1], k.shape[2], num_slots),
                stride=(k.stride(0), 0 if v is None else v.stride(0)),
                option=kv_dtype,
            ),
        )

    def _caches(self, k_cache: AnyTensor, v_cache: AnyTensor | None) -> tuple[tuple[int, int], int]:
        """The addresses of a layer's caches (0 for none), and how they hold heads."""
        kv_dtype = kv_kernel_dtype(k_cache)
        if kv_dtype is None:
            raise NotCapturable(f"there is no native KV cache of {k_cache.dtype}")
        values = 0 if v_cache is None else self._tape.fixed(v_cache, k_cache.dtype)
        return (self._tape.fixed(k_cache), values), kv_dtype

    def _paged_attention(
        self,
        q: StepTensor,
        k_cache: AnyTensor,
        v_cache: AnyTensor | None,
        layout: PagedLayout,
        params: AttentionParams,
        sinks: AnyTensor | None,
    ) -> StepTensor:
        is_emitting = self._tape.rows_of(q) == RowsOf.EMITTING
        expected = self._emitting_layout if is_emitting else self._layout
        if layout is not expected or q.shape[2] > MAX_HEAD_SIZE:
            raise NotCapturable("attention over another layout, or over too wide heads")
        if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
            raise NotCapturable("attention has another number of sinks than of heads")
        caches, kv_dtype = self._caches(k_cache, v_cache)
        # 0 is the null of the native call
        sinks_at = 0 if sinks is None else self._tape.fixed(sinks, FLOAT32)
        inputs = (self._tape.heads(q), *caches, sinks_at)
        tail = (q.shape[1], params.value_size or q.shape[2])
        out = self._tape.new(tail, q.dtype, self._tape.rows_of(q))
        sizes = sizes_of_keys(k_cache)
        self._tape.record(
            OpKind.ATTENTION,
            q,
            inputs,
            (out,),
            Numbers(
                size=(
                    q.shape[1],
                    sizes.num_kv_heads,
                    q.shape[2],
                    sizes.num_blocks,
                    params.kernel_window,
                ),
                stride=(q.stride(0), params.value_size or 0),
                scalar=(params.scale, params.softcap or 0.0),
                option=kv_dtype,
            ),
        )
        return out

    def _route(
        self,
        scores: StepTensor,
        rule: RoutingRule,
        selection_bias: AnyTensor | None,
        factors: AnyTensor | None = None,
    ) -> Routing:
        per_token = rule.per_token
        if per_token > MAX_PER_TOKEN:
            raise NotCapturable("a token has more experts than the native kernel chooses")
        bias = 0 if selection_bias is None else self._tape.fixed(selection_bias, FLOAT32)
        of_experts = 0 if factors is None else self._tape.fixed(factors, FLOAT32)
        inputs = (self._tape.contiguous(scores), bias, of_experts)
        rows = self._tape.rows_of(scores)
        chosen = self._tape.new((per_token,), INT64, rows)
        weights = self._tape.new((per_token,), FLOAT32, rows)
        size = (scores.shape[1], per_token, rule.num_groups, rule.groups_per_token, rule.sigmoid)
        scalar = (rule.scale, rule.counted_per_group)
        numbers = Numbers(size=size, scalar=scalar, option=int(rule.normalise))
        self._tape.record(OpKind.ROUTE, scores, inputs, (chosen, weights), numbers)
        return Routing(_as_tensor(chosen), _as_tensor(weights))

    def _experts(
        self,
        x: StepTensor,
        routing: Routing,
        weights: ExpertWeights,
        activation: str,
        lora: ExpertLoRA | None,
        parts: ExpertParts | None,
    ) -> StepTensor:
        packed = weights.data
        if not isinstance(packed, PackedExperts) or not packed.takes(x.dtype):
            raise NotCapturable("the experts have no native kernels for these activations")
        if activation not in EXPERT_ACTIVATIONS:
            raise NotCapturable(f"there is no native {activation}")
        if lora is not None and lora.mapping is not self._mapping(x):
            raise NotCapturable("adapters of other tokens than the step's")
        if x.stride(1) != 1:
            raise NotCapturable("experts would have to copy their input")
        ranks, first_column = 0, 0
        if parts is not None:
            ranks, first_column = cast("_RecordedRanks", parts.ranks).handle, parts.own.start
        chosen, shares = cast("Any", (routing.chosen, routing.weights))
        inputs = (
            self._tape.operand(x),
            self._tape.contiguous(chosen),
            self._tape.contiguous(shares),
            packed.handle,
            ranks,
        )
        self._tape.kept.append(packed)
        tail = (weights.down_proj[0].num_outputs,)
        out = self._tape.new(tail, x.dtype, self._tape.rows_of(x))
        first_module = -1 if lora is None else lora.first_module
        numbers = Numbers(
            size=(chosen.shape[1], first_module, first_column, int(weights.weighs_inputs)),
            stride=(x.stride(0),),
            option=EXPERT_ACTIVATIONS[activation],
        )
        self._tape.record(OpKind.EXPERTS, x, inputs, (out,), numbers)
        return out

    def _gate(self, x: StepTensor, gates: StepTensor) -> StepTensor:
        if gates.stride(1) != 1 or gates.dtype != x.dtype:
            raise NotCapturable("a gate would have to copy its input")
        inputs = (self._tape.contiguous(x), self._tape.operand(gates))
        out = self._tape.like(x)
        numbers = Numbers(size=(x.shape[1], gates.shape[1]), stride=(gates.stride(0),))
        self._tape.record(OpKind.GATE, x, inputs, (out,), numbers)
        return out

    def _short_conv(
        self, x: StepTensor, weights: ShortConvWeights, states: AnyTensor, rows: StateRows
    ) -> StepTensor:
        width, num_channels = weights.taps.shape
        if rows is not self._state_rows or width > MAX_CONV_WIDTH or x.stride(1) != 1:
            raise NotCapturable("a convolution over other rows, or over too many tokens")
        bias = 0 if weights.bias is None else self._tape.fixed(weights.bias, FLOAT32)
        inputs = (self._tape.operand(x), self._tape.fixed(weights.taps, FLOAT32), bias)
        out = self._tape.new((num_channels,), x.dtype, self._tape.rows_of(x))
        size = (num_channels, width, *states.shape)
        numbers = Numbers(size=size, stride=(x.stride(0),))
        outputs = (out, self._tape.fixed(states, FLOAT32))
        self._tape.record(OpKind.SHORT_CONV, x, inputs, outputs, numbers)
        return out

    def _gated_delta(
        self, x: StepTensor, weights: DeltaWeights, states: AnyTensor, rows: StateRows
    ) -> StepTensor:
        (width, _), num_heads = weights.taps.shape, weights.rates.shape[0]
        key_size, value_size = weights.key_size, weights.norm.shape[0]
        is_large = max(key_size, value_size) > MAX_DELTA_SIZE or width > MAX_CONV_WIDTH
        if rows is not self._state_rows or x.stride(1) != 1 or is_large:
            raise NotCapturable("a delta rule over other rows, or of too large heads")
        if num_heads > MAX_DELTA_GROUP * weights.num_key_heads:
            raise NotCapturable("too many value heads share a key head")
        fixed = (weights.taps, weights.rates, weights.biases, weights.norm)
        addresses = [self._tape.fixed(part, FLOAT32) for part in fixed]
        inputs: tuple[Operand | int, ...] = (self._tape.operand(x), *addresses)
        out = self._tape.new((num_heads * value_size,), x.dtype, self._tape.rows_of(x))
        sizes = key_size + (value_size << 32)
        numbers = Numbers(
            size=(weights.num_key_heads, num_heads, *states.shape, sizes),
            stride=(x.stride(0), weights.shared_stride),
            scalar=(weights.eps,),
            option=width,
        )
        outputs = (out, self._tape.fixed(states, FLOAT32))
        self._tape.record(OpKind.DELTA, x, inputs, outputs, numbers)
        return out

    def _mamba(
        self, x: StepTensor, weights: MambaWeights, states: AnyTensor, rows: StateRows
    ) -> StepTensor:
        is_large = max(weights.head_size, weights.state_size) > MAX_DELTA_SIZE
        is_large = is_large or weights.taps.shape[0] > MAX_CONV_WIDTH
        if rows is not self._state_rows or x.stride(1) != 1 or is_large:
            raise NotCapturable("Mamba-2 over other rows, or of too large heads")
        parts = (weights.taps, weights.rates, weights.biases, weights.skips)
        for part in (*parts, weights.conv_bias, weights.norm):
            if part is not None:
                self._tape.fixed(part, FLOAT32)
        call = mamba_call(weights, x.stride(0))
        self._tape.kept.append(call)
        inputs = (self._tape.operand(x), ctypes.addressof(call))
        num_outputs = weights.rates.shape[0] * weights.head_size
        out = self._tape.new((num_outputs,), x.dtype, self._tape.rows_of(x))
        outputs = (out, self._tape.fixed(states, FLOAT32))
        numbers = Numbers(size=tuple(states.shape))
        self._tape.record(OpKind.MAMBA, x, inputs, outputs, numbers)
        return out

    def _spread(self, x: StepTensor, others: StepTensor) -> StepTensor:
        num_streams = 1 + others.shape[1] // x.shape[1]
        out = self._tape.new((num_streams * x.shape[1],), x.dtype, self._tape.rows_of(x))
        size = (num_streams, x.shape[1], 0)
        return self._record_streams(StreamsKind.SPREAD, x, (others, None), (0, 0), (out,), size)[0]

    def _mix(
        self, x: StepTensor, scores: StepTensor, weight: AnyTensor, active: int
    ) -> tuple[StepTensor, ...]:
        size = (scores.shape[1], x.shape[1] // scores.shape[1], active)
        fixed = (self._tape.fixed(weight, FLOAT32), 0)
        of_active = self._tape.new((size[1],), x.dtype, self._tape.rows_of(x))
        outputs = (self._tape.like(x), of_active)
        return self._record_streams(StreamsKind.MIX, x, (None, scores), fixed, outputs, size)

    def _correct(
        self,
        x: StepTensor,
        delta: StepTensor,
        scores: StepTensor,
        weight: AnyTensor,
        scale: AnyTensor | None,
        active: int,
    ) -> tuple[StepTensor, ...]:
        factors = 0 if scale is None else self._tape.fixed(scale, x.dtype)
        fixed = (self._tape.fixed(weight, FLOAT32), factors)
        size, out = (scores.shape[1], delta.shape[1], active), self._tape.like(x)
        outputs = (out, self._tape.like(delta))
        return self._record_streams(StreamsKind.CORRECT, x, (delta, scores), fixed, outputs, size)

    def _add_to_streams(self, x: StepTensor, delta: StepTensor) -> StepTensor:
        size = (x.shape[1] // delta.shape[1], delta.shape[1], 0)
        out = self._tape.like(x)
        return self._record_streams(StreamsKind.ADD, x, (delta, None), (0, 0), (out,), size)[0]

    def _record_streams(
        self,
        kind: int,
        x: StepTensor,
        parts: tuple[StepTensor | None, StepTensor | None],
        fixed: tuple[int, int],
        outputs: tuple[StepTensor, ...],
        size: tuple[int, ...],
    ) -> tuple[StepTensor, ...]:
        if size[0] > MAX_STREAMS:
            raise NotCapturable("a token has more streams than the native kernels mix")
        given = [0 if part is None else self._tape.contiguous(part) for part in parts]
        inputs = (self._tape.contiguous(x), *given, *fixed)
        numbers = Numbers(size=size, option=kind)
        self._tape.record(OpKind.STREAMS, x, inputs, outputs, numbers)
        return outputs

    def _match(self, x: StepTensor, like: StepTensor, total: StepTensor | None) -> StepTensor:
        if any(part is not None and part.stride(1) != 1 for part in (x, like, total)):
            raise NotCapturable("a magnitude would have to copy its input")
        sum_of = 0 if total is None else self._tape.operand(total)
        inputs = (self._tape.operand(x), self._tape.operand(like), sum_of)
        out = self._tape.new((x.shape[1],), x.dtype, self._tape.rows_of(x))
        size = (x.shape[1], 0 if total is None else total.stride(0))
        numbers = Numbers(size=size, stride=(x.stride(0), like.stride(0)))
        self._tape.record(OpKind.MATCH, x, inputs, (out,), numbers)
        return out

    def _cut(self, gate_up: StepTensor, num_deviations: float) -> StepTensor:
        inputs, out = (self._tape.contiguous(gate_up),), self._tape.like(gate_up)
        numbers = Numbers(size=(gate_up.shape[1] // 2,), scalar=(num_deviations,))
        self._tape.record(OpKind.CUT, gate_up, inputs, (out,), numbers)
        return out

    def _row_ids(self, ids: StepTensor, num_rows: int, vocab_size: int) -> StepTensor:
        inputs, out = (self._tape.contiguous(ids),), self._tape.like(ids)
        numbers = Numbers(size=(0, num_rows, vocab_size))
        self._tape.record(OpKind.LOCAL_IDS, ids, inputs, (out,), numbers)
        return out

    def _latent_keys(
        self,
        x: StepTensor,
        weight: AnyTensor,
        eps: float,
        cos: StepTensor,
        sin: StepTensor,
        interleaved: bool,
    ) -> StepTensor:
        if x.stride(1) != 1:
            raise NotCapturable("a norm would have to copy its input")
        turns = self._turns(cos, sin)
        inputs = (self._tape.operand(x), self._tape.fixed(weight, x.dtype), *turns)
        out = self._tape.new((1, x.shape[1]), x.dtype, self._tape.rows_of(x))
        size = (weight.shape[0], cos.shape[1])
        option = int(interleaved)
        numbers = Numbers(size=size, stride=(x.stride(0),), scalar=(eps,), option=option)
        self._tape.record(OpKind.LATENT_KEYS, x, inputs, (out,), numbers)
        return out

    def _latent_queries(
        self,
        q: StepTensor,
        weight: HeadWeight,
        cos: StepTensor,
        sin: StepTensor,
        interleaved: bool,
    ) -> StepTensor:
        turns = self._turns(cos, sin)
        return self._multiply_heads(q, weight, turns, cos.shape[1], int(interleaved))

    def _latent_values(self, x: StepTensor, weight: HeadWeight) -> StepTensor:
        return self._multiply_heads(x, weight, (0, 0), 0, 0)

    def _turns(self, cos: StepTensor, sin: StepTensor) -> tuple[Operand, Operand]:
        if cos.dtype != FLOAT32 or sin.dtype != FLOAT32:
            raise NotCapturable("the rotary tables are not float32")
        return self._tape.contiguous(cos), self._tape.contiguous(sin)

    def _multiply_heads(
        self,
        x: StepTensor,
        weight: HeadWeight,
        turns: tuple[Operand | int, Operand | int],
        half: int,
        option: int,
    ) -> StepTensor:
        packed = weight.data
        if not isinstance(packed, PackedWeight) or packed.dtype != x.dtype:
            raise NotCapturable("a weight of heads has no native kernel for these activations")
        self._tape.kept.append(packed)
        inputs = (self._tape.heads(x), packed.handle, *turns)
        tail = (weight.num_heads, weight.num_outputs + 2 * half)
        out = self._tape.new(tail, x.dtype, self._tape.rows_of(x))
        size, stride = (weight.num_heads, weight.num_outputs, half), (x.stride(0), x.shape[2])
        numbers = Numbers(size=size, stride=stride, option=option)
        self._tape.record(OpKind.HEAD_LINEAR, x, inputs, (out,), numbers)
        return out

    def _mapping(self, x: StepTensor) -> LoRAMapping:
        """The adapters of a tensor's tokens."""
        is_emitting = self._tape.rows_of(x) == RowsOf.EMITTING
        return self._emitting_lora if is_emitting else self._lora

    def _logits(
        self,
        hidden: StepTensor,
        weight: LinearWeight,
        divisor: float,
        softcap: float | None,
        lora: tuple[int, LoRAMapping] | None,
    ) -> StepTensor:
        product = self._linear(hidden, weight)
        if lora is not None:
            self._add_lora_(product, hidden, *lora)
        if product.dtype == FLOAT32 and divisor == 1.0 and softcap is None:
            return product
        out = self._tape.new(product.shape[1:], FLOAT32, self._tape.rows_of(product))
        scalar = (divisor, softcap or 0.0)
        inputs = (self._tape.contiguous(product),)
        size = (weight.num_outputs,)
        self._tape.record(OpKind.LOGITS, product, inputs, (out,), Numbers(size=size, scalar=scalar))
        return out


class _RecordedRanks:
    """Records what ranks exchange; `ops.table.Ranks`."""

    def __init__(self, tape: Tape, ranks: object) -> None:
        if not isinstance(ranks, NativeRanks):
            raise NotCapturable("the ranks do not meet in shared memory")
        self._tape = tape
        self._ranks = ranks

    @property
    def handle(self) -> int:
        """Of the group, which the tape keeps."""
        self._tape.kept.append(self._ranks)
        return self._ranks.handle

    def gather(self, x: StepTensor, own: range, num_columns: int) -> StepTensor:
        return self._columns(x, own, num_columns, for_first=False)

    def gather_logits(self, x: StepTensor, own: range, vocab_size: int) -> StepTensor:
        return self._columns(x, own, vocab_size, for_first=True)

    def _columns(self, x: StepTensor, own: range, num_columns: int, for_first: bool) -> StepTensor:
        item_bytes = x.dtype.itemsize
        out = self._tape.new((num_columns,), x.dtype, self._tape.rows_of(x))
        size = (x.row_size * item_bytes, own.start * item_bytes, num_columns * item_bytes)
        self._record(x, 0, out, size, int(for_first))
        return out

    def local_ids(self, token_ids: StepTensor, own: range, vocab_size: int) -> StepTensor:
        inputs = (self._tape.contiguous(token_ids),)
        out = self._tape.like(token_ids)
        size = (own.start, len(own), vocab_size)
        self._tape.record(OpKind.LOCAL_IDS, token_ids, inputs, (out,), Numbers(size=size))
        return out

    def gather_rows(self, x: StepTensor, token_ids: StepTensor, own: range) -> StepTensor:
        row_bytes = x.row_size * x.dtype.itemsize
        ids = self._tape.contiguous(token_ids)
        out = self._tape.like(x)
        self._record(x, ids, out, (row_bytes, 0, row_bytes, own.start, len(own)))
        return out

    def _record(
        self,
        x: StepTensor,
        ids: Operand | int,
        out: StepTensor,
        size: tuple[int, ...],
        option: int = 0,
    ) -> None:
        if x.stride(1) != 1:
            raise NotCapturable("a gather would have to copy its input")
        inputs = (self._tape.operand(x), self.handle, ids)
        stride = (x.stride(0) * x.dtype.itemsize,)
        numbers = Numbers(size=size, stride=stride, option=option)
        self._tape.record(OpKind.RANKS, x, inputs, (out,), numbers)


def _as_tensor(x: StepTensor) -> Tensor:
    """Typed as the activation of torch that it takes the place of in the code of a model.

    The one place where a type is not the truth: `__getattr__` refuses what a `StepTensor` lacks.
    """
    return cast("Tensor", x)
