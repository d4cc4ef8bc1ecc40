"""Layers of several residual streams (AltUp, arXiv:2301.13310), as in Gemma 3n.

A layer predicts all streams of a token from each other, computes the active one, and corrects all
by what its result differs from the prediction. The streams of a token are one row [S * hidden].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quickstep.model.decoder_spec import AltUp, KVSize, StateSize
from quickstep.model.decoder_weights import (
    DecoderWeights,
    LayerInputWeights,
    LayerWeights,
)
from quickstep.model.interface import EmittingTokens
from quickstep.model.layers.feed_forward import make_feed_forward
from quickstep.model.layers.interface import LayerStack, LayerStep, Mixer
from quickstep.model.layers.layer_ops import LayerOps
from quickstep.ops.tensors import AnyTensor

if TYPE_CHECKING:
    from torch import Tensor


class Streams(msgspec.Struct, frozen=True):
    """All residuals of each token, one after another, [T, S * hidden]."""

    values: Tensor


class AltUpLayer:
    """Attention next to a learned augmented residual, an MLP, and the layer's own input, all of
    them with norms on both sides.
    """

    def __init__(self, ops: LayerOps, weights: LayerWeights, mixer: Mixer | None) -> None:
        assert ops.spec.altup is not None and weights.altup is not None
        assert mixer is not None and weights.mlp is not None, "a layer of Gemma 3n has both parts"
        self._ops = ops
        self._altup = ops.spec.altup
        self._weights = weights
        self._own = weights.altup
        self._mixer = mixer
        self._feed_forward = make_feed_forward(ops, weights.mlp)

    @property
    def kv_size(self) -> KVSize | None:
        """What the mixer keeps."""
        return self._mixer.kv_size

    def forward(
        self, stream: Streams, step: LayerStep, emitting: EmittingTokens | None
    ) -> tuple[Streams, Tensor]:
        """`Layer.forward`; its own input is the active stream."""
        ops, weights, own, active = self._ops, self._weights, self._own, self._altup.active
        layer_input = _part(stream.values, self._altup, active)
        scores = self._scores(layer_input)
        predicted, x = ops.streams.mix(stream.values, scores, own.prediction, active)
        normed = self._norm(x, weights.input_layernorm)
        rows = self._mixer.write(normed, step)
        if emitting is not None:
            if not emitting.tokens.shape[0]:
                return Streams(predicted[emitting.tokens]), layer_input
            rows = tuple([part[emitting.tokens] for part in rows])
            predicted, x, normed = (part[emitting.tokens] for part in (predicted, x, normed))
            step = step.of(emitting)
        mixed = self._norm(self._mixer.read(rows, step), weights.post_attention_layernorm)
        x = (x + mixed + self._laurel(normed)) * 2**-0.5
        mlp_input = self._norm(x, weights.pre_feedforward_layernorm)
        delta = self._feed_forward.forward(mlp_input, step.lora, x)
        x = x + self._norm(delta, weights.post_feedforward_layernorm)
        corrected, first = ops.streams.correct(
            predicted, x, self._scores(x), own.correction, own.scale, active
        )
        if weights.inputs is None or step.inputs is None:
            return Streams(corrected), layer_input
        delta = self._from_input(first, weights.inputs, step.inputs)
        return Streams(ops.streams.add(corrected, delta)), layer_input

    def _scores(self, x: Tensor) -> Tensor:
        """[T, S] of x [T, hidden], of which the coefficients are made."""
        ops, own = self._ops, self._own
        read = ops.norm(x, own.router_norm) * (1.0 / ops.spec.hidden_size)
        return ops.table.linear(read, own.router)

    def _laurel(self, x: Tensor) -> Tensor:
        """The learned augmented residual of x [T, hidden]."""
        ops, own = self._ops, self._own
        learned = ops.table.linear(ops.table.linear(x, own.laurel_left), own.laurel_right)
        return x + ops.norm(learned, own.laurel_norm)

    def _from_input(self, x: Tensor, weights: LayerInputWeights, inputs: Tensor) -> Tensor:
        """What the layer's own input adds, through a gate of x [T, hidden]."""
        ops, sizes = self._ops, self._ops.spec.layer_inputs
        assert sizes is not None
        own = inputs[:, ops.index * sizes.size : (ops.index + 1) * sizes.size]
        gated = ops.activation(ops.table.linear(x, weights.gate), own)
        return ops.norm(ops.table.linear(gated, weights.output), weights.norm)

    def _norm(self, x: Tensor, norm: AnyTensor | None) -> Tensor:
        assert norm is not None, "norms are on both sides"
        return self._ops.norm(x, norm)


def altup_stack(
    outer: LayerOps,
    weights: DecoderWeights,
    layers: tuple[AltUpLayer, ...],
    states: tuple[StateSize, ...],
) -> LayerStack:
    """The layers in order; `outer` computes what is outside of them."""
    altup, own = outer.spec.altup, weights.streams
    assert altup is not None and own is not None

    def begin(x: Tensor) -> Streams:
        return Streams(outer.streams.spread(x, outer.table.linear(x, own.spread)))

    def total(stream: Streams) -> Tensor:
        """The mean of the streams, each with the magnitude of the first."""
        first = _part(stream.values, altup, 0)
        added = first
        for index, projection in enumerate(own.joined, 1):
            projected = outer.table.linear(_part(stream.values, altup, index), projection)
            added = outer.streams.match(projected, first, added)
        return added * (1.0 / altup.num_streams)

    def end(stream: Streams) -> Tensor:
        return outer.norm(total(stream), weights.final_norm)

    return LayerStack(begin, layers, end, total, _in_one_process, _in_one_process, states)


def _part(x: Tensor, altup: AltUp, stream: int) -> Tensor:
    size = x.shape[1] // altup.num_streams
    return x[:, stream * size : (stream + 1) * size]


def _in_one_process(stream: object) -> tuple[Tensor, ...]:
    raise AssertionError("stages refuse models of several streams")
