"""The part of a layer that computes on each token by itself: an MLP, or a mixture of experts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from quickstep.model.adapters.lora_modules import Projection, expert_number, module_number
from quickstep.model.decoder_weights import MLPWeights, MoEWeights
from quickstep.model.layers.layer_ops import LayerOps
from quickstep.ops.table import ExpertLoRA, ExpertParts, LoRAMapping, RoutingRule

if TYPE_CHECKING:
    from torch import Tensor


class FeedForward(Protocol):
    """`[T, hidden] -> [T, hidden]`."""

    def forward(self, x: Tensor, lora: LoRAMapping | None) -> Tensor:
        """Of x [T, hidden], with the tokens' adapters."""


def make_feed_forward(ops: LayerOps, weights: MLPWeights | MoEWeights) -> FeedForward:
    """What the weights are of."""
    if isinstance(weights, MoEWeights):
        return MixtureOfExperts(ops, weights)
    return MLP(ops, weights, ops.spec.intermediate_size)


class MLP:
    """`down_proj` of the gated activation of `gate_up`."""

    def __init__(self, ops: LayerOps, weights: MLPWeights, width: int) -> None:
        self._ops = ops
        self._weights = weights
        self._width = width

    def forward(self, x: Tensor, lora: LoRAMapping | None) -> Tensor:
        """`FeedForward.forward`."""
        ops, table, weights, spec = self._ops, self._ops.table, self._weights, self._ops.spec
        if lora is None and table.gated_linear is not None:
            x = table.gated_linear(x, weights.gate_up, spec.activation)
        else:
            gate_up = ops.linear(x, weights.gate_up, Projection.GATE_UP, lora)
            x = table.gated_activation(gate_up, spec.activation)
        x = ops.gather(x, self._width)
        x = ops.linear(x, weights.down_proj, Projection.DOWN_PROJ, lora)
        return ops.gather(x, spec.hidden_size)


class MixtureOfExperts:
    """Each token's experts of a layer, weighted; row by row the same bits whatever the batch."""

    def __init__(self, ops: LayerOps, weights: MoEWeights) -> None:
        assert ops.spec.layers[ops.index].sparse
        self._ops = ops
        self._weights = weights
        self._shared: MLP | None = None
        if weights.shared is not None and ops.spec.moe is not None:
            self._shared = MLP(ops, weights.shared, ops.spec.moe.shared_width)

    def forward(self, x: Tensor, lora: LoRAMapping | None) -> Tensor:
        """`FeedForward.forward`."""
        ops, table, weights, spec = self._ops, self._ops.table, self._weights, self._ops.spec
        moe = spec.moe
        assert moe is not None
        scores = table.linear(x, weights.router)
        adapters = None
        if lora is not None:
            table.add_lora_(scores, x, module_number(ops.index, Projection.ROUTER), lora)
            adapters = ExpertLoRA(lora, expert_number(spec, ops.index, 0, Projection.GATE_UP))
        route, experts = table.route, table.experts
        of_ranks = table.ranks is not None and table.reads_lengths  # a GPU's op knows no ranks
        if route is None or experts is None or weights.experts.data is None or of_ranks:
            from quickstep.ops.reference import experts as reference  # it computes with torch

            route, experts = route or reference.route, partial(reference.experts, table)
        rule = RoutingRule(
            moe.experts_per_token,
            moe.normalise,
            moe.sigmoid,
            moe.num_groups,
            moe.groups_per_token,
            moe.weight_scale,
            moe.counted_per_group,
        )
        routing = route(scores, rule, weights.selection_bias)
        parts = None
        if table.ranks is not None:
            parts = ExpertParts(table.ranks, ops.shard.outputs(moe.intermediate_size))
        y = experts(x, routing, weights.experts, spec.activation, adapters, parts)
        y = ops.gather(y, spec.hidden_size)
        return y if self._shared is None else y + self._shared.forward(x, None)
