"""The part of a layer that computes on each token by itself: an MLP, or a mixture of experts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from quickstep.model.adapters.lora_modules import Projection, expert_number, module_number
from quickstep.model.decoder_weights import MixtureNorms, MLPWeights, MoEWeights
from quickstep.model.layers.layer_ops import LayerOps, scaled
from quickstep.ops.table import ExpertLoRA, ExpertParts, LoRAMapping, RoutingRule
from quickstep.ops.tensors import rounded

if TYPE_CHECKING:
    from torch import Tensor


class FeedForward(Protocol):
    """`[T, hidden] -> [T, hidden]`."""

    def forward(self, x: Tensor, lora: LoRAMapping | None, stream: Tensor) -> Tensor:
        """Of x [T, hidden], which is the stream normed, with the tokens' adapters."""


def make_feed_forward(ops: LayerOps, weights: MLPWeights | MoEWeights) -> FeedForward:
    """What the weights are of."""
    if isinstance(weights, MoEWeights):
        if weights.mlp is not None and weights.norms is not None:
            return MLPAndExperts(ops, weights, weights.mlp, weights.norms)
        return MixtureOfExperts(ops, weights)
    return MLP(ops, weights, ops.spec.intermediate_size)


class MLP:
    """`down_proj` of the gated activation of `gate_up`."""

    def __init__(self, ops: LayerOps, weights: MLPWeights, width: int) -> None:
        self._ops = ops
        self._weights = weights
        self._width = width

    def forward(self, x: Tensor, lora: LoRAMapping | None, stream: Tensor) -> Tensor:
        """`FeedForward.forward`."""
        del stream
        return self.computed(x, lora)

    def computed(self, x: Tensor, lora: LoRAMapping | None) -> Tensor:
        """Of x [T, hidden]."""
        ops, table, weights, spec = self._ops, self._ops.table, self._weights, self._ops.spec
        gate, cutoff = spec.multipliers.gate, spec.layers[ops.index].gate_cutoff
        if cutoff is not None:
            gate_up = ops.linear(x, weights.gate_up, Projection.GATE_UP, lora)
            # rounded to the activations' dtype, as Gemma was trained
            gate_up = ops.streams.cut(gate_up, rounded(cutoff, x.dtype))
            x = table.gated_activation(gate_up, spec.activation)
        elif not spec.gated:
            x = ops.activation(ops.linear(x, weights.gate_up, Projection.GATE_UP, lora), None)
        elif gate != 1.0:  # up has the factor too, until the product of both
            gate_up = ops.linear(x, weights.gate_up, Projection.GATE_UP, lora)
            x = table.gated_activation(gate_up * gate, spec.activation) * (1.0 / gate)
        elif lora is None and table.gated_linear is not None:
            x = table.gated_linear(x, weights.gate_up, spec.activation)
        else:
            gate_up = ops.linear(x, weights.gate_up, Projection.GATE_UP, lora)
            x = table.gated_activation(gate_up, spec.activation)
        x = ops.gather(x, self._width)
        x = ops.linear(x, weights.down_proj, Projection.DOWN_PROJ, lora)
        return scaled(ops.gather(x, spec.hidden_size), spec.multipliers.mlp)


class MixtureOfExperts:
    """Each token's experts of a layer, weighted; row by row the same bits whatever the batch."""

    def __init__(self, ops: LayerOps, weights: MoEWeights) -> None:
        assert ops.spec.layers[ops.index].sparse
        self._ops = ops
        self._weights = weights
        self._shared: MLP | None = None
        if weights.shared is not None and ops.spec.moe is not None:
            self._shared = MLP(ops, weights.shared, ops.spec.moe.shared_width)

    def forward(self, x: Tensor, lora: LoRAMapping | None, stream: Tensor) -> Tensor:
        """`FeedForward.forward`."""
        del stream
        return self.computed(x, x, lora)

    def computed(self, x: Tensor, routed: Tensor, lora: LoRAMapping | None) -> Tensor:
        """Of x [T, hidden], whose experts are chosen by `routed` [T, hidden]."""
        ops, table, weights, spec = self._ops, self._ops.table, self._weights, self._ops.spec
        moe = spec.moe
        assert moe is not None
        scores = table.linear(routed, weights.router)
        adapters = None
        if lora is not None:
            table.add_lora_(scores, routed, module_number(ops.index, Projection.ROUTER), lora)
            adapters = ExpertLoRA(lora, expert_number(spec, ops.index, 0, Projection.GATE_UP))
        route, experts = table.route, table.experts
        if route is None or experts is None or weights.experts.data is None:
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
        routing = route(scores, rule, weights.selection_bias, weights.factors)
        parts = None
        if table.ranks is not None:
            parts = ExpertParts(table.ranks, ops.shard.outputs(moe.intermediate_size))
        latents, read = weights.latents, x
        if latents is not None:
            read = ops.linear(x, latents[0], Projection.LATENT_IN, lora)
        y = experts(read, routing, weights.experts, spec.activation, adapters, parts)
        y = ops.gather(y, moe.latent_size or spec.hidden_size)
        if latents is not None:
            y = ops.linear(y, latents[1], Projection.LATENT_OUT, lora)
        if self._shared is None:
            return y
        shared = self._shared.computed(x, lora)
        if weights.shared_gate is not None:
            gates = ops.linear(x, weights.shared_gate, Projection.SHARED_GATE, lora)
            shared = ops.gated(shared, gates)
        return y + shared


class MLPAndExperts:
    """The MLP and a mixture of experts, each with its own norms, added."""

    def __init__(
        self, ops: LayerOps, weights: MoEWeights, mlp: MLPWeights, norms: MixtureNorms
    ) -> None:
        self._ops = ops
        self._norms = norms
        self._mlp = MLP(ops, mlp, ops.spec.intermediate_size)
        self._experts = MixtureOfExperts(ops, weights)

    def forward(self, x: Tensor, lora: LoRAMapping | None, stream: Tensor) -> Tensor:
        """`FeedForward.forward`."""
        ops, norms = self._ops, self._norms
        dense = ops.norm(self._mlp.computed(x, lora), norms.mlp)
        routed = ops.norm(stream, norms.router) * ops.spec.hidden_size**-0.5
        mixed = self._experts.computed(ops.norm(stream, norms.before), routed, lora)
        return dense + ops.norm(mixed, norms.after)
