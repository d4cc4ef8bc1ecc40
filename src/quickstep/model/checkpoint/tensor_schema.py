"""Which tensors a `ModelSpec` needs, by name and shape: the one list that everything checks.

The loader compares it with the files, sizing counts parameters from it. Names follow the
checkpoint's own (`TensorNaming`). Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from quickstep.model.decoder_spec import (
    DELTA_PROJECTIONS,
    FUSED_DELTA,
    AltUp,
    GatedDelta,
    LatentSpec,
    LayerSpec,
    Mamba2,
    ModelSpec,
    NormPlacement,
    QKNorm,
    ShortConv,
    StateMixer,
    TensorNaming,
)

Shape = tuple[int, ...]
Shapes = dict[str, Shape]  # by tensor name

STATE_MIXER = "linear_attn."
# The keys and values of all heads as products of a latent: in the model's dtype in every format.
LATENT_HEADS = "kv_b_proj"
_FIXED_SCALES = (
    *(".input_scale", ".input_global_scale", ".input_zero_point"),
    *(".k_scale", ".v_scale", ".kv_scale", ".q_scale"),
)


class LayerInputNames(msgspec.Struct, frozen=True):
    """Checkpoint names of `LayerInputs`: of the model, and in each layer."""

    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    norm: str = "per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    output: str = "per_layer_projection"
    output_norm: str = "post_per_layer_input_norm"


LAYER_INPUTS = LayerInputNames()
LAYER_SCALAR = "layer_scalar"


class AltUpNames(msgspec.Struct, frozen=True):
    """Checkpoint names of `AltUp`: of the model, and in each layer."""

    spread: str = "altup_projections"
    joined: str = "altup_unembed_projections"
    router: str = "altup.modality_router"
    router_norm: str = "altup.router_norm"
    prediction: str = "altup.prediction_coefs"
    correction: str = "altup.correction_coefs"
    scale: str = "altup.correct_output_scale"
    laurel: tuple[str, str] = ("laurel.linear_left", "laurel.linear_right")
    laurel_norm: str = "laurel.post_laurel_norm"


ALTUP = AltUpNames()
# Of a layer that reads another layer's keys; files may have them all the same.
UNREAD_KEYS = tuple(f"self_attn.{name}" for name in ("k_proj", "v_proj", "k_norm", "v_norm"))
# Of `MoESpec.with_mlp`: norms of the MLP's output, of the experts' input and of their output.
MIXTURE_NORMS = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
# Of `MoESpec.latent_size`: from the hidden size, and back.
EXPERT_LATENTS = ("mlp.fc1_latent_proj", "mlp.fc2_latent_proj")
ROUTER_SCALE, EXPERT_FACTORS = "router.scale", "router.per_expert_scale"


class LayerNorms(msgspec.Struct, frozen=True):
    """Checkpoint names of a layer's norms, by place (`LayerWeights`); None where there is none."""

    input_layernorm: str | None
    post_attention_layernorm: str | None
    pre_feedforward_layernorm: str | None
    post_feedforward_layernorm: str | None


def layer_norms(spec: ModelSpec, layer: LayerSpec) -> LayerNorms:
    """The norms of a layer. Note `post_attention_layernorm`: its place differs by family."""
    if not layer.is_complete:
        only = "norm"
        return LayerNorms(
            only if layer.has_mixer else None, None, only if layer.has_feed_forward else None, None
        )
    if spec.norm_placement is NormPlacement.PRE:
        return LayerNorms("input_layernorm", None, "post_attention_layernorm", None)
    if spec.norm_placement is NormPlacement.PARALLEL:
        return LayerNorms("input_layernorm", None, None, None)
    if spec.norm_placement is NormPlacement.POST:
        return LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    return LayerNorms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )


def is_fixed_scale(name: str) -> bool:
    """Whether a tensor fixes the scale or zero point of activations, or of the KV cache, for
    products in 8 and 4 bits. Here activations are quantized per token and the KV cache as
    `--kv-cache-dtype` says, so none is read.
    """
    return name.endswith(_FIXED_SCALES)


def bias_of(weight: str) -> str:
    """The name of the bias of a matrix or a norm."""
    return f"{weight.removesuffix('.weight')}.bias"


def outer_tensors(spec: ModelSpec, prefix: str, head: str) -> Shapes:
    """The tensors outside of the layers. A tied model has no output projection of its own."""
    shapes: Shapes = {
        f"{prefix}embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        f"{prefix}norm.weight": (spec.hidden_size,),
    }
    if spec.norm_bias:
        shapes[f"{prefix}norm.bias"] = (spec.hidden_size,)
    if not spec.tied:
        shapes[head] = (spec.vocab_size, spec.hidden_size)
    if spec.head_bias:
        shapes[bias_of(head)] = (spec.vocab_size,)
    inputs = spec.layer_inputs
    if inputs is not None:
        width = spec.num_layers * inputs.size
        shapes[f"{prefix}{LAYER_INPUTS.table}.weight"] = (inputs.vocab_size, width)
        shapes[f"{prefix}{LAYER_INPUTS.projection}.weight"] = (width, spec.hidden_size)
        shapes[f"{prefix}{LAYER_INPUTS.norm}.weight"] = (inputs.size,)
    if spec.altup is not None:
        for name in (
            *altup_parts(spec.altup, ALTUP.spread),
            *altup_parts(spec.altup, ALTUP.joined),
        ):
            shapes[f"{prefix}{name}.weight"] = (spec.hidden_size, spec.hidden_size)
    return shapes


def altup_parts(altup: AltUp, name: str) -> tuple[str, ...]:
    """The matrices of all streams but the first."""
    return tuple(f"{name}.{index}" for index in range(altup.num_streams - 1))


def layer_tensors(spec: ModelSpec, prefix: str, index: int) -> Shapes:
    """The tensors of one layer."""
    start = f"{prefix}layers.{index}."
    layer, spec = spec.layers[index], spec.of_layer(index)
    relative: Shapes = {}
    if layer.has_attention:
        relative.update(_attention(spec, layer))
    if layer.state_mixer is not None:
        relative.update(_state_mixer(layer.state_mixer, spec))
    for name in _norm_names(spec, layer):
        relative[f"{name}.weight"] = (spec.hidden_size,)
        if spec.norm_bias:
            relative[f"{name}.bias"] = (spec.hidden_size,)
    if layer.has_feed_forward:
        relative.update(_mlp(spec, layer.sparse))
    if spec.layer_inputs is not None:
        size, hidden = spec.layer_inputs.size, spec.hidden_size
        relative[f"{LAYER_INPUTS.gate}.weight"] = (size, hidden)
        relative[f"{LAYER_INPUTS.output}.weight"] = (hidden, size)
        relative[f"{LAYER_INPUTS.output_norm}.weight"] = (hidden,)
    if spec.layer_scalars:
        relative[LAYER_SCALAR] = (1,)
    if spec.altup is not None:
        relative.update(_altup(spec.altup, spec.hidden_size))
    return {start + name: shape for name, shape in relative.items()}


def _altup(altup: AltUp, hidden: int) -> Iterator[tuple[str, Shape]]:
    streams, (left, right) = altup.num_streams, ALTUP.laurel
    yield f"{ALTUP.router}.weight", (streams, hidden)
    yield f"{ALTUP.router_norm}.weight", (hidden,)
    yield f"{ALTUP.prediction}.weight", (streams * streams, streams)
    yield f"{ALTUP.correction}.weight", (streams, streams)
    if altup.scaled:
        yield ALTUP.scale, (hidden,)
    yield f"{left}.weight", (altup.laurel_rank, hidden)
    yield f"{right}.weight", (hidden, altup.laurel_rank)
    yield f"{ALTUP.laurel_norm}.weight", (hidden,)


def num_parameters(spec: ModelSpec) -> int:
    """Parameters of the model; a tied output projection counts once."""
    if spec.parameter_count is not None:
        return spec.parameter_count
    count = _count(outer_tensors(spec, "", "head"))
    kinds = [replace(layer, window=None, rope=None, query_rope=None) for layer in spec.layers]
    first_of = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    per_kind = {kind: _count(layer_tensors(spec, "", i)) for kind, i in first_of.items()}
    return count + sum(per_kind[kind] for kind in kinds)


def _count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _norm_names(spec: ModelSpec, layer: LayerSpec) -> list[str]:
    norms = layer_norms(spec, layer)
    of_mixture = (
        MIXTURE_NORMS if layer.sparse and spec.moe is not None and spec.moe.with_mlp else ()
    )
    names = (
        norms.input_layernorm,
        norms.post_attention_layernorm,
        norms.pre_feedforward_layernorm,
        norms.post_feedforward_layernorm,
    )
    return [*(name for name in names if name is not None), *of_mixture]


def shared_gate(spec: ModelSpec) -> str:
    """Within a layer, what `MoESpec.shared_gate` is a product with."""
    return f"{spec.naming.shared_expert}_gate.weight"


def qkv_parts(layer: LayerSpec) -> tuple[str, ...]:
    """The projections of queries, keys and values that a layer has."""
    if layer.kv_from is not None:
        return ("q_proj",)
    return ("q_proj", "k_proj") if layer.values_are_keys else ("q_proj", "k_proj", "v_proj")


def _attention(spec: ModelSpec, layer: LayerSpec) -> Iterator[tuple[str, Shape]]:
    if spec.latent is not None:
        yield from latent_tensors(spec, spec.latent)
        return
    queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    hidden = spec.hidden_size
    if spec.naming.fused_qkv:
        projections = [("qkv_proj", queries + 2 * keys)]
    else:
        widths = (2 * queries if spec.attention_gate else queries, keys, keys)
        projections = list(zip(qkv_parts(layer), widths, strict=False))
    for name, width in projections:
        yield f"self_attn.{name}.weight", (width, hidden)
        if spec.qkv_bias:
            yield f"self_attn.{name}.bias", (width,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if spec.output_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    if spec.sinks:
        yield "self_attn.sinks", (spec.num_heads,)
    if spec.qk_norm not in (QKNorm.NONE, QKNorm.UNWEIGHTED):
        size = spec.head_size
        of_queries, of_keys = {
            QKNorm.FULL: ((queries,), (keys,)),
            QKNorm.EACH_HEAD: ((spec.num_heads, size), (spec.num_kv_heads, size)),
        }.get(spec.qk_norm, ((size,), (size,)))
        yield "self_attn.q_norm.weight", of_queries
        if layer.kv_from is None:
            yield "self_attn.k_norm.weight", of_keys


def delta_projections(mixer: GatedDelta, naming: TensorNaming) -> tuple[tuple[str, int], ...]:
    """The matrices that make a token's inputs of Gated DeltaNet, and their outputs, in the order in
    which they are one.
    """
    channels, values, heads, _ = mixer.parts
    sizes = dict(zip(DELTA_PROJECTIONS, mixer.parts, strict=True))
    sizes |= dict(zip(FUSED_DELTA, (channels + values, 2 * heads), strict=True))
    return tuple([(name, sizes[name]) for name in naming.delta])


def decay_rates(naming: TensorNaming) -> str:
    """The tensor of the rates with which states decay, or of their logarithms."""
    return "A" if naming.stored_rates else "A_log"


def _state_mixer(mixer: StateMixer, spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    start, hidden = STATE_MIXER, spec.hidden_size
    if isinstance(mixer, ShortConv):
        channels = mixer.num_channels
        yield from _projection(f"{start}in_proj", 3 * channels, hidden, mixer.bias)
        yield f"{start}conv1d.weight", (channels, 1, mixer.width)
        if mixer.bias:
            yield f"{start}conv1d.bias", (channels,)
        yield from _projection(f"{start}out_proj", hidden, channels, mixer.bias)
        return
    if isinstance(mixer, Mamba2):
        yield from _mamba(mixer, hidden, spec.naming)
        return
    heads, values = mixer.num_value_heads, mixer.num_values
    for name, num_outputs in delta_projections(mixer, spec.naming):
        yield from _projection(f"{start}{name}", num_outputs, hidden, False)
    yield f"{start}conv1d.weight", (mixer.num_channels, 1, mixer.width)
    yield f"{start}{decay_rates(spec.naming)}", (heads,)
    yield f"{start}dt_bias", (heads,)
    yield f"{start}norm.weight", (mixer.value_size,)
    yield from _projection(f"{start}out_proj", hidden, values, False)


def _mamba(mixer: Mamba2, hidden: int, naming: TensorNaming) -> Iterator[tuple[str, Shape]]:
    start = STATE_MIXER
    yield from _projection(f"{start}in_proj", mixer.num_inputs, hidden, mixer.bias)
    yield f"{start}conv1d.weight", (mixer.num_channels, 1, mixer.width)
    if mixer.conv_bias:
        yield f"{start}conv1d.bias", (mixer.num_channels,)
    for name in (decay_rates(naming), "dt_bias", "D"):
        yield f"{start}{name}", (mixer.num_heads,)
    if mixer.has_norm:
        yield f"{start}norm.weight", (mixer.num_outputs,)
    yield from _projection(f"{start}out_proj", hidden, mixer.num_outputs, mixer.bias)


def latent_tensors(spec: ModelSpec, latent: LatentSpec) -> Iterator[tuple[str, Shape]]:
    """Those of attention over latents, within a layer."""
    heads, hidden = spec.num_heads, spec.hidden_size
    if latent.query_rank is None:
        yield "self_attn.q_proj.weight", (heads * spec.head_size, hidden)
    else:
        yield "self_attn.q_a_proj.weight", (latent.query_rank, hidden)
        yield "self_attn.q_a_layernorm.weight", (latent.query_rank,)
        yield "self_attn.q_b_proj.weight", (heads * spec.head_size, latent.query_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent.kept_size, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent.rank,)
    of_head = latent.nope_size + latent.value_size
    yield f"self_attn.{LATENT_HEADS}.weight", (heads * of_head, latent.rank)
    yield "self_attn.o_proj.weight", (hidden, heads * latent.value_size)


def _mlp(spec: ModelSpec, sparse: bool) -> Iterator[tuple[str, Shape]]:
    hidden, naming = spec.hidden_size, spec.naming
    if sparse and spec.moe is not None:
        gate, up, down = naming.expert_parts
        width, size = spec.moe.intermediate_size, spec.moe.latent_size or hidden
        projections = [(gate, width, size), (up, width, size), (down, size, width)]
        if naming.fused_experts and spec.gated:
            projections = [(gate, 2 * width, size), (down, size, width)]
        elif not spec.gated:
            projections = projections[1:]
        yield from _projection(naming.router, spec.moe.num_experts, hidden, spec.moe.biases)
        if spec.moe.selection_bias:
            row = (1,) if naming.bias_row else ()
            yield naming.selection_bias, (*row, spec.moe.num_experts)
        if spec.moe.latent_size is not None:
            into, out = EXPERT_LATENTS
            yield from _projection(into, size, hidden, spec.mlp_bias)
            yield from _projection(out, hidden, size, spec.mlp_bias)
        if spec.moe.shared_width:
            yield from _shared_expert(spec, spec.moe.shared_width)
        if spec.moe.shared_gate:
            yield shared_gate(spec), (1, hidden)
        for expert in range(spec.moe.num_experts):
            for name, outputs, inputs in projections:
                module = f"{naming.experts}.{expert}.{name}"
                yield from _projection(module, outputs, inputs, spec.moe.biases)
        if not spec.moe.with_mlp:
            return
        yield ROUTER_SCALE, (hidden,)
        yield EXPERT_FACTORS, (spec.moe.num_experts,)
    width = spec.intermediate_size
    if naming.fused_gate_up:
        projections = [("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)]
    else:
        projections = [
            ("gate_proj", width, hidden),
            ("up_proj", width, hidden),
            ("down_proj", hidden, width),
        ]
    for name, outputs, inputs in projections if spec.gated else projections[1:]:
        yield from _projection(f"mlp.{name}", outputs, inputs, spec.mlp_bias)


def _shared_expert(spec: ModelSpec, width: int) -> Iterator[tuple[str, Shape]]:
    naming, hidden, parts = spec.naming, spec.hidden_size, gate_up_parts(spec)
    outputs = 2 * width if spec.gated else width
    for name in parts:
        yield f"{naming.shared_expert}.{name}.weight", (outputs // len(parts), hidden)
    yield f"{naming.shared_expert}.down_proj.weight", (hidden, width)


def gate_up_parts(spec: ModelSpec) -> tuple[str, ...]:
    """The matrices of an MLP or of the expert of all tokens that make gate and up."""
    if not spec.gated:
        return ("up_proj",)
    return ("gate_up_proj",) if spec.naming.fused_gate_up else ("gate_proj", "up_proj")


def _projection(module: str, outputs: int, inputs: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{module}.weight", (outputs, inputs)
    if bias:
        yield f"{module}.bias", (outputs,)
