"""Layers around one residual: what they compute is added to what they were given.

`model.layers.stack` makes them; several streams are the layers of `model.layers.altup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quickstep.model.decoder_spec import KVSize, NormPlacement, StateSize
from quickstep.model.decoder_weights import DecoderWeights, LayerWeights
from quickstep.model.interface import EmittingTokens
from quickstep.model.layers.feed_forward import make_feed_forward
from quickstep.model.layers.interface import LayerStack, LayerStep, Mixer
from quickstep.model.layers.layer_ops import LayerOps
from quickstep.ops.tensors import AnyTensor

if TYPE_CHECKING:
    from torch import Tensor


class ResidualStream(msgspec.Struct, frozen=True):
    """residual + delta, both [T, hidden]: the last sub-block's output is added where the next one
    norms the sum, in one op. None for nothing to add.
    """

    residual: Tensor
    delta: Tensor | None = None


class ResidualLayer:
    """Norm, mixer, norm, feed-forward part, as the architecture places its norms; or a norm and one
    of them.
    """

    def __init__(self, ops: LayerOps, weights: LayerWeights, mixer: Mixer | None) -> None:
        self._ops = ops
        self._weights = weights
        self._mixer = mixer
        mlp = weights.mlp
        self._feed_forward = None if mlp is None else make_feed_forward(ops, mlp)
        self._is_parallel = ops.spec.norm_placement is NormPlacement.PARALLEL

    @property
    def kv_size(self) -> KVSize | None:
        """What the mixer keeps."""
        return None if self._mixer is None else self._mixer.kv_size

    def forward(
        self, stream: ResidualStream, step: LayerStep, emitting: EmittingTokens | None
    ) -> tuple[ResidualStream, Tensor]:
        """`Layer.forward`. With `emitting`, the others stop where later tokens need no more of
        them: once the mixer has written.
        """
        ops, weights, mixer = self._ops, self._weights, self._mixer
        if mixer is None:
            return self._without_mixer(stream, step, emitting)
        x, residual = _add_and_norm(ops, stream, weights.input_layernorm, weights.input_bias)
        layer_input, normed = residual, x
        rows = mixer.write(x, step)
        if emitting is not None:
            rows = tuple([part[emitting.tokens] for part in rows])
            residual = residual[emitting.tokens]
            normed = normed[emitting.tokens] if self._is_parallel else normed
            if not emitting.tokens.shape[0]:
                return ResidualStream(residual), layer_input
            step = step.of(emitting)
        delta = self._norm_output(mixer.read(rows, step), weights.post_attention_layernorm)
        if self._feed_forward is None:
            return self._finished(residual, delta, step), layer_input
        if self._is_parallel:
            mlp = self._norm_output(self._feed_forward.forward(normed, step.lora, residual), None)
            return self._finished(residual, delta + mlp, step), layer_input
        stream = ResidualStream(residual, delta)
        norm, bias = weights.pre_feedforward_layernorm, weights.feedforward_bias
        x, residual = _add_and_norm(ops, stream, norm, bias)
        x = self._feed_forward.forward(x, step.lora, residual)
        delta = self._norm_output(x, weights.post_feedforward_layernorm)
        return self._finished(residual, delta, step), layer_input

    def _without_mixer(
        self, stream: ResidualStream, step: LayerStep, emitting: EmittingTokens | None
    ) -> tuple[ResidualStream, Tensor]:
        assert self._feed_forward is not None, "a layer has one of the parts"
        weights = self._weights
        norm, bias = weights.pre_feedforward_layernorm, weights.feedforward_bias
        x, residual = _add_and_norm(self._ops, stream, norm, bias)
        layer_input = residual
        if emitting is not None:
            x, residual, step = x[emitting.tokens], residual[emitting.tokens], step.of(emitting)
            if not emitting.tokens.shape[0]:
                return ResidualStream(residual), layer_input
        delta = self._norm_output(self._feed_forward.forward(x, step.lora, residual), None)
        return self._finished(residual, delta, step), layer_input

    def _finished(self, residual: Tensor, delta: Tensor, step: LayerStep) -> ResidualStream:
        """With the layer's own input and scalar, where the architecture has such."""
        ops, inputs, scalar = self._ops, self._weights.inputs, self._weights.scalar
        if inputs is not None and step.inputs is not None and ops.spec.layer_inputs is not None:
            residual = residual + delta
            size = ops.spec.layer_inputs.size
            own = step.inputs[:, ops.index * size : (ops.index + 1) * size]
            gated = ops.activation(ops.table.linear(residual, inputs.gate), own)
            delta = ops.norm(ops.table.linear(gated, inputs.output), inputs.norm)
        if scalar is None:
            return ResidualStream(residual, delta)
        return ResidualStream((residual + delta) * scalar)

    def _norm_output(self, x: Tensor, norm: AnyTensor | None) -> Tensor:
        """Norm and scale a sub-block's output where the architecture does."""
        if norm is not None:
            x = self._ops.norm(x, norm)
        multiplier = self._ops.spec.residual_multiplier
        return x if multiplier == 1.0 else x * multiplier


def residual_stack(
    outer: LayerOps,
    weights: DecoderWeights,
    layers: tuple[ResidualLayer, ...],
    states: tuple[StateSize, ...],
) -> LayerStack:
    """The layers in order; `outer` computes what is outside of them."""

    def end(stream: ResidualStream) -> Tensor:
        return _add_and_norm(outer, stream, weights.final_norm, weights.final_bias)[0]

    def total(stream: ResidualStream) -> Tensor:
        return _add_and_norm(outer, stream, None, None)[0]

    return LayerStack(ResidualStream, layers, end, total, _pack, _unpack, states)


def _pack(stream: ResidualStream) -> tuple[Tensor, ...]:
    # apart from each other: the norm that follows rounds their sum
    assert stream.delta is not None, "a layer has computed it"
    return stream.residual, stream.delta


def _unpack(carried: tuple[Tensor, ...]) -> ResidualStream:
    return ResidualStream(*carried)


def _add_and_norm(
    ops: LayerOps, stream: ResidualStream, norm: AnyTensor | None, bias: AnyTensor | None
) -> tuple[Tensor, Tensor]:
    """The stream's sum, normed and as it is."""
    residual, delta = stream.residual, stream.delta
    if delta is not None and norm is not None:
        return ops.add_norm(delta, residual, norm, bias)
    if delta is not None:
        residual = residual + delta
    if norm is None:
        return residual, residual
    return ops.norm(residual, norm, bias), residual
