"""A mixture of experts, row by row the same bits whatever the batch. Not captured on a CPU: the
reference's routing and loop over experts are torch's.
"""

from __future__ import annotations

from torch import Tensor

from quickstep.model.adapters.lora_modules import Projection, expert_number, module_number
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.decoder_weights import MoEWeights
from quickstep.ops.reference.experts import experts, route
from quickstep.ops.table import ExpertLoRA, LoRAMapping, OpTable


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
    routing = (ops.route or route)(scores, moe.experts_per_token, moe.normalise)
    arguments = (x, routing, weights.experts, spec.activation, adapters)
    if ops.experts is None or weights.experts.data is None:
        return experts(ops, *arguments)
    return ops.experts(*arguments)
