"""Rotary tables: cos and sin of every position, computed once at load in float32.

A row's bits never depend on the table's length or on the batch. Two kinds change with length in
the literature; here they are functions of the position or of the configuration only:

- `dynamic`: position p uses the frequencies for length max(p + 1, trained length). This is what
  transformers computes when it decodes with a cache; a prompt longer than the trained length is
  not rotated by its final length, which would make a token's KV depend on its chunk.
- `longrope`: long factors for every position when `max_model_len` exceeds the trained length,
  short ones otherwise. Sequences beyond the trained length (or engines that allow none) equal
  transformers, which re-computes a sequence's KV when it crosses the border.

In NumPy, whatever computes the model: powers and cosines in float64, rounded to float32, so that no
library's own rounding has an effect. Products with a reciprocal replace quotients where the models
were trained so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.model.rope_spec import RopeKind, RopeSpec, yarn_scale
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import FLOAT32, AnyTensor, Device, HostTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ROWS = 1024  # float64 scratch of one slice: 1024 x D_rot / 2

Floats = npt.NDArray[np.float32]


class RopeTable(msgspec.Struct, frozen=True):
    """cos and sin, each [max_model_len, D_rot / 2] float32."""

    cos: AnyTensor
    sin: AnyTensor

    def at(self, ops: OpTable, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the given positions, each [T, D_rot / 2]."""
        cos, sin = self.cos, self.sin
        return ops.embedding(positions, cos, cos.dtype), ops.embedding(positions, sin, sin.dtype)


def make_rope_table(rope: RopeSpec, max_model_len: int, device: torch.device | Device) -> RopeTable:
    """Compute the table of positions 0 to max_model_len - 1, of the device's kind of tensors."""
    frequencies = _frequencies(rope, max_model_len)
    scale = np.float32(_attention_factor(rope))
    cos = np.empty((max_model_len, rope.dim // 2), dtype=np.float32)
    sin = np.empty_like(cos)
    for start in range(0, max_model_len, _ROWS):
        positions = np.arange(start, min(start + _ROWS, max_model_len), dtype=np.float32)
        if rope.kind is RopeKind.DYNAMIC:
            rows = _dynamic_frequencies(rope, positions)
        else:
            rows = frequencies[None]
        # The angle is float32 as in training; cos in float64 leaves nothing to the vector library.
        angles = (positions[:, None] * rows).astype(np.float64)
        stop = start + len(positions)
        cos[start:stop] = np.cos(angles)
        sin[start:stop] = np.sin(angles)
    if scale != 1.0:
        cos *= scale
        sin *= scale
    if rope.growth:
        grown = _growth(rope, max_model_len)[:, None]
        cos *= grown
        sin *= grown
    return RopeTable(_tensor(cos, device), _tensor(sin, device))


def _tensor(values: Floats, device: torch.device | Device) -> AnyTensor:
    table = HostTensor(values, FLOAT32)
    return table if isinstance(device, Device) else table.to_torch().to(device)


def _exponents(rope: RopeSpec) -> Floats:
    return np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)


def _power(base: float | Floats, exponent: float | Floats) -> Floats:
    """To float32, from float64."""
    wide = np.power(np.asarray(base, dtype=np.float64), np.asarray(exponent, dtype=np.float64))
    return wide.astype(np.float32)


def _frequencies(rope: RopeSpec, max_model_len: int) -> Floats:
    """[D_rot / 2] float32."""
    powers = _power(rope.theta, _exponents(rope))
    plain = np.float32(1) / powers
    if rope.kind is RopeKind.LINEAR:
        return plain / np.float32(rope.factor)
    if rope.kind is RopeKind.PROPORTIONAL:
        plain[rope.num_turned :] = 0.0
        return plain / np.float32(rope.factor)
    if rope.kind is RopeKind.LLAMA3:
        return _llama3_frequencies(rope, plain)
    if rope.kind is RopeKind.YARN:
        return _yarn_frequencies(rope, powers)
    if rope.kind is RopeKind.LONGROPE:
        beyond = rope.needs_long_factors(max_model_len)
        divisors = np.array(rope.long_factor if beyond else rope.short_factor, dtype=np.float32)
        return np.float32(1) / (divisors * powers)
    return plain


def _dynamic_frequencies(rope: RopeSpec, positions: Floats) -> Floats:
    """[positions, D_rot / 2]; NTK-aware scaling by the length that ends at each position."""
    lengths = np.maximum(positions + np.float32(1), np.float32(rope.trained_len))
    stretch = np.float32(rope.factor) * lengths / np.float32(rope.trained_len)
    stretch = stretch - np.float32(rope.factor - 1)
    bases = np.float32(rope.theta) * _power(stretch, rope.dim / (rope.dim - 2))
    return np.float32(1) / _power(bases[:, None], _exponents(rope))


def _llama3_frequencies(rope: RopeSpec, plain: Floats) -> Floats:
    """Llama 3.1: long wavelengths are stretched, short ones kept, a ramp between."""
    wavelengths = np.float32(1) / plain * np.float32(2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = np.float32(1) / wavelengths * np.float32(rope.trained_len)
    if high == low:  # no ramp
        ramp: Floats = (turns >= np.float32(low)).astype(np.float32)
    else:
        ramp = ((turns - np.float32(low)) / np.float32(high - low)).clip(0.0, 1.0)
    stretched: Floats = (np.float32(1) - ramp) * plain / np.float32(rope.factor)
    return stretched + ramp * plain


def _yarn_frequencies(rope: RopeSpec, powers: Floats) -> Floats:
    """YaRN (arXiv:2309.00071): interpolate the dimensions that turn rarely, keep the others."""

    def dimension_of(turns: float) -> float:
        ratio = rope.trained_len / (turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = (high - low) or 0.001
    steps = np.arange(rope.dim // 2, dtype=np.float32) - np.float32(low)
    ramp: Floats = (steps / np.float32(width)).clip(0.0, 1.0)
    kept: Floats = (np.float32(1) - ramp) / powers
    return ramp / (np.float32(rope.factor) * powers) + kept


def _attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind is RopeKind.LONGROPE and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.trained_len))
    if rope.kind is RopeKind.YARN:
        scale = yarn_scale(rope.factor, 1.0)
        if rope.mscale and rope.mscale_all_dim:
            scale = yarn_scale(rope.factor, rope.mscale)
            scale /= yarn_scale(rope.factor, rope.mscale_all_dim)
        return scale * rope.attn_factor
    return 1.0


def _growth(rope: RopeSpec, max_model_len: int) -> Floats:
    """[max_model_len] float32, the factor of each position."""
    positions = np.arange(max_model_len, dtype=np.int64) + rope.growth_first
    periods = positions // rope.growth_len
    return (1.0 + rope.growth * np.log1p(periods.astype(np.float64))).astype(np.float32)
