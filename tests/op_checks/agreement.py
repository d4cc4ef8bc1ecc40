"""How far an implementation may be from the float64 result: at most twice as far as the reference.

`oracle` is the naive float64 computation, written apart from the reference (dense masked softmax,
plain sums). Distance is measured twice per output, as the largest and as the root-mean-square
error over the elements, after an allowance for sums in fp32 (`slack`): the reference's sums are
nearly exact, and fp32 accumulation in any order is what an implementation is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from op_checks.cases import AttentionCase, Case, bind
from op_checks.experts_cases import Matrix
from op_checks.placement import moved
from op_checks.stream_cases import STREAM_ORACLES
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import WITHOUT_GATE, LoRAPart, OpTable, RoutingRule
from quickstep.ops.tensors import read_heads, to_torch
from quickstep.ops.weights import QuantizedWeight

__all__ = ["Agreement", "agreement", "agreement_of_each", "oracle"]

_FP32_ROUNDOFF = 2.0**-24


class Agreement(msgspec.Struct, frozen=True):
    """The distance of one case: `ratio` is error over allowed error, and `ok` means <= 1."""

    case: str
    ratio: float
    error: float
    reference_error: float

    @property
    def ok(self) -> bool:
        """Whether the implementation is close enough (false for NaN)."""
        return self.ratio <= 1.0


def agreement(
    ops: OpTable, case: Case | AttentionCase, device: torch.device | None = None
) -> Agreement:
    """Compare `ops`, on `device` if given, with float64 on one case; the worst output and measure
    counts.
    """
    return agreement_of_each([ops], case, device)[0]


def agreement_of_each(
    tables: Sequence[OpTable], case: Case | AttentionCase, device: torch.device | None = None
) -> list[Agreement]:
    """The `agreement` of each table; what they are compared with is computed once for all, where
    the case is.
    """
    reference, exact = _run(reference_ops(), case), oracle(case)
    there = moved(case, device)
    results = [moved(_run(ops, there), torch.device("cpu")) for ops in tables]
    return [_agreement(case.name, result, reference, exact) for result in results]


def _agreement(
    name: str,
    results: Sequence[Tensor],
    references: Sequence[Tensor],
    oracles: Sequence[tuple[Tensor, Tensor]],
) -> Agreement:
    worst = Agreement(name, 0.0, 0.0, 0.0)
    for got, reference, (exact, slack) in zip(results, references, oracles, strict=True):
        if got.shape != reference.shape or got.dtype != reference.dtype:
            return Agreement(name, torch.inf, torch.inf, 0.0)
        if got.numel():
            worst = max(worst, _distance(name, got, reference, exact, slack), key=_badness)
    return worst


def _badness(item: Agreement) -> tuple[float, float]:
    return (torch.inf if item.ratio != item.ratio else item.ratio, item.error)


def _distance(name: str, got: Tensor, reference: Tensor, exact: Tensor, slack: Tensor) -> Agreement:
    error = (got.double() - exact).abs()
    base = (reference.double() - exact).abs()
    excess = (error - slack).clamp(min=0.0)
    ratios = [_ratio(excess.max(), base.max()), _ratio(_rms(excess), _rms(base))]
    worst = torch.inf if any(ratio != ratio for ratio in ratios) else max(ratios)
    return Agreement(name, worst, error.max().item(), base.max().item())


def _ratio(excess: Tensor, base: Tensor) -> float:
    """Over 1 where the excess is more than twice the reference's error."""
    found, allowed = excess.item(), 2.0 * base.item()
    if found == 0.0:
        return 0.0
    return found / allowed if allowed > 0.0 else torch.inf


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _run(ops: OpTable, case: Case | AttentionCase) -> tuple[Tensor, ...]:
    if isinstance(case, AttentionCase):
        return (ops.paged_attention(*case.arguments),)
    return bind(ops, case)(*case.tokens)


def oracle(case: Case | AttentionCase) -> list[tuple[Tensor, Tensor]]:
    """Per output its float64 value and the slack of each element (fp64, broadcastable)."""
    if isinstance(case, AttentionCase):
        return [_attention(case)]
    wide = [x.double() if x.is_floating_point() else x for x in case.tokens]
    fixed = [x.double() if isinstance(x, Tensor) else x for x in case.fixed]
    return _ORACLES[case.op](*wide, *fixed)


def _exactly(*values: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(value, torch.zeros(())) for value in values]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    value, size = x @ weight.t(), x.abs() @ weight.abs().t()
    if bias is not None:
        value, size = value + bias, size + bias.abs()
    return [(value, 4 * _FP32_ROUNDOFF * size)]


def _lora(
    y: Tensor, x: Tensor, ids: Tensor, *adapters: Sequence[LoRAPart]
) -> list[tuple[Tensor, Tensor]]:
    value, size = y.clone(), y.abs()
    for index, parts in enumerate(adapters):
        tokens = (ids == index).nonzero().flatten()
        for part in parts:
            a, b = to_torch(part.a).double(), _b_of(part)
            columns = slice(part.first_output, part.first_output + b.shape[0])
            scale = part.scale
            if part.rank_scales is not None:
                scale = scale * to_torch(part.rank_scales).double()
            if part.is_embedding:
                low, low_size = a[x[tokens]], a[x[tokens]].abs()
            else:
                low, low_size = x[tokens] @ a.t(), x[tokens].abs() @ a.abs().t()
            if part.b is None:
                value[tokens, columns], size[tokens, columns] = 0.0, 0.0
            value[tokens, columns] += scale * low @ b.t()
            size[tokens, columns] += scale * low_size @ b.abs().t()
            if part.bias is not None:
                value[tokens, columns] += to_torch(part.bias).double()
                size[tokens, columns] += to_torch(part.bias).double().abs()
    return [(value, 4 * _FP32_ROUNDOFF * size)]


def _b_of(part: LoRAPart) -> Tensor:
    """The identity of a complete matrix."""
    if part.b is None:
        return torch.eye(part.rank, dtype=torch.float64)
    return to_torch(part.b).double()


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> list[tuple[Tensor, Tensor]]:
    value = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)
    return [(value, 8 * _FP32_ROUNDOFF * value.abs())]


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> list[tuple[Tensor, Tensor]]:
    return [*_rms_norm(x + residual, weight, eps, offset), *_exactly(x + residual)]


def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float
) -> list[tuple[Tensor, Tensor]]:
    distance = x - x.mean(-1, keepdim=True)
    scale = (distance.square().mean(-1, keepdim=True) + eps).sqrt()
    value, size = distance / scale * (weight + offset), x.abs().amax(-1, keepdim=True) / scale
    size = size * (weight + offset).abs()
    if bias is not None:
        value, size = value + bias, size + bias.abs()
    return [(value, 8 * _FP32_ROUNDOFF * size)]


def _add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
) -> list[tuple[Tensor, Tensor]]:
    return [*_layer_norm(x + residual, weight, bias, eps, offset), *_exactly(x + residual)]


def _activation(x: Tensor, *others: Any) -> list[tuple[Tensor, Tensor]]:
    *factor, kind = others
    functional = torch.nn.functional
    if kind.startswith("relu"):
        value = functional.relu(x) ** (2 if kind == "relu2" else 1)
    elif kind == "silu":
        value = functional.silu(x)
    else:
        value = functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    size = x.abs().clamp(min=1.0) * x.abs()
    for other in factor:
        value, size = value * other, size * other.abs()
    return [(value, 8 * _FP32_ROUNDOFF * size)]


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> list[tuple[Tensor, Tensor]]:
    value = x.clone()
    half = cos.shape[-1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        value[..., a] = x[..., a] * cos[:, None, i] - x[..., b] * sin[:, None, i]
        value[..., b] = x[..., b] * cos[:, None, i] + x[..., a] * sin[:, None, i]
    return [(value, 4 * _FP32_ROUNDOFF * x.abs().amax(-1, keepdim=True))]


def _rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    interleaved: bool,
    *caches: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    rotated = [_rotary(one, cos, sin, interleaved)[0] for one in (q, k)]
    return [*rotated, *_exactly(v)]


def _latent_keys(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float, interleaved: bool
) -> list[tuple[Tensor, Tensor]]:
    (size,) = weight.shape
    parts = [
        *_rms_norm(x[:, :size].unsqueeze(1), weight, eps, 0.0),
        *_rotary(x[:, size:].unsqueeze(1), cos, sin, interleaved),
    ]
    return [_side_by_side(parts)]


def _latent_queries(
    q: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, interleaved: bool
) -> list[tuple[Tensor, Tensor]]:
    inputs = weight.shape[2]
    turned = _rotary(q[..., inputs:], cos, sin, interleaved)
    return [_side_by_side([*_latent_values(q[..., :inputs], weight), *turned])]


def _latent_values(x: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    value = torch.einsum("thc,hnc->thn", x, weight)
    size = torch.einsum("thc,hnc->thn", x.abs(), weight.abs())
    return [(value, 4 * _FP32_ROUNDOFF * size)]


def _latent_write(k: Tensor, slots: Tensor, cache: Tensor) -> list[tuple[Tensor, Tensor]]:
    return _write_kv(k, k, slots, cache, cache)[:1]


def _side_by_side(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    values = [value for value, _ in parts]
    slacks = [slack.expand_as(value) for value, slack in parts]
    return torch.cat(values, -1), torch.cat(slacks, -1)


def _gated_activation(gate_up: Tensor, kind: str) -> list[tuple[Tensor, Tensor]]:
    gate, up = gate_up.chunk(2, dim=-1)
    functional = torch.nn.functional
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
        value = gate * torch.sigmoid(1.702 * gate) * up
    elif kind == "silu":
        value = functional.silu(gate) * up
    else:
        value = functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up
    return [(value, 8 * _FP32_ROUNDOFF * (gate * up).abs())]


def _gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str
) -> list[tuple[Tensor, Tensor]]:
    """The slack bounds what errors of the product change."""
    [(gate_up, size)] = _linear(x, weight, None if bias is None else bias.double())
    [(value, rounding)] = _gated_activation(gate_up, kind)
    gate, up = gate_up.abs().chunk(2, dim=-1)
    of_gate, of_up = size.chunk(2, dim=-1)
    return [(value, rounding + 2 * ((up + 1) * of_gate + gate * of_up))]


def _add(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    return _exactly(a + b)


def _scale(x: Tensor, factor: float) -> list[tuple[Tensor, Tensor]]:
    return _exactly(x * factor)


def _logits(
    hidden: Tensor, weight: Tensor, divisor: float, softcap: float | None
) -> list[tuple[Tensor, Tensor]]:
    [(product, slack)] = _linear(hidden, weight, None)
    value = product / divisor
    if softcap is not None:
        value = softcap * torch.tanh(value / softcap)
    return [(value, slack / divisor + 2 * _FP32_ROUNDOFF * value.abs())]


def _attention(case: AttentionCase) -> tuple[Tensor, Tensor]:
    outputs, slacks = [], []
    per_kv_head = case.q.shape[1] // case.k_cache.shape[2]
    offset = 0
    for table, (start, count) in zip(case.block_tables.long(), case.rows, strict=True):
        queries = case.q[offset : offset + count].double()
        offset += count
        k, v = (
            read_heads(cache[table].flatten(0, 1)[: start + count]).repeat_interleave(
                per_kv_head, 1
            )
            for cache in (case.k_cache, case.k_cache if case.v_cache is None else case.v_cache)
        )
        v = v[..., : case.params.value_size]
        scores = torch.einsum("qhd,khd->hqk", queries, k) * case.params.scale
        size = torch.einsum("qhd,khd->hqk", queries.abs(), k.abs()) * abs(case.params.scale)
        if case.params.softcap is not None:
            scores = (scores / case.params.softcap).tanh() * case.params.softcap
        distance = torch.arange(start, start + count)[:, None] - torch.arange(start + count)
        hidden = (distance < 0) | (distance >= (case.params.window or start + count))
        if case.params.chunk is not None:
            in_chunk = torch.arange(start, start + count)[:, None] % case.params.chunk
            hidden |= distance > in_chunk
        scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
        size = size.amax(-1)
        if case.sinks is not None:
            sink = case.sinks.double().view(-1, 1, 1)
            scores = torch.cat((scores, sink.expand(-1, count, -1)), -1)
            size = torch.maximum(size, sink.squeeze(-1).abs().nan_to_num(posinf=0.0))
        p = scores.softmax(-1)[..., : start + count]
        outputs.append(torch.einsum("hqk,khd->qhd", p, v))
        # an error e of a score scales its p by 1 + e
        spread = (16 + 8 * size).t().unsqueeze(-1)  # [Q, H, 1]
        slacks.append(_FP32_ROUNDOFF * spread * torch.einsum("hqk,khd->qhd", p, v.abs()))
    return torch.cat(outputs), torch.cat(slacks)


def _write_kv(
    k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> list[tuple[Tensor, Tensor]]:
    if k_cache.dtype == torch.float8_e4m3fn:
        return _exactly(_e4m3(k), _e4m3(v))
    if k_cache.shape[-1] == k.shape[-1]:
        return _exactly(k, v)
    if k_cache.shape[-1] == k.shape[-1] + 4:
        return _exactly(_codes(k), _codes(v))
    return _exactly(_int4_bytes(k), _int4_bytes(v))


def _codes(heads: Tensor) -> Tensor:
    """The bytes of int8 heads [..., D + 4], as numbers; computed in numpy's float32."""
    wide = heads.cpu().numpy().astype(np.float32)
    most = np.abs(wide).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    quants = np.rint(wide * inverse).astype(np.int8)
    scales = np.ascontiguousarray(most / np.float32(127)).view(np.int8)
    found = torch.from_numpy(np.concatenate((quants, scales), -1))
    return found.to(heads.device, torch.float64)


def _int4_bytes(heads: Tensor) -> Tensor:
    """The bytes of int4 heads [..., W], as numbers; computed in numpy's float32."""

    def bits(value: np.ndarray) -> np.ndarray:
        """Rounded to bfloat16, half to even."""
        wide = value.view(np.uint32)
        return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)

    def wide(value: np.ndarray) -> np.ndarray:
        return (value.astype(np.uint32) << 16).view(np.float32)

    parts = []
    values = heads.cpu().numpy().astype(np.float32)
    for begin in range(0, values.shape[-1], 32):
        group = values[..., begin : begin + 32]
        least = bits(group.min(-1, keepdims=True))
        step = group.max(-1, keepdims=True) / np.float32(15) - wide(least) / np.float32(15)
        scale = bits(np.where(step < 1e-30, np.float32(0), step))
        inverse = np.divide(1, wide(scale), out=np.zeros_like(step), where=scale > 0)
        quants = np.rint(np.clip((group - wide(least)) * inverse, 0, 15)).astype(np.uint8)
        packed = quants[..., 0::2] | quants[..., 1::2] << 4
        pair = np.concatenate((scale, least), -1).view(np.uint8)
        parts.append(np.concatenate((pair, packed), -1))
    return torch.from_numpy(np.concatenate(parts, -1)).to(heads.device, torch.float64)


def _embedding(
    token_ids: Tensor, weight: Tensor, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    return _exactly(weight[token_ids])


def _quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """The linear layer on activations and weights that stand for their quantized values."""
    values = torch.zeros_like(x)
    largest = 448 if weight.is_float8 else 127
    for start in range(0, x.shape[1], weight.group_size):
        part = x[:, start : start + weight.group_size].float()
        most = part.abs().max(dim=1, keepdim=True).values
        scaled = part * torch.div(torch.full_like(most, largest), most)
        quants = _e4m3(scaled) if weight.is_float8 else scaled.round()
        scaled = quants.double() * torch.div(most, torch.full_like(most, largest)).double()
        values[:, start : start + part.shape[1]] = scaled.masked_fill(most < 1e-30, 0.0)
    return _linear(values, weight.dequantized().double(), bias)


def _experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    activation: str,
    matrices: tuple[tuple[Matrix, ...], tuple[Matrix, ...]],
) -> list[tuple[Tensor, Tensor]]:
    if activation in WITHOUT_GATE:
        return _ungated_experts(x, chosen, shares, activation, matrices)
    return _experts_lora(x, chosen, shares, chosen[:, 0] * 0 - 1, activation, matrices, ())


def _ungated_experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    activation: str,
    matrices: tuple[tuple[Matrix, ...], tuple[Matrix, ...]],
) -> list[tuple[Tensor, Tensor]]:
    """Token by token, of weighted inputs: with one of 1 or -1, no rounding comes before."""
    value, slack = torch.zeros_like(x), torch.zeros_like(x)
    for token in range(x.shape[0]):
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            up, size = _adapted(x[token, None] * share, matrices[0][expert], ())
            [(middle, rounding)] = _activation(up, activation)
            rounding = rounding + 2 * (up.abs() + size) * size
            output, output_size = _adapted(middle, matrices[1][expert], ())
            down, _ = matrices[1][expert]
            value[token] += output[0]
            slack[token] += (output_size + rounding @ _wide(down).abs().t())[0]
    return [(value, 2 * slack + 4 * _FP32_ROUNDOFF * value.abs())]


def _route(
    scores: Tensor,
    rule: RoutingRule,
    selection_bias: Tensor | None,
    factors: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Token by token; of equal experts the lower ones."""
    per_token, num_experts = rule.per_token, scores.shape[1]
    chosen = torch.zeros(scores.shape[0], per_token, dtype=torch.int64, device=scores.device)
    value = torch.zeros_like(scores)
    for token, shares in enumerate(scores.sigmoid() if rule.sigmoid else scores.softmax(-1)):
        worth = shares
        if rule.is_plain:  # below exp(-708) all are equal
            worth = (scores[token] - scores[token].max()).clamp(min=-708.0)
        if selection_bias is not None:
            worth = shares + selection_bias.to(shares)
        size = num_experts // rule.num_groups
        groups = [range(first, first + size) for first in range(0, num_experts, size)]
        sums = [sum(sorted(worth[list(group)].tolist())[-2:]) for group in groups]
        best_groups = sorted(range(len(groups)), key=lambda g: (-sums[g], g))
        allowed = {one for g in best_groups[: rule.groups_per_token] for one in groups[g]}
        values = worth.tolist()
        best = sorted(allowed, key=lambda expert: (-values[expert], expert))[:per_token]
        chosen[token] = torch.tensor(best)
        total = shares[best].sum() if rule.normalise else 1.0
        value[token, best] = shares[best] / total * rule.scale
    # both roundings, of which the second may be that of 16 bits
    slack = torch.zeros(())
    if factors is not None:
        value = value * factors.to(value)
        slack = 2 * (_FP32_ROUNDOFF + torch.finfo(value.dtype).eps) * value.abs()
    return [(value, slack), (chosen, torch.zeros(()))]


def _experts_lora(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    ids: Tensor,
    activation: str,
    matrices: tuple[tuple[Matrix, ...], tuple[Matrix, ...]],
    adapters: tuple[Sequence[Sequence[LoRAPart]], ...],
) -> list[tuple[Tensor, Tensor]]:
    """Token by token; the slack bounds what errors of the first products change."""
    value, slack = torch.zeros_like(x), torch.zeros_like(x)
    for token in range(x.shape[0]):
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            parts: list[tuple[Sequence[LoRAPart], ...]] = [(), ()]
            if ids[token] >= 0:
                parts = [(one,) for one in adapters[ids[token]][2 * expert : 2 * expert + 2]]
            gate_up, size = _adapted(x[token, None], matrices[0][expert], parts[0])
            [(middle, rounding)] = _gated_activation(gate_up, activation)
            gate, up = gate_up.abs().chunk(2, dim=-1)
            of_gate, of_up = size.chunk(2, dim=-1)
            rounding = rounding + 2 * ((up + 1) * of_gate + gate * of_up)
            output, output_size = _adapted(middle, matrices[1][expert], parts[1])
            down, _ = matrices[1][expert]
            value[token] += share * output[0]
            slack[token] += share * (output_size + rounding @ _wide(down).abs().t())[0]
    return [(value, 2 * slack + 4 * _FP32_ROUNDOFF * value.abs())]


def _adapted(
    x: Tensor, matrix: Matrix, parts: Sequence[Sequence[LoRAPart]]
) -> tuple[Tensor, Tensor]:
    """A product with its adapter, and its slack."""
    weight, bias = matrix
    [(value, slack)] = _linear(x, _wide(weight), None if bias is None else bias.double())
    if parts:
        [(value, more)] = _lora(value, x, torch.zeros(1, device=x.device), *parts)
        slack = slack + more
    return value, slack


def _wide(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight.dequantized().double() if isinstance(weight, QuantizedWeight) else weight.double()


def _e4m3(x: Tensor) -> Tensor:
    """Rounded to 4 significant bits, and to multiples of 2**-9."""
    wide = x.double()
    step = torch.exp2(wide.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (wide / step).round() * step


def _quantized_rows(
    token_ids: Tensor, weight: QuantizedWeight, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    value = weight.dequantized()[token_ids].double()
    if weight.is_float8:
        return [(value, 2 * _FP32_ROUNDOFF * value.abs())]
    steps = 2**weight.bits * (1 if weight.sub_scales is None else 15)
    largest = steps * weight.scales[token_ids].double()
    slack = 2 * _FP32_ROUNDOFF * largest.repeat_interleave(weight.group_size, 1)
    return [(value, slack)]


_ORACLES: Mapping[str, Callable[..., list[tuple[Tensor, Tensor]]]] = MappingProxyType(
    {
        "linear": _linear,
        "quantized_linear": _quantized_linear,
        "lora": _lora,
        "route": _route,
        "experts": _experts,
        "experts_lora": _experts_lora,
        "embedding": _embedding,
        "packed_rows": _embedding,
        "quantized_rows": _quantized_rows,
        "rms_norm": _rms_norm,
        "add_rms_norm": _add_rms_norm,
        "rotary": _rotary,
        "write_kv": _write_kv,
        "rotary_write_kv": _rotary_write_kv,
        "gated_activation": _gated_activation,
        "layer_norm": _layer_norm,
        "add_layer_norm": _add_layer_norm,
        "activation": _activation,
        "gated_linear": _gated_linear,
        "add": _add,
        "scale": _scale,
        "logits": _logits,
        "latent_keys": _latent_keys,
        "latent_queries": _latent_queries,
        "latent_values": _latent_values,
        "latent_write": _latent_write,
        **STREAM_ORACLES,
    }
)
