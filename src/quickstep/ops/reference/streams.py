"""Residual streams of a token, magnitudes, and gates above a cutoff (Gemma 3n): the definitions.

AltUp (Alternating Updates, arXiv:2301.13310) keeps several residuals of a token and mixes them with
coefficients that the token computes. In fp64, with sums that no number of rows changes
(`exact_math`), rounded once. `ops.table` says what each op computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.ops.reference.exact_math import round_rows, tanh
from quickstep.ops.table import StreamOps
from quickstep.ops.tensors import AnyTensor, to_torch

_SQUARE_BITS = 36  # exact sums up to C = 2**17
_LEAST_SQUARE = 1e-5  # of a vector whose magnitude is changed


def stream_ops() -> StreamOps:
    """The ops of this module."""
    return StreamOps(spread_streams, mix_streams, correct_streams, add_to_streams, match, cut_gates)


def _mean(x: Tensor) -> Tensor:
    return round_rows(x, _SQUARE_BITS).sum(-1, keepdim=True) / x.shape[-1]


def _coefficients(scores: Tensor, weight: AnyTensor) -> list[Tensor]:
    """Of each row of the weight, [T, 1]."""
    modes, rows = tanh(scores.double()), to_torch(weight).double()
    found = []
    for row in rows:
        total = torch.zeros_like(modes[:, :1])
        for index in range(modes.shape[1]):
            total = total + modes[:, index : index + 1] * row[index]
        found.append(total)
    return found


def _parts(x: Tensor, num_streams: int) -> list[Tensor]:
    """The streams of x [T, S * N] in fp64."""
    size = x.shape[1] // num_streams
    return [x[:, i * size : (i + 1) * size].double() for i in range(num_streams)]


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts, dim=1).float().to(dtype)


def spread_streams(x: Tensor, others: Tensor) -> Tensor:
    """`SpreadStreamsOp`."""
    size = x.shape[1]
    parts = [others[:, i : i + size] for i in range(0, others.shape[1], size)]
    return torch.cat([x, *(match(part, x, None) for part in parts)], dim=1)


def mix_streams(x: Tensor, scores: Tensor, weight: AnyTensor, active: int) -> tuple[Tensor, Tensor]:
    """`MixStreamsOp`."""
    num_streams = scores.shape[1]
    factors, parts = _coefficients(scores, weight), _parts(x, num_streams)
    mixed = []
    for to, own in enumerate(parts):
        total = torch.zeros_like(own)
        for index, part in enumerate(parts):
            total = total + part * factors[to * num_streams + index]
        mixed.append(total + own)
    result = _joined(mixed, x.dtype)
    size = x.shape[1] // num_streams
    return result, result[:, active * size : (active + 1) * size].contiguous()


def correct_streams(
    x: Tensor,
    delta: Tensor,
    scores: Tensor,
    weight: AnyTensor,
    scale: AnyTensor | None,
    active: int,
) -> tuple[Tensor, Tensor]:
    """`CorrectStreamsOp`."""
    factors, parts = _coefficients(scores, weight), _parts(x, scores.shape[1])
    change = delta.double() - parts[active]
    corrected = [
        part + change * (factor + 1.0) for part, factor in zip(parts, factors, strict=True)
    ]
    result = _joined(corrected, x.dtype)
    scaled = _parts(result, scores.shape[1])[active]
    if scale is not None:
        scaled = scaled * to_torch(scale).double()
    return result, scaled.float().to(x.dtype)


def add_to_streams(x: Tensor, delta: Tensor) -> Tensor:
    """`AddToStreamsOp`."""
    first, *others = _parts(x, x.shape[1] // delta.shape[1])
    return _joined([first, *(part + delta.double() for part in others)], x.dtype)


def match(x: Tensor, like: Tensor, total: Tensor | None) -> Tensor:
    """`MatchMagnitudeOp`."""
    wide, target = x.double(), like.double()
    own = _mean(wide * wide).clamp(min=_LEAST_SQUARE)
    matched = wide * (torch.sqrt(_mean(target * target)) / torch.sqrt(own))
    if total is not None:
        matched = matched + total.double()
    return matched.float().to(x.dtype)


def cut_gates(gate_up: Tensor, num_deviations: float) -> Tensor:
    """`CutGatesOp`."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.double()
    mean = _mean(wide)
    distance = wide - mean
    deviation = torch.sqrt(_mean(distance * distance))
    above = (wide - (mean + deviation * num_deviations)).clamp(min=0.0)
    return torch.cat((above.float().to(gate.dtype), up), dim=-1)
