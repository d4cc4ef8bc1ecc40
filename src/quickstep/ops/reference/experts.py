"""A mixture of experts: the definition of `OpTable.route`, and of `OpTable.experts` from other ops.

The router's choice breaks ties towards the lower number. Experts are computed one by one; those of
a token are added in the order of their numbers, in float32, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.ops.reference import elementary
from quickstep.ops.reference.exact_math import exp_nonpositive, round_rows, sigmoid
from quickstep.ops.reference.lora import among
from quickstep.ops.table import (
    WITHOUT_GATE,
    ExpertLoRA,
    ExpertParts,
    ExpertWeights,
    LoRAMapping,
    OpTable,
    Routing,
    RoutingRule,
)
from quickstep.ops.tensors import AnyTensor, to_torch
from quickstep.ops.weights import LinearWeight

SUM_BITS = 40  # exact sums of up to 2**13 experts in fp64


def route(
    scores: Tensor,
    rule: RoutingRule,
    selection_bias: AnyTensor | None = None,
    factors: AnyTensor | None = None,
) -> Routing:
    """`OpTable.route`."""
    shares = sigmoid(scores.double()) if rule.sigmoid else _softmax(scores)
    shares = torch.where(shares.isnan().any(-1, keepdim=True), torch.nan, shares)
    worth = shares if selection_bias is None else shares + to_torch(selection_bias).double()
    if rule.num_groups > 1:
        worth = _of_best_groups(worth, rule)
    # a stable sort, as top-k may break ties differently for another number of rows
    order = torch.sort(worth, dim=-1, descending=True, stable=True)[1]
    chosen = order[:, : rule.per_token].contiguous()
    weights = shares.gather(1, chosen)
    if rule.normalise:
        total = weights[:, 0]
        for column in range(1, rule.per_token):
            total = total + weights[:, column]
        weights = weights / total.unsqueeze(1)
    weights = (weights * rule.scale).float()
    if not rule.sigmoid:
        weights = weights.to(scores.dtype).float()
    if factors is not None:
        weights = weights * to_torch(factors)[chosen]
    return Routing(chosen, weights)


def _of_best_groups(worth: Tensor, rule: RoutingRule) -> Tensor:
    """-inf for experts of other groups than the chosen ones."""
    num_tokens, num_experts = worth.shape
    groups = worth.view(num_tokens, rule.num_groups, num_experts // rule.num_groups)
    best = torch.sort(groups, dim=-1, descending=True)[0]
    is_one = min(best.shape[-1], rule.counted_per_group) == 1
    sums = best[..., 0] if is_one else best[..., 0] + best[..., 1]
    order = torch.sort(sums, dim=-1, descending=True, stable=True)[1]
    is_chosen = torch.zeros_like(sums, dtype=torch.bool)
    is_chosen.scatter_(1, order[:, : rule.groups_per_token], True)
    return torch.where(is_chosen.unsqueeze(-1), groups, -torch.inf).flatten(1)


def _softmax(logits: Tensor) -> Tensor:
    """Softmax of each row in fp64, of steps that round the same in every place."""
    wide = logits.double()
    exponentials = exp_nonpositive(wide - wide.amax(-1, keepdim=True))
    # rounded so that the sum is exact, and with it the same in any order
    total = round_rows(exponentials, SUM_BITS).sum(-1, keepdim=True)
    return exponentials / total


def experts(
    ops: OpTable,
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    activation: str,
    lora: ExpertLoRA | None,
    parts: ExpertParts | None = None,
) -> Tensor:
    """`OpTable.experts` with the products, activation and adapters of `ops`.

    A token's experts are the same on every rank, which so meet equally often.
    """
    per_token, flat = routing.chosen.shape[1], routing.chosen.flatten()
    of_rows = routing.weights.flatten()
    by_expert = torch.argsort(flat, stable=True)
    tokens = torch.div(by_expert, per_token, rounding_mode="floor")
    # the one read-back of a layer: how many rows each expert gets decides the shapes
    counts = torch.bincount(flat, minlength=len(weights.gate_up)).tolist()
    shape = x.shape[0], weights.down_proj[0].num_outputs
    result = torch.zeros(shape, dtype=torch.float32, device=x.device)
    start = 0
    for index, count in enumerate(counts):
        if count == 0:
            continue
        stop = start + count
        rows = tokens[start:stop]
        matrices = weights.gate_up[index], weights.down_proj[index]
        adapters = None
        if lora is not None:
            adapters = (lora.first_module + 2 * index, among(lora.mapping, rows))
        expert_weight, inputs = of_rows[by_expert[start:stop]].unsqueeze(1), x[rows]
        if weights.weighs_inputs:
            inputs = (inputs.float() * expert_weight).to(x.dtype)
            expert_weight = torch.ones_like(expert_weight)
        output = _expert(ops, matrices, inputs, activation, adapters, parts)
        result.index_add_(0, rows, output.float() * expert_weight)  # a token is in `rows` once
        start = stop
    return result.to(x.dtype)


def _expert(
    ops: OpTable,
    weights: tuple[LinearWeight, LinearWeight],
    x: Tensor,
    activation: str,
    lora: tuple[int, LoRAMapping] | None,
    parts: ExpertParts | None,
) -> Tensor:
    """[T, C] -> [T, C], of one expert: down_proj(act(gate(x)) * up(x)), or down_proj(act(up(x)));
    `lora` has the number of its first matrix.
    """
    gate_up = ops.linear(x, weights[0])
    if lora is not None:
        ops.add_lora_(gate_up, x, *lora)
    if activation in WITHOUT_GATE:
        activated = (ops.activation or elementary.activation)(gate_up, None, activation)
    else:
        activated = ops.gated_activation(gate_up, activation)
    if parts is not None:
        activated = parts.ranks.gather(activated, parts.own, weights[1].num_inputs)
    output = ops.linear(activated, weights[1])
    if lora is not None:
        ops.add_lora_(output, activated, lora[0] + 1, lora[1])
    return output
