"""On-the-fly quantisation: a `TensorSource` whose matrices come out as integer codes.

Deterministic: codes are a function of the weight and its format alone, element by element and row
by row. Matrices are quantised as the loader asks for them, so that one is in memory twice at most.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quickstep.model.quantization import MatrixFormat, QuantizationScheme
from quickstep.model.tensor_reader import TensorSource
from quickstep.ops.table import QuantizedWeight

__all__ = ["QuantizingSource", "quantize"]

_BLOCK_ELEMENTS = 1 << 20  # in float32 at a time: 4 MiB

_TINY = 1e-30  # weights below count as zero: 127 over them overflows, or nearly

# Shares of a group's range that are tried for its scale, the least squared error wins: clipping
# the outermost weight can serve the others better.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


class QuantizingSource:
    """Quantises what `linear` gives; `outer` names the embeddings and the output projection."""

    def __init__(
        self, source: TensorSource, scheme: QuantizationScheme, outer: frozenset[str]
    ) -> None:
        self._source = source
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
        return quantize(weight, self._scheme.format_of(weight.shape[1], outer))


def quantize(weight: Tensor, form: MatrixFormat) -> QuantizedWeight:
    """Codes of weight [N, C] (any floating dtype)."""
    outputs, inputs = weight.shape
    group_size = form.group_size or inputs
    codes = torch.empty((outputs, inputs), dtype=torch.uint8, device=weight.device)
    scales = weight.new_empty((outputs, inputs // group_size), dtype=torch.float32)
    zeros = torch.empty_like(scales) if form.has_zeros else None
    step = max(1, _BLOCK_ELEMENTS // inputs)
    for start in range(0, outputs, step):
        block = slice(start, start + step)
        groups = weight[block].float().reshape(-1, inputs // group_size, group_size)
        if form.group_size is None:
            scales[block], part = _whole_rows(groups, form.bits)
        elif zeros is None:
            scales[block], part = _symmetric(groups, form.bits)
        else:
            scales[block], zeros[block], part = _asymmetric(groups, form.bits)
        codes[block] = part.reshape(-1, inputs).to(torch.uint8)
    return QuantizedWeight(codes, scales, zeros, form.bits, group_size)


def _whole_rows(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale = largest / (2**(bits - 1) - 1), codes about the middle."""
    middle = 2 ** (bits - 1)
    most = groups.abs().amax(-1)
    most = torch.where(most > _TINY, most, 0.0)
    inverse = torch.where(most > 0, (middle - 1) / most, 0.0)
    codes = (groups * inverse.unsqueeze(-1)).round_().add_(middle)
    return most / (middle - 1), codes


def _symmetric(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The weight of the largest magnitude at code 0, or nearer: 2**bits codes, none in vain."""
    middle = 2 ** (bits - 1)
    at = groups.abs().argmax(-1, keepdim=True)
    extreme = groups.gather(-1, at) / -middle

    def attempt(shrink: float) -> _Attempt:
        scale = _half(extreme * shrink)
        codes = (groups * _inverse(scale)).round_().add_(middle).clamp_(0, 2 * middle - 1)
        return _measured(groups, codes, scale, torch.full_like(scale, middle))

    _, codes, scale, _ = _best(attempt)
    return scale.squeeze(-1), codes


def _asymmetric(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """A whole zero point: the range from least to largest, 0 included, over all codes."""
    last = 2**bits - 1
    least = groups.amin(-1, keepdim=True).clamp_(max=0.0)
    largest = groups.amax(-1, keepdim=True).clamp_(min=0.0)

    def attempt(shrink: float) -> _Attempt:
        scale = _half(largest * (shrink / last) - least * (shrink / last))
        zero = (least * -shrink * _inverse(scale)).round_()
        codes = (groups * _inverse(scale)).round_().add_(zero).clamp_(0, last)
        return _measured(groups, codes, scale, zero)

    _, codes, scale, zero = _best(attempt)
    return scale.squeeze(-1), zero.squeeze(-1), codes


# Squared error of each group, and what gave it: codes, scale, zero.
_Attempt = tuple[Tensor, Tensor, Tensor, Tensor]


def _measured(groups: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> _Attempt:
    error = ((codes - zero) * scale - groups).square_().sum(-1, keepdim=True)
    return error, codes, scale, zero


def _best(attempt: Callable[[float], _Attempt]) -> _Attempt:
    """Group by group the attempt with the smallest error, the first where equal."""
    best = attempt(_SHRINKS[0])
    for shrink in _SHRINKS[1:]:
        other = attempt(shrink)
        wins = other[0] < best[0]
        best = (
            torch.where(wins, other[0], best[0]),
            torch.where(wins, other[1], best[1]),
            torch.where(wins, other[2], best[2]),
            torch.where(wins, other[3], best[3]),
        )
    return best


def _half(scale: Tensor) -> Tensor:
    """Rounded to what float16 holds, as kernels keep scales of groups."""
    rounded = scale.half().float()
    return torch.where(rounded.isfinite(), rounded, scale)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale != 0, 1.0 / scale, 0.0)
