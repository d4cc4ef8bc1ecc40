"""A `TensorSource` of some rows of each tensor, or of all of them in another order.

Used by the loader: a rank reads its own rows (`sharding`), and rows that a checkpoint mixes are put
in order (`GatesAfterQueries`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from quickstep.model.decoder_spec import ModelSpec
from quickstep.ops.tensors import AnyTensor, HostTensor, TensorT
from quickstep.ops.weights import QuantizedWeight, StoredMatrix, StoredRows

if TYPE_CHECKING:
    from quickstep.model.checkpoint.tensor_reader import TensorSource

# Rows of a tensor in order, and the number of all its rows.
NumberedRows = tuple[tuple[range, ...], int]


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


class GatesAfterQueries(ChosenRows):
    """Queries of all heads before the gates of all heads, where `q_proj` has those of each head one
    after the other (Qwen3-Next, Qwen3.5).
    """

    def __init__(self, source: TensorSource, spec: ModelSpec) -> None:
        super().__init__(source)
        num_keys = spec.num_kv_heads * spec.head_size
        keys = (range(num_keys),), num_keys
        self._rows_of: dict[str, NumberedRows] = {
            "q_proj": (gate_order(spec), 2 * spec.num_heads * spec.head_size),
            "k_proj": keys,
            "v_proj": keys,
        }

    def rows_of(self, name: str) -> NumberedRows | None:
        """Of the matrices that are packed together."""
        return self._rows_of.get(module_of(name))


def gate_order(spec: ModelSpec) -> tuple[range, ...]:
    """Of a `q_proj` with gates, the queries of all heads before the gates; () of others."""
    if not spec.attention_gate:
        return ()
    size, num_rows = spec.head_size, 2 * spec.num_heads * spec.head_size
    starts = [*range(0, num_rows, 2 * size), *range(size, num_rows, 2 * size)]
    return tuple([range(start, start + size) for start in starts])


def module_of(name: str) -> str:
    """The last part of a tensor's name that is not `weight` or `bias`."""
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def taken_rows(tensor: TensorT, rows: Sequence[range]) -> TensorT:
    """These rows of a tensor, one below the other."""
    if isinstance(tensor, HostTensor):
        parts = [tensor.numpy()[part.start : part.stop] for part in rows]
        return HostTensor(np.concatenate(parts), tensor.dtype)
    import torch

    return torch.cat([tensor[part.start : part.stop] for part in rows])


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
