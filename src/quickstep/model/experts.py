"""A mixture of experts, row by row the same bits whatever the batch. In torch, so not captured.

The router's choice breaks ties towards the lower number. Each step is per row or elementwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.model.adapters.lora_modules import Projection, expert_number, module_number
from quickstep.model.decoder import MoEWeights
from quickstep.model.decoder_spec import ModelSpec, MoESpec
from quickstep.ops.reference.exact_math import exp_nonpositive, round_rows
from quickstep.ops.reference.experts import experts
from quickstep.ops.table import ExpertLoRA, LoRAMapping, OpTable

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
    adapters = None
    if lora is not None:
        ops.add_lora_(scores, x, module_number(layer, Projection.ROUTER), lora)
        first_module = expert_number(spec, layer, 0, Projection.GATE_UP)
        adapters = ExpertLoRA(lora, first_module)
    chosen, expert_weights = route(scores, moe)
    # rounded as the models were trained
    expert_weights = expert_weights.float().to(x.dtype).float()
    arguments = (x, chosen, expert_weights, weights.experts, spec.activation, adapters)
    if ops.experts is None or weights.experts.data is None:
        return experts(ops, *arguments)
    return ops.experts(*arguments)
