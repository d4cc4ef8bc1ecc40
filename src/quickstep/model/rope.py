"""Rotary tables: cos and sin of every position, computed once at load in float32.

A row's bits never depend on the table's length or on the batch. Two kinds change with length in
the literature; here they are functions of the position or of the configuration alone:

- `dynamic`: position p uses the frequencies for length max(p + 1, trained length). This is what
  transformers computes when it decodes with a cache; a prompt longer than the trained length is
  not rotated as a whole for its end, which would make a token's KV depend on its chunk.
- `longrope`: long factors for every position when `max_model_len` exceeds the trained length,
  short ones otherwise. Sequences beyond the trained length (or engines that allow none) equal
  transformers, which re-computes a sequence's KV when it crosses the border.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quickstep.dataclass import dataclass
from quickstep.model.rope_spec import RopeKind, RopeSpec

__all__ = ["RopeTable", "make_rope_table"]

_ROWS = 1024  # float64 scratch of one slice: 1024 x D_rot / 2


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin, each [max_model_len, D_rot / 2] float32."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the given positions, each [T, D_rot / 2]."""
        return self.cos[positions], self.sin[positions]


def make_rope_table(rope: RopeSpec, max_model_len: int, device: torch.device) -> RopeTable:
    """Compute the table of positions 0 to max_model_len - 1."""
    frequencies = _frequencies(rope, max_model_len)
    scale = _attention_factor(rope)
    cos = torch.empty(max_model_len, rope.dim // 2, dtype=torch.float32)
    sin = torch.empty_like(cos)
    for start in range(0, max_model_len, _ROWS):
        positions = torch.arange(start, min(start + _ROWS, max_model_len), dtype=torch.float32)
        if rope.kind is RopeKind.DYNAMIC:
            rows = _dynamic_frequencies(rope, positions)
        else:
            rows = frequencies.unsqueeze(0)
        # The angle is float32 as in training; cos in float64 leaves nothing to the vector library.
        angles = (positions.unsqueeze(1) * rows).double()
        stop = start + len(positions)
        cos[start:stop] = angles.cos().float() * scale
        sin[start:stop] = angles.sin().float() * scale
    return RopeTable(cos.to(device), sin.to(device))


def _exponents(rope: RopeSpec) -> Tensor:
    return torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim


def _frequencies(rope: RopeSpec, max_model_len: int) -> Tensor:
    """[D_rot / 2] float32."""
    plain = 1.0 / (rope.theta ** _exponents(rope))
    if rope.kind is RopeKind.LINEAR:
        return plain / rope.factor
    if rope.kind is RopeKind.LLAMA3:
        return _llama3_frequencies(rope, plain)
    if rope.kind is RopeKind.YARN:
        return _yarn_frequencies(rope)
    if rope.kind is RopeKind.LONGROPE:
        beyond = max_model_len > rope.trained_len
        divisors = torch.tensor(rope.long_factor if beyond else rope.short_factor)
        return 1.0 / (divisors * rope.theta ** _exponents(rope))
    return plain


def _dynamic_frequencies(rope: RopeSpec, positions: Tensor) -> Tensor:
    """[positions, D_rot / 2]; NTK-aware scaling by the length that ends at each position."""
    lengths = (positions + 1).clamp(min=rope.trained_len)
    stretch = rope.factor * lengths / rope.trained_len - (rope.factor - 1)
    bases = rope.theta * stretch ** (rope.dim / (rope.dim - 2))
    return 1.0 / (bases.unsqueeze(1) ** _exponents(rope))


def _llama3_frequencies(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, a ramp between."""
    wavelengths = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    ramp = ((rope.trained_len / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - ramp) * plain / rope.factor + ramp * plain


def _yarn_frequencies(rope: RopeSpec) -> Tensor:
    """YaRN (arXiv:2309.00071): interpolate the dimensions that turn rarely, keep the others."""
    powers = rope.theta ** _exponents(rope)

    def dimension_of(turns: float) -> float:
        ratio = rope.trained_len / (turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return ramp / (rope.factor * powers) + (1 - ramp) / powers


def _attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind is RopeKind.LONGROPE and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.trained_len))
    if rope.kind is RopeKind.YARN:
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(
                rope.factor, rope.mscale_all_dim
            )
        return _yarn_scale(rope.factor, 1.0)
    return 1.0


def _yarn_scale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
