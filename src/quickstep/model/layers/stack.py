"""The layers of a spec, each of the kind that the architecture has.

`build_layers` makes the stack of every native architecture. Another mixer is another `MixerOf`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quickstep.model.decoder_spec import ModelSpec, StateSize
from quickstep.model.decoder_weights import (
    AttentionWeights,
    DecoderWeights,
    HybridWeights,
    LatentWeights,
    LayerWeights,
)
from quickstep.model.layers.altup import AltUpLayer, altup_stack
from quickstep.model.layers.attention import Attention
from quickstep.model.layers.interface import LayerStack, Mixer
from quickstep.model.layers.latent_attention import LatentAttention
from quickstep.model.layers.layer_ops import LayerOps
from quickstep.model.layers.residual import ResidualLayer, residual_stack
from quickstep.model.layers.states import AttentionAndState, StateMixer
from quickstep.model.sharding import Shard, shard_spec
from quickstep.ops.table import OpTable


class CachePlaces(msgspec.Struct, frozen=True):
    """Where a layer's tensors are in a `KVCache`: `kv` among those of layers that keep something of
    each token, `state` among those that keep a state.
    """

    kv: int
    state: int


MixerOf = Callable[[LayerOps, LayerWeights, CachePlaces], Mixer | None]


def mixer_of(ops: LayerOps, weights: LayerWeights, places: CachePlaces) -> Mixer | None:
    """The mixer that a layer of a native architecture has weights of."""
    mixer = weights.mixer
    if mixer is None:
        return None
    if isinstance(mixer, AttentionWeights):
        return Attention(ops, mixer, places.kv)
    if isinstance(mixer, LatentWeights):
        return LatentAttention(ops, mixer, places.kv)
    if isinstance(mixer, HybridWeights):
        attention = Attention(ops, mixer.attention, places.kv)
        return AttentionAndState(ops, attention, StateMixer(ops, mixer.state, places.state))
    return StateMixer(ops, mixer, places.state)


def build_layers(
    spec: ModelSpec,
    weights: DecoderWeights,
    table: OpTable,
    shard: Shard,
    first_layer: int = 0,
    mixer_of: MixerOf = mixer_of,
) -> LayerStack:
    """The layers of a spec on an op table, from `first_layer` on; `weights` are the shard's."""
    parts: list[tuple[LayerOps, LayerWeights, Mixer | None]] = []
    states: list[StateSize] = []
    places: dict[int, int] = {}  # in a `KVCache`, of layers that have one
    for index, layer in enumerate(weights.layers, first_layer):
        of_layer, kind = spec.of_layer(index), spec.layers[index]
        ops = LayerOps(table, of_layer, shard_spec(of_layer, shard), shard, index)
        kv_place = len(places) if kind.kv_from is None else places[kind.kv_from]
        mixer = mixer_of(ops, layer, CachePlaces(kv_place, len(states)))
        parts.append((ops, layer, mixer))
        if mixer is not None and mixer.kv_size is not None:
            places[index] = kv_place
        states += () if kind.state_mixer is None else (kind.state_mixer.kept,)
    outer = LayerOps(table, spec, shard_spec(spec, shard), shard, spec.num_layers)
    if spec.altup is not None:
        streams = tuple([AltUpLayer(*part) for part in parts])
        return altup_stack(outer, weights, streams, tuple(states))
    return residual_stack(
        outer, weights, tuple([ResidualLayer(*part) for part in parts]), tuple(states)
    )
