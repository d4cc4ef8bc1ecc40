"""A `TensorSource` of some rows of each tensor, or of all of them in another order.

Used by the loader: a rank reads its own rows (`sharding`), and rows that a checkpoint mixes are put
in order (`ReorderedRows`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from quickstep.model.checkpoint.tensor_schema import decay_rates, delta_projections
from quickstep.model.decoder_spec import (
    FUSED_DELTA,
    GatedDelta,
    ModelSpec,
)
from quickstep.ops.tensors import AnyTensor, HostTensor, TensorT
from quickstep.ops.weights import QuantizedWeight, StoredMatrix, StoredRows

if TYPE_CHECKING:
    from quickstep.model.checkpoint.tensor_reader import TensorSource

# Rows of a tensor in order, and the number of all its rows.
NumberedRows = tuple[tuple[range, ...], int]
# How many rows tensors have in all; None of tensors that are complete.
NumRows = Callable[[Sequence[str]], int | None]


class ChosenRows(ABC):
    """The rows that `rows_of` names of the tensors of a source."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    @abstractmethod
    def rows_of(self, name: str) -> NumberedRows | None:
        """Which rows of one tensor, and how many there are; None for all as they are."""

    def tensor(self, name: str) -> AnyTensor:
        """The rows of one tensor."""
        return self.stacked((name,))

    def stacked(self, names: tuple[str, ...]) -> AnyTensor:
        """The rows of each, one below the other."""
        tensor = self._source.stacked(names)
        rows = self._rows(names)
        return tensor if rows is None else taken_rows(tensor, rows)

    def linear(self, names: tuple[str, ...]) -> AnyTensor | QuantizedWeight:
        """The rows of a matrix."""
        matrix = self._source.linear(names)
        rows = self._rows(names)
        if rows is None:
            return matrix
        if isinstance(matrix, QuantizedWeight):
            import torch

            return matrix.rows(torch.cat([torch.arange(part.start, part.stop) for part in rows]))
        return taken_rows(matrix, rows)

    def stored(self, names: tuple[str, ...], *, floating: bool = False) -> StoredMatrix | None:
        """The rows of a matrix in its files."""
        matrix = self._source.stored(names, floating=floating)
        rows = self._rows(names)
        return matrix if matrix is None or rows is None else stored_rows(matrix, rows)

    def num_rows(self, names: Sequence[str]) -> int | None:
        """How many rows these tensors have in all; None where `rows_of` takes all of them."""
        found = [numbered for name in names if (numbered := self.rows_of(name)) is not None]
        return sum(count for _, count in found) if len(found) == len(names) else None

    def _rows(self, names: Sequence[str]) -> list[range] | None:
        """The rows of these tensors one below the other; None for all."""
        found: list[range] = []
        first = 0
        for name in names:
            chosen = self.rows_of(name)
            if chosen is None:
                return None
            rows, count = chosen
            found += [range(first + part.start, first + part.stop) for part in rows]
            first += count
        return found


class ReorderedRows(ChosenRows):
    """All rows, in the orders of `row_orders`."""

    def __init__(self, source: TensorSource, orders: Mapping[str, NumberedRows]) -> None:
        super().__init__(source)
        self._orders = orders

    def rows_of(self, name: str) -> NumberedRows | None:
        """`ChosenRows.rows_of`."""
        return self._orders.get(module_of(name))


def row_orders(spec: ModelSpec) -> dict[str, NumberedRows]:
    """The rows of matrices whose order in files is another than that of their products, and of
    those that are packed together with them.

    With gates of attention, `q_proj` has the queries and the gates of each head one after the
    other (Qwen3-Next, Qwen3.5); here the queries of all heads are before all gates. The fused
    projections of Qwen3-Next have what belongs to each key head one after the other, and
    files whose value heads are tiled have another order of these.
    """
    orders: dict[str, NumberedRows] = {}
    if spec.attention_gate:
        size, num_rows = spec.head_size, 2 * spec.num_heads * spec.head_size
        num_keys = spec.num_kv_heads * spec.head_size
        orders["q_proj"] = _by_kinds(spec.num_heads, (size, size)), num_rows
        orders["k_proj"] = orders["v_proj"] = (range(num_keys),), num_keys
    mixers = (layer.state_mixer for layer in spec.layers)
    delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDelta)), None)
    if delta is not None:
        orders |= _fused_rows(delta, spec) | _tiled_rows(delta, spec)
    return orders


def _fused_rows(delta: GatedDelta, spec: ModelSpec) -> dict[str, NumberedRows]:
    naming, num_keys = spec.naming, delta.num_key_heads
    if FUSED_DELTA[1] not in naming.delta:
        return {}
    per_key = delta.num_value_heads // num_keys
    values = per_key * delta.value_size
    orders: dict[str, NumberedRows] = {
        name: ((range(count),), count) for name, count in delta_projections(delta, naming)
    }
    sizes = (delta.key_size, delta.key_size, values, values), (per_key, per_key)
    for name, of_head in zip(FUSED_DELTA, sizes, strict=True):
        if name in naming.delta:
            orders[name] = _by_kinds(num_keys, of_head), num_keys * sum(of_head)
    return orders


def _tiled_rows(delta: GatedDelta, spec: ModelSpec) -> dict[str, NumberedRows]:
    """The value heads of a key head one after the other, of files that have them tiled."""
    if not spec.naming.tiled_values:
        return {}
    num_keys, num_heads = delta.num_key_heads, delta.num_value_heads
    of_keys = 2 * num_keys * delta.key_size

    def grouped(size: int, first: int = 0) -> NumberedRows:
        rows = _by_kinds(num_heads // num_keys, (size,) * num_keys)
        moved = [range(first + part.start, first + part.stop) for part in rows]
        before = (range(first),) if first else ()
        return (*before, *moved), first + num_heads * size

    qkv, z, *gates = spec.naming.delta
    orders = {qkv: grouped(delta.value_size, of_keys), z: grouped(delta.value_size)}
    orders["conv1d"] = orders[qkv]
    return orders | dict.fromkeys((*gates, decay_rates(spec.naming), "dt_bias"), grouped(1))


def tiled_columns(delta: GatedDelta) -> tuple[range, ...]:
    """The values of the first value head of each key head, then of the second, ..."""
    per_key = delta.num_value_heads // delta.num_key_heads
    return _by_kinds(delta.num_key_heads, (delta.value_size,) * per_key)


def _by_kinds(num_heads: int, sizes: Sequence[int]) -> tuple[range, ...]:
    """Of rows that are so many of each kind for one head after the other: the first kind of all
    heads, then the second, ...
    """
    firsts = accumulate(sizes, initial=0)
    return tuple(
        range(head * sum(sizes) + first, head * sum(sizes) + first + size)
        for first, size in zip(firsts, sizes, strict=False)
        for head in range(num_heads)
    )


def module_of(name: str) -> str:
    """The last part of a tensor's name that is not `weight` or `bias`."""
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def taken_rows(tensor: TensorT, rows: Sequence[range]) -> TensorT:
    """These rows of a tensor, one below the other."""
    if isinstance(tensor, HostTensor):
        parts = [tensor.numpy()[part.start : part.stop : part.step] for part in rows]
        return HostTensor(np.concatenate(parts), tensor.dtype)
    import torch

    return torch.cat([tensor[part.start : part.stop : part.step] for part in rows])


def stored_rows(matrix: StoredMatrix, rows: Sequence[range]) -> StoredMatrix:
    """Some rows of a matrix in its files, in this order."""
    parts = tuple(piece for part in rows for piece in _pieces(matrix, part))
    return replace(matrix, parts=parts)


def _pieces(matrix: StoredMatrix, rows: range) -> Iterator[StoredRows]:
    """Where the files hold these rows."""
    first = 0
    for part in matrix.parts:
        start, stop = max(rows.start, first), min(rows.stop, first + part.num_rows)
        if start < stop:
            own = slice(start - first, stop - first)
            yield replace(
                part,
                first_row=part.first_row + own.start,
                num_rows=stop - start,
                scales=None if part.scales is None else part.scales[own],
                zeros=None if part.zeros is None else part.zeros[own],
            )
        first += part.num_rows
