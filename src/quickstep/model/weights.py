"""The weights of a decoder, packed for the op table that reads them. Plain frozen data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quickstep.ops.table import LinearWeight

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AttentionWeights",
    "DecoderWeights",
    "LayerWeights",
    "MLPWeights",
    "MoEWeights",
]


class AttentionWeights(msgspec.Struct, frozen=True):
    """qkv: hidden -> (H + 2 K) * D in that order; norms are None without QK norm; sinks [H]
    float32, None where the architecture has none.
    """

    qkv: LinearWeight
    o_proj: LinearWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None


class MLPWeights(msgspec.Struct, frozen=True):
    """gate_up: hidden -> 2 * width, gate first; down_proj: width -> hidden. Also one expert."""

    gate_up: LinearWeight
    down_proj: LinearWeight


class MoEWeights(msgspec.Struct, frozen=True):
    """A mixture of experts: router hidden -> experts."""

    router: LinearWeight
    experts: tuple[MLPWeights, ...]


class LayerWeights(msgspec.Struct, frozen=True):
    """One layer; a norm that the architecture lacks is None. Names say the place, as Gemma's do:
    Llama's `post_attention_layernorm`, before the MLP, is `pre_feedforward_layernorm` here.
    """

    attention: AttentionWeights
    mlp: MLPWeights | MoEWeights
    input_layernorm: Tensor | None
    post_attention_layernorm: Tensor | None
    pre_feedforward_layernorm: Tensor | None
    post_feedforward_layernorm: Tensor | None


class DecoderWeights(msgspec.Struct, frozen=True):
    """A whole decoder: embedding [V, hidden], layers, final norm, output projection.

    The embedding of a tied model is the output projection itself, held once.
    """

    embed_tokens: Tensor | LinearWeight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: LinearWeight
