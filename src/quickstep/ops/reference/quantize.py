"""Weights into integer codes: the definition of `OpTable.quantize`.

Deterministic: codes are a function of their row alone. Without a group size a row has one scale,
its largest magnitude over 2**(bits - 1) - 1, codes about the middle. With one, each group of 4
bits tries a few scales and keeps the one with the smallest squared error; at 8 bits clipping gains
nothing, and the first is taken. Codes with multipliers try a few scales too, and with each two
multipliers for every part of 16 inputs; then the scale is fitted to the codes found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quickstep.ops.table import MULTIPLIER_INPUTS, QuantizedWeight

__all__ = ["quantize"]

_BLOCK_ELEMENTS = 1 << 20  # in float32 at a time: 4 MiB
_TINY = 1e-30  # weights below count as zero: 127 over them overflows, or nearly

# Shares of a group's range that are tried for its scale, the least squared error wins: clipping
# the outermost weight can serve the others better.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)

# With multipliers: shares of the largest step / 15 that are tried for a group's scale, how many
# multipliers with each, and what scales are held times: what float16 has room for then being that
# of scales without.
_UNIT_SHRINKS = (1.0, 0.93, 0.87)
_MULTIPLIERS_TRIED = 2
_LARGEST_MULTIPLIER = 15
_UNIT = 16.0

# Squared error of each group, and what gave it: codes, scale, zero.
_Attempt = tuple[Tensor, ...]  # the errors of groups, then what leaves them


def quantize(
    weight: Tensor,
    bits: int,
    group_size: int | None,
    has_zeros: bool,
    has_multipliers: bool = False,
) -> QuantizedWeight:
    """Codes of weight [N, C] (any floating dtype); `group_size` divides C."""
    outputs, inputs = weight.shape
    searches, group_size = group_size is not None, group_size or inputs
    codes = torch.empty((outputs, inputs), dtype=torch.uint8, device=weight.device)
    scales = weight.new_empty((outputs, inputs // group_size), dtype=torch.float32)
    zeros = torch.empty_like(scales) if has_zeros else None
    multipliers = None
    if has_multipliers:
        shape = (outputs, inputs // MULTIPLIER_INPUTS)
        multipliers = torch.empty(shape, dtype=torch.int8, device=weight.device)
    step = max(1, _BLOCK_ELEMENTS // inputs)
    for start in range(0, outputs, step):
        block = slice(start, start + step)
        groups = weight[block].float().reshape(-1, inputs // group_size, group_size)
        if not searches:
            scales[block], part = _whole_rows(groups, bits)
        elif multipliers is not None:
            scales[block], found, part = _multiplied(groups)
            multipliers[block] = found.reshape(-1, inputs // MULTIPLIER_INPUTS).to(torch.int8)
        elif zeros is None:
            scales[block], part = _symmetric(groups, bits)
        else:
            scales[block], zeros[block], part = _asymmetric(groups, bits)
        codes[block] = part.reshape(-1, inputs).to(torch.uint8)
    return QuantizedWeight(codes, scales, zeros, bits, group_size, multipliers)


def _whole_rows(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale = largest / (2**(bits - 1) - 1), codes about the middle."""
    middle = 2 ** (bits - 1)
    most = groups.abs().amax(-1)
    most = torch.where(most > _TINY, most, 0.0)
    # not (middle - 1) / most, for which torch multiplies with a rounded reciprocal
    inverse = torch.where(most > 0, torch.full_like(most, middle - 1) / most, 0.0)
    codes = (groups * inverse.unsqueeze(-1)).round_().add_(middle)
    return most / (middle - 1), codes


def _symmetric(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The weight of the largest magnitude at code 0, or nearer: 2**bits codes, none in vain."""
    middle = 2 ** (bits - 1)
    most, least = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    extreme = torch.where(most >= -least, most, least) / -middle

    def attempt(shrink: float) -> _Attempt:
        scale = _half(extreme * shrink)
        codes = (groups * _inverse(scale)).round_().add_(middle).clamp_(0, 2 * middle - 1)
        return _measured(groups, codes, scale, torch.full_like(scale, middle))

    _, codes, scale, _ = _best(attempt, _SHRINKS if bits < 8 else _SHRINKS[:1])
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

    _, codes, scale, zero = _best(attempt, _SHRINKS if bits < 8 else _SHRINKS[:1])
    return scale.squeeze(-1), zero.squeeze(-1), codes


def _multiplied(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales [N, G], multipliers [N, G, P] and codes [N, G, P, 16] of 4 bits; P parts a group."""
    parts = groups.reshape(*groups.shape[:2], -1, MULTIPLIER_INPUTS)
    most, least = parts.amax(-1, keepdim=True), parts.amin(-1, keepdim=True)
    extreme = torch.where(most >= -least, most, least)
    largest = extreme.abs().amax(-2, keepdim=True)

    def attempt(shrink: float) -> _Attempt:
        scale = _half(largest / (8.0 * _LARGEST_MULTIPLIER) * shrink * _UNIT) / _UNIT
        multipliers, error = _best_multipliers(parts, extreme / -8.0, scale)
        return error.sum(-2, keepdim=True), scale, multipliers

    _, scale, multipliers = _best(attempt, _UNIT_SHRINKS)
    steps = _part_codes(parts, scale * multipliers) * multipliers
    product = (parts * _inverse(scale) * steps).sum((-2, -1), keepdim=True)
    square = steps.square().sum((-2, -1), keepdim=True)
    fitted = _half(scale * (product / square) * _UNIT) / _UNIT
    scale = torch.where(square > 0, fitted, scale)
    codes = _part_codes(parts, scale * multipliers) + 8.0
    return scale.flatten(1), multipliers.squeeze(-1), codes


def _best_multipliers(parts: Tensor, steps: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The least odd one that reaches a part's step, or one of the next below; and the error."""
    half = (steps.abs() * _inverse(scale) * 0.5).round_()
    least = (half + half + 1.0).clamp_(1.0, float(_LARGEST_MULTIPLIER))
    chosen, best = least, torch.full_like(steps, torch.inf)
    for lower in range(_MULTIPLIERS_TRIED):
        magnitude = (least - 2.0 * lower).clamp_(min=1.0)
        multiplier = torch.where(steps < 0, -magnitude, magnitude)
        group_scale = scale * multiplier
        distance = _part_codes(parts, group_scale) * group_scale - parts
        error = distance.square_().sum(-1, keepdim=True)
        wins = (error < best) if lower else torch.ones_like(error, dtype=torch.bool)
        best, chosen = torch.where(wins, error, best), torch.where(wins, multiplier, chosen)
    return chosen, best


def _part_codes(parts: Tensor, scale: Tensor) -> Tensor:
    return (parts * _inverse(scale)).round_().clamp_(-8.0, 7.0)


def _measured(groups: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> _Attempt:
    error = ((codes - zero) * scale - groups).square_().sum(-1, keepdim=True)
    return error, codes, scale, zero


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
