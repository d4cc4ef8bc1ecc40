"""The packed weights of a decoder, by layer and place; the loader makes them."""

from __future__ import annotations

import msgspec

from quickstep.ops.table import DeltaWeights, ExpertWeights, MambaWeights, ShortConvWeights
from quickstep.ops.tensors import AnyTensor
from quickstep.ops.weights import HeadWeight, LinearWeight


class AttentionWeights(msgspec.Struct, frozen=True):
    """qkv: hidden -> (H + 2 K) * D in that order, without what the layer has not (`LayerSpec`), or
    (2 H + 2 K) * D where attention has a gate: queries, gates, keys, values; norms are None without
    QK norm; sinks [H] float32, None where the architecture has none. v_norm are ones, for values
    that are normed without a weight.
    """

    qkv: LinearWeight
    o_proj: LinearWeight
    q_norm: AnyTensor | None
    k_norm: AnyTensor | None
    sinks: AnyTensor | None
    v_norm: AnyTensor | None = None

    @property
    def nbytes(self) -> int:
        """Of the matrices."""
        return self.qkv.nbytes + self.o_proj.nbytes


class LatentWeights(msgspec.Struct, frozen=True):
    """Of attention over latents (`LatentSpec`), by their names in a checkpoint.

    Attributes:
        qkv_a: hidden -> the vector of queries, or without one the queries of all heads, then the
            vector and the rotated part that are kept.
        q_a_layernorm, q_b: Of the vector of queries: its norm, and the product to the queries.
        kv_a_layernorm: Of the vector that is kept.
        k_b, v_b: `kv_b_proj` by heads: nope_size -> rank, transposed, and rank -> value_size.
        o_proj: Values of all heads -> hidden.
    """

    qkv_a: LinearWeight
    q_a_layernorm: AnyTensor | None
    q_b: LinearWeight | None
    kv_a_layernorm: AnyTensor
    k_b: HeadWeight
    v_b: HeadWeight
    o_proj: LinearWeight

    @property
    def nbytes(self) -> int:
        """Of the matrices."""
        query = 0 if self.q_b is None else self.q_b.nbytes
        return query + self.qkv_a.nbytes + self.k_b.nbytes + self.v_b.nbytes + self.o_proj.nbytes


class ShortConvLayerWeights(msgspec.Struct, frozen=True):
    """in_proj: hidden -> 3 * hidden (`ops.table.ShortConvOp`); out_proj: hidden -> hidden."""

    in_proj: LinearWeight
    conv: ShortConvWeights
    out_proj: LinearWeight


class GatedDeltaWeights(msgspec.Struct, frozen=True):
    """in_proj: hidden -> what `ops.table.GatedDeltaOp` takes; out_proj: values -> hidden."""

    in_proj: LinearWeight
    delta: DeltaWeights
    out_proj: LinearWeight


class Mamba2Weights(msgspec.Struct, frozen=True):
    """in_proj: hidden -> what `ops.table.Mamba2Op` takes; out_proj: values -> hidden."""

    in_proj: LinearWeight
    mamba: MambaWeights
    out_proj: LinearWeight


StateMixerWeights = ShortConvLayerWeights | GatedDeltaWeights | Mamba2Weights


class HybridWeights(msgspec.Struct, frozen=True):
    """Attention and a state mixer, which read the same and whose outputs are added."""

    attention: AttentionWeights
    state: StateMixerWeights


MixerWeights = AttentionWeights | LatentWeights | StateMixerWeights | HybridWeights


class MLPWeights(msgspec.Struct, frozen=True):
    """gate_up: hidden -> 2 * width, gate first, or up only of an MLP without a gate; down_proj:
    width -> hidden.
    """

    gate_up: LinearWeight
    down_proj: LinearWeight


class MixtureNorms(msgspec.Struct, frozen=True):
    """Norms of an MLP and experts that are added (`MoESpec.with_mlp`): of the router's input, of
    the MLP's output, of the experts' input and of their output.
    """

    router: AnyTensor
    mlp: AnyTensor
    before: AnyTensor
    after: AnyTensor


class MoEWeights(msgspec.Struct, frozen=True):
    """A mixture of experts: router hidden -> experts; what is added to the experts' shares for the
    choice, [E] float32, and the expert of all tokens with its gate hidden -> 1, where there are
    such. With an MLP that is
    added to them, its norms, and the factors of the experts' weights, [E] float32.
    """

    router: LinearWeight
    experts: ExpertWeights
    selection_bias: AnyTensor | None = None
    shared: MLPWeights | None = None
    mlp: MLPWeights | None = None
    norms: MixtureNorms | None = None
    factors: AnyTensor | None = None
    shared_gate: LinearWeight | None = None


class LayerInputWeights(msgspec.Struct, frozen=True):
    """What a layer does with its own input: gate hidden -> I, output I -> hidden, and its norm."""

    gate: LinearWeight
    output: LinearWeight
    norm: AnyTensor


class ModelInputWeights(msgspec.Struct, frozen=True):
    """Of the inputs of all layers, one after another: a table [V, L * I], a projection
    hidden -> L * I, and the norm [I] of what it makes for a layer.
    """

    table: AnyTensor | LinearWeight
    projection: LinearWeight
    norm: AnyTensor


class AltUpWeights(msgspec.Struct, frozen=True):
    """Of a layer of several streams (`AltUp`): the router of a token's coefficients with the norm
    of what it reads, the coefficients [S * S, S] and [S, S] float32, the factors of the active
    stream, and both products and the norm of LAuReL.
    """

    router: LinearWeight
    router_norm: AnyTensor
    prediction: AnyTensor
    correction: AnyTensor
    scale: AnyTensor | None
    laurel_left: LinearWeight
    laurel_right: LinearWeight
    laurel_norm: AnyTensor


class StreamWeights(msgspec.Struct, frozen=True):
    """spread: hidden -> (S - 1) * hidden, of the embeddings; joined: hidden -> hidden, of each
    stream but the first after the last layer.
    """

    spread: LinearWeight
    joined: tuple[LinearWeight, ...]


class LayerWeights(msgspec.Struct, frozen=True):
    """One layer; a norm that the architecture lacks is None. Names are of places, as in Gemma:
    Llama's `post_attention_layernorm`, before the MLP, is `pre_feedforward_layernorm` here.
    `scalar` multiplies the layer's output; None for 1. Biases are of the norms before attention and
    before the feed-forward part, of which a layer may lack one.
    """

    mixer: MixerWeights | None
    mlp: MLPWeights | MoEWeights | None
    input_layernorm: AnyTensor | None
    post_attention_layernorm: AnyTensor | None
    pre_feedforward_layernorm: AnyTensor | None
    post_feedforward_layernorm: AnyTensor | None
    inputs: LayerInputWeights | None = None
    scalar: float | None = None
    input_bias: AnyTensor | None = None
    feedforward_bias: AnyTensor | None = None
    altup: AltUpWeights | None = None


class DecoderWeights(msgspec.Struct, frozen=True):
    """A decoder: embedding [V, hidden], layers, final norm, output projection.

    The embedding of a tied model is the output projection itself, held once. A stage of a pipeline
    has its layers only; None where another stage has the embedding or the output projection.
    """

    embed_tokens: AnyTensor | LinearWeight | None
    layers: tuple[LayerWeights, ...]
    final_norm: AnyTensor
    lm_head: LinearWeight | None
    layer_inputs: ModelInputWeights | None = None
    final_bias: AnyTensor | None = None
    streams: StreamWeights | None = None
