"""On-the-fly quantisation: a `TensorSource` whose matrices come out as integer codes.

The codes are a function of the weight and its format alone (`OpTable.quantize`). Matrices are
quantised as the loader asks for them, so that one is in memory twice at most.
"""

from __future__ import annotations

from torch import Tensor

from quickstep.model.quantization import QuantizationScheme
from quickstep.model.tensor_reader import TensorSource
from quickstep.ops.table import OpTable, QuantizedWeight

__all__ = ["QuantizingSource"]


class QuantizingSource:
    """Quantises what `linear` gives; `outer` names the embeddings and the output projection."""

    def __init__(
        self,
        source: TensorSource,
        scheme: QuantizationScheme,
        outer: frozenset[str],
        ops: OpTable,
    ) -> None:
        self._source = source
        self._ops = ops
        self._scheme = scheme
        self._outer = outer

    def tensor(self, name: str) -> Tensor:
        """One tensor, as it is."""
        return self._source.tensor(name)

    def stacked(self, names: tuple[str, ...]) -> Tensor:
        """Several tensors, as they are."""
        return self._source.stacked(names)

    def linear(self, names: tuple[str, ...]) -> Tensor | QuantizedWeight:
        """A matrix in codes, or as it is where the source has codes already."""
        weight = self._source.linear(names)
        if isinstance(weight, QuantizedWeight):
            return weight
        outer = not self._outer.isdisjoint(names)
        form = self._scheme.format_of(weight.shape[1], outer)
        return self._ops.quantize(weight, form.bits, form.group_size, form.has_zeros)
