"""On-the-fly quantization: a `TensorSource` whose matrices come out as quantized values.

The quantized values are a function of the weight and its format only (`OpTable.quantize`).
Matrices are quantized when the loader reads them, so that at most one is in memory twice.

The rounding error of a matrix is measured on a sample of its rows. An error above that of trained
models' weights is a warning, so that no perplexity doubles without a message.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quickstep.model.checkpoint.tensor_reader import TensorSource
from quickstep.model.quantization import MatrixFormat, QuantizationScheme
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import AnyTensor, to_torch
from quickstep.ops.weights import QuantizedWeight, Rounding, StoredMatrix

if TYPE_CHECKING:
    from torch import Tensor

# Of a matrix, norm of the error over norm of the weights. Four bits leave 0.08 to 0.14 on normal
# and heavy-tailed weights, whose models lose 2 to 4 % of perplexity; what is lost grows with the
# square, so beyond this bound it would be several times as much. Eight bits leave 0.01.
ERROR_BOUND = 0.2

_SAMPLED_ROWS = 64


class QuantizingSource:
    """Quantizes the results of `linear`; `outer` names the embeddings and the output projection."""

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

    def tensor(self, name: str) -> AnyTensor:
        """One tensor, as it is."""
        return self._source.tensor(name)

    def stacked(self, names: tuple[str, ...]) -> AnyTensor:
        """Several tensors, as they are."""
        return self._source.stacked(names)

    def linear(self, names: tuple[str, ...]) -> AnyTensor | QuantizedWeight:
        """A matrix, quantized unless the source has it quantized already."""
        weight = self._source.linear(names)
        if isinstance(weight, QuantizedWeight):
            return weight
        weight = to_torch(weight)
        outer = not self._outer.isdisjoint(names)
        form = self._scheme.format_of(weight.shape[1], outer)
        quantized = quantize_matrix(self._ops, weight, form)
        self._judge(names, rounding_error(weight, quantized))
        return quantized

    def stored(self, names: tuple[str, ...], *, floating: bool = False) -> StoredMatrix | None:
        """A matrix in its files, to be quantized on loading; None also where it is quantized
        already, and for fp8.
        """
        if floating:
            return self._source.stored(names, floating=True)
        matrix = None if self._scheme.is_float8 else self._source.stored(names)
        if matrix is None or matrix.is_quantized:
            return None
        outer = not self._outer.isdisjoint(names)
        form = self._scheme.format_of(matrix.num_inputs, outer)
        rows = sum(part.num_rows for part in matrix.parts)
        rounding = Rounding(
            form.bits,
            form.group_size,
            form.has_zeros,
            form.has_sub_scales,
            max(1, rows // _SAMPLED_ROWS),
            lambda error: self._judge(names, error),
        )
        return replace(matrix, rounding=rounding)

    def _judge(self, names: tuple[str, ...], error: float) -> None:
        if not error <= ERROR_BOUND:
            warnings.warn(
                f"{self._scheme.name} changes {' + '.join(names)} by {error:.0%} (more than "
                f"{ERROR_BOUND:.0%}), answers may suffer: measure with `quickstep bench "
                "accuracy`, or use --quantization int8 or none",
                RuntimeWarning,
                stacklevel=3,
            )


def quantize_matrix(ops: OpTable, weight: Tensor, form: MatrixFormat) -> QuantizedWeight:
    """A weight [N, C] in a format."""
    if form.is_float8:
        # Imported here: it needs torch.
        from quickstep.ops.reference.quantize import quantize_float8

        return quantize_float8(weight)
    return ops.quantize(weight, form.bits, form.group_size, form.has_zeros, form.has_sub_scales)


def rounding_error(weight: Tensor, quantized: QuantizedWeight) -> float:
    """Norm of what rounding changed in a weight [N, C] over that of the weight, on sampled rows."""
    import torch

    rows = slice(None, None, max(1, weight.shape[0] // _SAMPLED_ROWS))
    exact = weight[rows].float()
    total = float(torch.linalg.vector_norm(exact))
    wrong = float(torch.linalg.vector_norm(quantized.rows(rows).dequantized() - exact))
    return wrong / total if total else 0.0
