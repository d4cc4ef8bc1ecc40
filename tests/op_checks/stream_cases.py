"""Residual streams, magnitudes and cutoffs of gates: inputs of the ops, and their float64 results
with what fp32 sums may differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from op_checks.case_inputs import CaseInputs, label
from quickstep.ops.reference.streams import stream_ops
from quickstep.ops.table import OpTable

__all__ = ["STREAM_INPUTS", "STREAM_ORACLES", "stream_op"]

# A name, the inputs with an entry per token, the others.
Inputs = tuple[str, tuple[Tensor, ...], tuple[object, ...]]
Results = list[tuple[Tensor, Tensor]]

_SLACK = 32 * 2.0**-24
# (T, S, N, active): as released, vector edges, many rows, one token, none
_SHAPES = ((3, 4, 2048, 0), (21, 4, 77, 1), (300, 2, 16, 1), (1, 3, 5, 2), (0, 4, 32, 0))


def stream_op(ops: OpTable, op: str) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The op by its name in `STREAM_INPUTS`."""
    found: Callable[..., Tensor | tuple[Tensor, ...]] = getattr(
        ops.streams or stream_ops(), op.removeprefix("streams_")
    )
    return found


def _spread(dtype: torch.dtype) -> Iterator[Inputs]:
    for num_tokens, streams, size, _ in _SHAPES:
        name = label("streams_spread", dtype, num_tokens, streams, size)
        source = CaseInputs(name, dtype)
        others = source.normal(num_tokens, (streams - 1) * size, scale=3.0)
        yield name, (source.normal(num_tokens, size), others), ()


def _mix(dtype: torch.dtype) -> Iterator[Inputs]:
    for num_tokens, streams, size, active in _SHAPES:
        name = label("streams_mix", dtype, num_tokens, streams, size)
        source = CaseInputs(name, dtype)
        tokens = source.normal(num_tokens, streams * size), source.normal(num_tokens, streams)
        yield name, tokens, (source.normal(streams * streams, streams).float(), active)


def _correct(dtype: torch.dtype) -> Iterator[Inputs]:
    for num_tokens, streams, size, active in _SHAPES:
        name = label("streams_correct", dtype, num_tokens, streams, size)
        source = CaseInputs(name, dtype)
        tokens = (
            source.normal(num_tokens, streams * size),
            source.normal(num_tokens, size, scale=2.0),
            source.normal(num_tokens, streams),
        )
        scale = source.normal(size) if active else None
        yield name, tokens, (source.normal(streams, streams).float(), scale, active)


def _add(dtype: torch.dtype) -> Iterator[Inputs]:
    for num_tokens, streams, size, _ in _SHAPES:
        name = label("streams_add", dtype, num_tokens, streams, size)
        source = CaseInputs(name, dtype)
        tokens = source.normal(num_tokens, streams * size), source.normal(num_tokens, size)
        yield name, tokens, ()


def _match(dtype: torch.dtype) -> Iterator[Inputs]:
    for num_tokens, _, size, has_total in _SHAPES:
        name = label("streams_match", dtype, num_tokens, size)
        source = CaseInputs(name, dtype)
        tokens = [source.normal(num_tokens, size, scale=scale) for scale in (3.0, 1.0, 2.0)]
        yield name, tuple(tokens if has_total else tokens[:2]), () if has_total else (None,)
    name = label("streams_match", dtype, "small")  # below the least magnitude
    source = CaseInputs(name, dtype)
    yield name, (source.normal(3, 40, scale=1e-4), source.normal(3, 40)), (None,)


def _cut(dtype: torch.dtype) -> Iterator[Inputs]:
    for num_tokens, _, size, _ in _SHAPES:
        for deviations in (1.6448536, -0.25):
            name = label("streams_cut", dtype, num_tokens, size, deviations)
            gate_up = CaseInputs(name, dtype).normal(num_tokens, 2 * size) + 0.5
            yield name, (gate_up,), (deviations,)


STREAM_INPUTS: Mapping[str, Callable[[torch.dtype], Iterator[Inputs]]] = MappingProxyType(
    {
        "streams_spread": _spread,
        "streams_mix": _mix,
        "streams_correct": _correct,
        "streams_add": _add,
        "streams_match": _match,
        "streams_cut": _cut,
    }
)


def _parts(x: Tensor, num_streams: int) -> Tensor:
    return x.view(x.shape[0], num_streams, x.shape[1] // num_streams)


def _mixed(x: Tensor, scores: Tensor, weight: Tensor, active: int) -> Results:
    streams = scores.shape[1]
    factors = torch.tanh(scores) @ weight.t()
    sizes = (torch.tanh(scores).abs() @ weight.abs().t()).view(-1, streams, streams)
    parts = _parts(x, streams)
    value = parts + torch.einsum("tij,tjn->tin", factors.view(-1, streams, streams), parts)
    size = parts.abs() + torch.einsum("tij,tjn->tin", sizes, parts.abs())
    slack = _SLACK * size
    return [(value.flatten(1), slack.flatten(1)), (value[:, active], slack[:, active])]


def _corrected(
    x: Tensor, delta: Tensor, scores: Tensor, weight: Tensor, scale: Tensor | None, active: int
) -> Results:
    parts = _parts(x, scores.shape[1])
    factors = torch.tanh(scores) @ weight.t() + 1.0
    sizes = torch.tanh(scores).abs() @ weight.abs().t() + 1.0
    change = (delta - parts[:, active]).unsqueeze(1)
    reach = (delta.abs() + parts[:, active].abs()).unsqueeze(1)
    value = parts + factors.unsqueeze(2) * change
    slack = _SLACK * (parts.abs() + sizes.unsqueeze(2) * reach)
    factor = torch.ones(()) if scale is None else scale
    scaled = value[:, active] * factor, slack[:, active] * factor.abs()
    return [(value.flatten(1), slack.flatten(1)), scaled]


def _added(x: Tensor, delta: Tensor) -> Results:
    parts = _parts(x, x.shape[1] // delta.shape[1]).clone()
    parts[:, 1:] += delta.unsqueeze(1)
    return [(parts.flatten(1), torch.zeros(()))]


def _matched(x: Tensor, like: Tensor, total: Tensor | None) -> Results:
    own = x.square().mean(-1, keepdim=True).clamp(min=1e-5)
    value = x * (like.square().mean(-1, keepdim=True) / own).sqrt()
    size = value.abs()
    if total is not None:
        value, size = value + total, size + total.abs()
    return [(value, _SLACK * size)]


def _spread_of(x: Tensor, others: Tensor) -> Results:
    parts = _parts(others, others.shape[1] // x.shape[1])
    matched = [_matched(parts[:, i], x, None)[0] for i in range(parts.shape[1])]
    values = [x, *(value for value, _ in matched)]
    slacks = [torch.zeros_like(x), *(slack for _, slack in matched)]
    return [(torch.cat(values, 1), torch.cat(slacks, 1))]


def _cut_of(gate_up: Tensor, num_deviations: float) -> Results:
    gate, up = gate_up.chunk(2, dim=-1)
    if not gate.numel():
        return [(gate_up, torch.zeros(()))]
    cutoff = gate.mean(-1, keepdim=True) + num_deviations * gate.std(-1, False, keepdim=True)
    value = torch.cat((torch.relu(gate - cutoff), up), -1)
    size = torch.cat(((gate.abs() + gate.abs().amax(-1, keepdim=True)), torch.zeros_like(up)), -1)
    return [(value, _SLACK * size)]


STREAM_ORACLES: Mapping[str, Callable[..., Results]] = MappingProxyType(
    {
        "streams_spread": _spread_of,
        "streams_mix": _mixed,
        "streams_correct": _corrected,
        "streams_add": _added,
        "streams_match": _matched,
        "streams_cut": _cut_of,
    }
)
