"""What a recording is made on: the calls so far, and placeholder tensors for their results.

Owned by `ops.native.recorder`. A `StepTensor` is a place in a buffer and a shape, with no memory
behind it. It can be viewed, added to another and scaled; anything else that is asked of it raises
NotCapturable, and so does an operand that a call could not read as it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from quickstep.ops.dtypes import INT64, DType, host_dtype
from quickstep.ops.native.packed import kernel_dtype
from quickstep.ops.native.step_abi import OpKind, RowsOf
from quickstep.ops.recording import Buffer, Numbers, Operand, OpRecord

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quickstep.ops.host_tensor import HostTensor

__all__ = ["NUM_ROWS", "NotCapturable", "StepTensor", "Tape"]

NUM_ROWS = 2  # what a shape says; one would let a wrong distance between rows pass unseen


class NotCapturable(Exception):
    """The forward pass is more than a list of native calls; the message says where."""


class StepTensor:
    """Rows of a buffer: one per token, or per emitting row, of any step."""

    __slots__ = ("_tape", "buffer", "dtype", "offset", "shape", "strides")

    def __init__(
        self,
        tape: Tape,
        buffer: int,
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
        """How many dimensions it has."""
        return len(self.shape)

    def stride(self, dim: int) -> int:
        """Elements from one to the next along a dimension."""
        return self.strides[dim]

    @property
    def row_size(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    def is_contiguous(self) -> bool:
        """Whether its elements stand one after another."""
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

    def __getitem__(self, key: Any) -> StepTensor:
        """Columns of [T, C], `x[:, start:stop]`, or the rows of the tokens that emit."""
        if isinstance(key, StepTensor):
            return self._tape.take(key, self)
        is_columns = isinstance(key, tuple) and len(key) == 2 and key[0] == slice(None)
        if not is_columns or not isinstance(key[1], slice) or self.dim() != 2:
            raise NotCapturable("indexing that is no slice of every row")
        start, stop, step = key[1].indices(self.shape[1])
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
        inputs = (self._tape.whole(self), self._tape.whole(other))
        return self._tape.elementwise(OpKind.ADD, self, inputs)

    def __mul__(self, factor: object) -> StepTensor:
        if not isinstance(factor, (int, float)):
            raise NotCapturable("a product of tensors")
        return self._tape.elementwise(
            OpKind.SCALE, self, (self._tape.whole(self),), (float(factor),)
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked for by the interpreter and by libraries
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
    """Calls, buffers, and what must live as long as they do."""

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
        if not isinstance(x, StepTensor):
            raise NotCapturable("a tensor was computed outside the recorded calls")
        return x.buffer

    def operand(self, x: StepTensor) -> Operand:
        """The place of a tensor with a row per token, whose buffer the next op reads."""
        index = self.buffer_of(x)
        self.buffers[index].last = len(self.ops)
        return Operand(index, x.offset * x.dtype.itemsize)

    def whole(self, x: StepTensor) -> Operand:
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

    def fixed(self, x: Tensor | HostTensor, dtype: DType | torch.dtype | None = None) -> int:
        """The address of a weight or of a KV tensor."""
        is_other = dtype is not None and host_dtype(dtype) != host_dtype(x.dtype)
        if isinstance(x, StepTensor) or not x.is_contiguous() or is_other:
            raise NotCapturable("a weight is not a plain tensor of the activations' dtype")
        self.kept.append(x)
        return int(x.data_ptr())

    def rows_of(self, x: StepTensor) -> int:
        """Whether it has a row per token or per emitting row: `RowsOf`."""
        return self.buffers[self.buffer_of(x)].rows

    def elementwise(
        self,
        kind: int,
        x: StepTensor,
        inputs: tuple[Operand, ...],
        scalar: tuple[float, ...] = (),
    ) -> StepTensor:
        """Note a call that gives a tensor like `x`, element by element."""
        out = self.like(x)
        self.record(kind, x, inputs, (out,), Numbers(size=(x.row_size,), scalar=scalar))
        return out

    def take(self, ids: StepTensor, x: StepTensor) -> StepTensor:
        """Note a call that gives the emitting tokens' rows of what every token has."""
        is_emitting = ids.dtype == INT64 and self.rows_of(ids) == RowsOf.EMITTING
        if not is_emitting or x.strides[1:] != _packed(x.shape)[1:]:
            raise NotCapturable("tokens are chosen by other than whether they emit")
        inputs = (self.whole(ids), self.operand(x))
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
        outputs: Sequence[StepTensor] | tuple[int, ...],
        numbers: Numbers | None = None,
    ) -> None:
        """Note a call over the rows and in the dtype of `x`; an int output is an address."""
        places = tuple(one if isinstance(one, int) else self.operand(one) for one in outputs)
        dtype = kernel_dtype(x.dtype)
        if dtype is None and kind != OpKind.GATHER:
            raise NotCapturable(f"there are no native kernels for {x.dtype}")
        number = -1 if dtype is None else dtype
        self.ops.append(
            OpRecord(kind, number, self.rows_of(x), inputs, places, numbers or Numbers())
        )


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of contiguous elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
