"""Weights into quantized values: the definition of `OpTable.quantize`.

Deterministic: quantized values are a function of their row only. Without a group size a row has
one scale, its largest magnitude over 2**(bits - 1) - 1, quantized values about the middle. With
one, each group of 4 bits tries a few scales and keeps the one with the smallest squared error; at 8
bits clipping gains nothing, and the first is used. Quantized values with sub-block scales try a
few scales too, and with each two sub-block scales for every part of 16 inputs; then the scale is
fitted to the quantized values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quickstep.ops.tensors import FLOAT8_MAX, to_float8
from quickstep.ops.weights import SUB_BLOCK_INPUTS, QuantizedWeight

_BLOCK_ELEMENTS = 1 << 20  # in float32 at a time: 4 MiB
_TINY = 1e-30  # weights below count as zero: 127 over them overflows, or nearly

# Fractions of a group's range that are tried for its scale; the least squared error wins. Clipping
# the outermost weight can make the others more exact.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)

# With sub-block scales: fractions of the largest step / 15 that are tried for a group's scale, the
# number of sub-block scales tried with each, and the factor that scales are stored with, so that
# float16 holds the same range as without sub-block scales.
_UNIT_SHRINKS = (1.0, 0.93, 0.87)
_SUB_SCALES_TRIED = 2
_LARGEST_SUB_SCALE = 15
_UNIT = 16.0

# Squared error of each group, and its candidate: quantized values, scale, zero.
_Attempt = tuple[Tensor, ...]  # the errors of groups, then the values that cause them


def quantize(
    weight: Tensor,
    bits: int,
    group_size: int | None,
    has_zeros: bool,
    has_sub_scales: bool = False,
) -> QuantizedWeight:
    """Quantized values of weight [N, C] (any floating dtype); `group_size` divides C."""
    outputs, inputs = weight.shape
    searches, group_size = group_size is not None, group_size or inputs
    quants = torch.empty((outputs, inputs), dtype=torch.uint8, device=weight.device)
    scales = weight.new_empty((outputs, inputs // group_size), dtype=torch.float32)
    zeros = torch.empty_like(scales) if has_zeros else None
    sub_scales = None
    if has_sub_scales:
        shape = (outputs, inputs // SUB_BLOCK_INPUTS)
        sub_scales = torch.empty(shape, dtype=torch.int8, device=weight.device)
    step = max(1, _BLOCK_ELEMENTS // inputs)
    for start in range(0, outputs, step):
        block = slice(start, start + step)
        groups = weight[block].float().reshape(-1, inputs // group_size, group_size)
        if not searches:
            scales[block], part = _by_row(groups, bits)
        elif sub_scales is not None:
            scales[block], found, part = _with_sub_scales(groups)
            sub_scales[block] = found.reshape(-1, inputs // SUB_BLOCK_INPUTS).to(torch.int8)
        elif zeros is None:
            scales[block], part = _symmetric(groups, bits)
        else:
            scales[block], zeros[block], part = _asymmetric(groups, bits)
        quants[block] = part.reshape(-1, inputs).to(torch.uint8)
    return QuantizedWeight(quants, scales, zeros, bits, group_size, sub_scales)


def quantize_float8(weight: Tensor) -> QuantizedWeight:
    """A weight [N, C] in e4m3, with one scale per output: its largest magnitude over 448."""
    outputs, inputs = weight.shape
    quants = torch.empty((outputs, inputs), dtype=torch.uint8, device=weight.device)
    scales = weight.new_empty((outputs, 1), dtype=torch.float32)
    step = max(1, _BLOCK_ELEMENTS // inputs)
    for start in range(0, outputs, step):
        block = slice(start, start + step)
        rows = weight[block].float()
        most = rows.abs().amax(-1, keepdim=True)
        most = torch.where(most > _TINY, most, 0.0)
        largest = torch.full_like(most, FLOAT8_MAX)
        inverse = torch.where(most > 0, largest / most, 0.0)
        quants[block] = to_float8(rows * inverse).view(torch.uint8)
        scales[block] = most / largest
    return QuantizedWeight(quants, scales, None, 8, inputs, is_float8=True)


def _by_row(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale = largest / (2**(bits - 1) - 1), quantized values about the middle."""
    middle = 2 ** (bits - 1)
    most = groups.abs().amax(-1)
    most = torch.where(most > _TINY, most, 0.0)
    # not (middle - 1) / most, for which torch multiplies with a rounded reciprocal
    inverse = torch.where(most > 0, torch.full_like(most, middle - 1) / most, 0.0)
    quants = (groups * inverse.unsqueeze(-1)).round_().add_(middle)
    return most / (middle - 1), quants


def _symmetric(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The weight of the largest magnitude at the lowest quantized value, or nearer: all 2**bits are
    used.
    """
    middle = 2 ** (bits - 1)
    most, least = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    extreme = torch.where(most >= -least, most, least) / -middle

    def attempt(shrink: float) -> _Attempt:
        scale = _half(extreme * shrink)
        quants = (groups * _inverse(scale)).round_().add_(middle).clamp_(0, 2 * middle - 1)
        return _measured(groups, quants, scale, torch.full_like(scale, middle))

    _, quants, scale, _ = _best(attempt, _SHRINKS if bits < 8 else _SHRINKS[:1])
    return scale.squeeze(-1), quants


def _asymmetric(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """An integer zero point: the range from least to largest, 0 included, over all 2**bits."""
    last = 2**bits - 1
    least = groups.amin(-1, keepdim=True).clamp_(max=0.0)
    largest = groups.amax(-1, keepdim=True).clamp_(min=0.0)

    def attempt(shrink: float) -> _Attempt:
        scale = _half(largest * (shrink / last) - least * (shrink / last))
        zero = (least * -shrink * _inverse(scale)).round_()
        quants = (groups * _inverse(scale)).round_().add_(zero).clamp_(0, last)
        return _measured(groups, quants, scale, zero)

    _, quants, scale, zero = _best(attempt, _SHRINKS if bits < 8 else _SHRINKS[:1])
    return scale.squeeze(-1), zero.squeeze(-1), quants


def _with_sub_scales(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales [N, G], sub-block scales [N, G, P] and quantized values [N, G, P, 16] of 4 bits; P
    parts a group.
    """
    parts = groups.reshape(*groups.shape[:2], -1, SUB_BLOCK_INPUTS)
    most, least = parts.amax(-1, keepdim=True), parts.amin(-1, keepdim=True)
    extreme = torch.where(most >= -least, most, least)
    largest = extreme.abs().amax(-2, keepdim=True)

    def attempt(shrink: float) -> _Attempt:
        scale = _half(largest / (8.0 * _LARGEST_SUB_SCALE) * shrink * _UNIT) / _UNIT
        sub_scales, error = _best_sub_scales(parts, extreme / -8.0, scale)
        return error.sum(-2, keepdim=True), scale, sub_scales

    _, scale, sub_scales = _best(attempt, _UNIT_SHRINKS)
    steps = _part_quants(parts, scale * sub_scales) * sub_scales
    product = (parts * _inverse(scale) * steps).sum((-2, -1), keepdim=True)
    square = steps.square().sum((-2, -1), keepdim=True)
    fitted = _half(scale * (product / square) * _UNIT) / _UNIT
    scale = torch.where(square > 0, fitted, scale)
    quants = _part_quants(parts, scale * sub_scales) + 8.0
    return scale.flatten(1), sub_scales.squeeze(-1), quants


def _best_sub_scales(parts: Tensor, steps: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The least odd one that reaches a part's step, or one of the next below; and the error."""
    half = (steps.abs() * _inverse(scale) * 0.5).round_()
    least = (half + half + 1.0).clamp_(1.0, float(_LARGEST_SUB_SCALE))
    chosen, best = least, torch.full_like(steps, torch.inf)
    for lower in range(_SUB_SCALES_TRIED):
        magnitude = (least - 2.0 * lower).clamp_(min=1.0)
        sub_scale = torch.where(steps < 0, -magnitude, magnitude)
        group_scale = scale * sub_scale
        distance = _part_quants(parts, group_scale) * group_scale - parts
        error = distance.square_().sum(-1, keepdim=True)
        wins = (error < best) if lower else torch.ones_like(error, dtype=torch.bool)
        best, chosen = torch.where(wins, error, best), torch.where(wins, sub_scale, chosen)
    return chosen, best


def _part_quants(parts: Tensor, scale: Tensor) -> Tensor:
    return (parts * _inverse(scale)).round_().clamp_(-8.0, 7.0)


def _measured(groups: Tensor, quants: Tensor, scale: Tensor, zero: Tensor) -> _Attempt:
    error = ((quants - zero) * scale - groups).square_().sum(-1, keepdim=True)
    return error, quants, scale, zero


def _best(attempt: Callable[[float], _Attempt], shrinks: Sequence[float]) -> _Attempt:
    """Group by group the attempt with the smallest error, the first where equal."""
    best = attempt(shrinks[0])
    for shrink in shrinks[1:]:
        other = attempt(shrink)
        wins = other[0] < best[0]
        best = tuple(torch.where(wins, *pair) for pair in zip(other, best, strict=True))
    return best


def _half(scale: Tensor) -> Tensor:
    """Rounded to what float16 holds, as kernels keep scales of groups."""
    rounded = scale.half().float()
    return torch.where(rounded.isfinite(), rounded, scale)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale != 0, 1.0 / scale, 0.0)
