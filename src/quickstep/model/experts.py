"""A mixture of experts, row by row the same bits whatever the batch. In torch, so not captured.

Every token's experts are added in the order of their numbers, in float32, and rounded once; the
choice breaks ties towards the lower number. Each step is per row or elementwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.model.adapters.lora_modules import (
    Projection,
    among,
    expert_number,
    module_number,
)
from quickstep.model.decoder import MLPWeights, MoEWeights
from quickstep.model.decoder_spec import ModelSpec, MoESpec
from quickstep.ops.reference.exact_math import exp_nonpositive, round_rows
from quickstep.ops.table import LoRAMapping, OpTable

__all__ = ["mixture_of_experts", "route"]

_SUM_BITS = 40  # exact sums of up to 2**13 experts in fp64


def route(scores: Tensor, moe: MoESpec) -> tuple[Tensor, Tensor]:
    """Experts of each token and their weights, each [T, experts_per_token], the best first, from
    the router's outputs [T, experts].
    """
    scores = _softmax(scores)
    # a stable sort, as top-k may break ties differently for another number of rows
    ranked, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    chosen = order[:, : moe.experts_per_token].contiguous()
    expert_weights = ranked[:, : moe.experts_per_token].contiguous()
    if moe.normalise:
        total = expert_weights[:, 0]
        for column in range(1, moe.experts_per_token):
            total = total + expert_weights[:, column]
        expert_weights = expert_weights / total.unsqueeze(1)
    return chosen, expert_weights


def _softmax(logits: Tensor) -> Tensor:
    """Softmax of each row in fp64, of steps that round the same in every place."""
    wide = logits.double()
    exponentials = exp_nonpositive(wide - wide.amax(-1, keepdim=True))
    # rounded so that the sum is exact, and with it the same in any order
    total = round_rows(exponentials, _SUM_BITS).sum(-1, keepdim=True)
    return exponentials / total


def mixture_of_experts(
    ops: OpTable,
    weights: MoEWeights,
    x: Tensor,
    spec: ModelSpec,
    layer: int,
    lora: LoRAMapping | None,
) -> Tensor:
    """[T, C] -> [T, C]: each token's experts of a layer, weighted, with its adapter."""
    moe = spec.moe
    assert moe is not None
    scores = ops.linear(x, weights.router)
    if lora is not None:
        ops.add_lora_(scores, x, module_number(layer, Projection.ROUTER), lora)
    chosen, expert_weights = route(scores, moe)
    # rounded as the models were trained
    expert_weights = expert_weights.float().to(x.dtype).float().flatten()
    experts = chosen.flatten()
    by_expert = torch.argsort(experts, stable=True)
    tokens = torch.div(by_expert, moe.experts_per_token, rounding_mode="floor")
    # the one read-back of a layer: how many rows each expert gets decides the shapes
    counts = torch.bincount(experts, minlength=moe.num_experts).tolist()
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for index, count in enumerate(counts):
        if count == 0:
            continue
        stop = start + count
        rows = tokens[start:stop]
        numbers = _numbers(spec, layer, index)
        of_rows = None if lora is None else among(lora, rows)
        expert = weights.experts[index]
        output = _expert(ops, expert, x[rows], spec.activation, numbers, of_rows)
        expert_weight = expert_weights[by_expert[start:stop]].unsqueeze(1)
        result.index_add_(0, rows, output.float() * expert_weight)  # a token is in `rows` once
        start = stop
    return result.to(x.dtype)


def _numbers(spec: ModelSpec, layer: int, expert: int) -> tuple[int, int]:
    """Of an expert's two matrices, for adapters."""
    return (
        expert_number(spec, layer, expert, Projection.GATE_UP),
        expert_number(spec, layer, expert, Projection.DOWN_PROJ),
    )


def _expert(
    ops: OpTable,
    weights: MLPWeights,
    x: Tensor,
    activation: str,
    numbers: tuple[int, int],
    lora: LoRAMapping | None,
) -> Tensor:
    """[T, C] -> [T, C], of one expert: down_proj(act(gate(x)) * up(x)), with adapters."""
    gate_up = ops.linear(x, weights.gate_up)
    if lora is not None:
        ops.add_lora_(gate_up, x, numbers[0], lora)
    activated = ops.gated_activation(gate_up, activation)
    output = ops.linear(activated, weights.down_proj)
    if lora is not None:
        ops.add_lora_(output, activated, numbers[1], lora)
    return output
