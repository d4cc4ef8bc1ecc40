"""A second, independent op table: the plainest PyTorch, dense attention over gathered KV.

The goldens run with the table that an engine would use. This one is not exact, and shows that the
tests of exactness notice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quickstep.ops.reference.paged_attention import move_kv
from quickstep.ops.reference.quantize import quantize
from quickstep.ops.table import (
    AttentionParams,
    LoRAAdapter,
    LoRAMapping,
    LoRAPart,
    OpTable,
    PagedLayout,
)
from quickstep.ops.weights import LinearWeight, QuantizedWeight


def pack_linear(weight: Tensor, bias: Tensor | None) -> LinearWeight:
    nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
    return LinearWeight(weight, bias, weight.shape[0], weight.shape[1], nbytes)


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    return torch.nn.functional.linear(x, weight.data, weight.bias)


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None) -> LinearWeight:
    return pack_linear(weight.dequantized(), bias)


def embedding(token_ids: Tensor, weight: Tensor | LinearWeight, dtype: torch.dtype) -> Tensor:
    data = weight.data if isinstance(weight, LinearWeight) else weight
    return data[token_ids].to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + offset)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    assert not interleaved
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(part.to(x.dtype) for part in rotated), rest], dim=-1)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_cache.view(-1, *k.shape[1:])[slots] = k
    v_cache.view(-1, *v.shape[1:])[slots] = v


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: PagedLayout,
    params: AttentionParams,
    sinks: Tensor | None,
) -> Tensor:
    outputs = []
    groups = q.shape[1] // k_cache.shape[2]
    for row, context_len in enumerate(layout.context_lens):
        start, stop = layout.row_offsets[row], layout.row_offsets[row + 1]
        blocks = layout.block_tables[row].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:context_len].repeat_interleave(groups, dim=1).float()
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("thd,shd->hts", q[start:stop].float(), keys) * params.scale
        if params.softcap is not None:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        at = layout.positions[start:stop].unsqueeze(1)
        distance = at - torch.arange(context_len).unsqueeze(0)
        visible = distance >= 0
        if params.window is not None:
            visible &= distance < params.window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.view(-1, 1, 1).expand(-1, stop - start, 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., :context_len]
        outputs.append(torch.einsum("hts,shd->thd", weights, values).to(q.dtype))
    return torch.cat(outputs)


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def logits(
    hidden: Tensor,
    weight: LinearWeight,
    divisor: float,
    cap: float | None,
    lora: tuple[int, LoRAMapping] | None,
) -> Tensor:
    product = linear(hidden, weight)
    if lora is not None:
        add_lora_(product, hidden, *lora)
    wide = product.float() / divisor
    return wide if cap is None else (wide / cap).tanh() * cap


def pack_lora(modules: Sequence[Sequence[LoRAPart]]) -> LoRAAdapter:
    return LoRAAdapter(modules, 0)


def add_lora_(y: Tensor, x: Tensor, module: int, mapping: LoRAMapping) -> None:
    for adapter, tokens in mapping.groups:
        for part in adapter.data[module]:
            columns = slice(part.first_output, part.first_output + part.num_outputs)
            low = part.a[x[tokens]] if part.is_embedding else x[tokens] @ part.a.t()
            if part.b is None:
                y[tokens, columns] = low
            else:
                y[tokens, columns] += part.scale * (low @ part.b.t())


NAIVE_OPS = OpTable(
    name="naive",
    pack_linear=pack_linear,
    pack_quantized=pack_quantized,
    quantize=quantize,
    linear=linear,
    pack_lora=pack_lora,
    add_lora_=add_lora_,
    embedding=embedding,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rotary=rotary,
    write_kv=write_kv,
    paged_attention=paged_attention,
    move_kv=move_kv,
    gated_activation=gated_activation,
    logits=logits,
    scratch_bytes=0,
)
