"""What else differs from layer to layer, and the layers put together."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import TypeGuard

from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.decoder_spec import (
    AltUp,
    LatentSpec,
    LayerInputs,
    LayerSpec,
    Multipliers,
)
from quickstep.model.layer_patterns.own_sizes import full_size, sizes_of_layers
from quickstep.model.layer_patterns.ropes import Ropes
from quickstep.model.layer_patterns.states import StateMixers, nemotron_h_kinds
from quickstep.model.layer_patterns.windows import Windows


def make_layers(
    windows: Windows, ropes: Ropes, sparse: Sequence[bool], mixers: StateMixers
) -> tuple[LayerSpec, ...]:
    """Zip the patterns."""
    queries = ropes.of_queries or (None,) * len(windows)
    columns = zip(windows, ropes.of_layer, sparse, mixers, queries, strict=True)
    return tuple([LayerSpec(*column) for column in columns])


def falcon_h1_multipliers(fields: ConfigFields) -> Multipliers:
    """But for that of keys, which is in the scale of attention."""
    gate, down = fields.numbers("mlp_multipliers", 2)
    if not gate:
        raise ConfigError(f"{fields.source} sets the first of 'mlp_multipliers' to 0")
    return Multipliers(
        attention_input=fields.number("attention_in_multiplier"),
        attention=fields.number("attention_out_multiplier"),
        state_input=fields.number("ssm_in_multiplier"),
        state=fields.number("ssm_out_multiplier"),
        gate=gate,
        mlp=down,
    )


def falcon_h1_layers(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """All have both mixers."""
    del fields
    return tuple([replace(layer, with_attention=True) for layer in layers])


def nemotron_h_count(fields: ConfigFields) -> int:
    """As many as are listed, whatever `num_hidden_layers` is: newer configs have no such key."""
    fields.optional_integer("num_hidden_layers")
    return len(nemotron_h_kinds(fields))


def nemotron_h_layers(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Each is a mixer or a feed-forward part."""
    kinds = nemotron_h_kinds(fields)
    parts = [kind in ("linear_attention", "full_attention") for kind in kinds]
    return tuple(
        [
            replace(layer, has_mixer=is_mixer, has_feed_forward=not is_mixer)
            for layer, is_mixer in zip(layers, parts, strict=True)
        ]
    )


def latent_attention(fields: ConfigFields) -> LatentSpec:
    """DeepSeek's; `head_dim` and `num_key_value_heads` in its files say nothing more."""
    sizes = LatentSpec(
        rank=fields.integer("kv_lora_rank"),
        rope_size=fields.integer("qk_rope_head_dim"),
        nope_size=fields.integer("qk_nope_head_dim"),
        value_size=fields.integer("v_head_dim"),
        query_rank=fields.optional_integer("q_lora_rank"),
        interleaved=fields.flag("rope_interleave"),
        num_indexed=fields.optional_integer("index_topk"),
    )
    of_query, sum_of_parts = (
        fields.optional_integer("qk_head_dim"),
        sizes.nope_size + sizes.rope_size,
    )
    if of_query not in (None, sum_of_parts):
        raise ConfigError(
            f"{fields.source} sets qk_head_dim to {of_query}; qk_nope_head_dim and "
            f"qk_rope_head_dim are {sum_of_parts} together"
        )
    return sizes


def gemma4_sizes(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Full layers have other heads; the last layers read the keys of the last one of their kind
    before them.
    """
    own = sizes_of_layers(fields, len(layers))
    one_projection = fields.flag("attention_k_eq_v")
    of_full = fields.optional_integer("num_global_key_value_heads") if one_projection else None
    first_shared = _first_shared(fields, layers)
    is_wide = fields.flag("use_double_wide_mlp")
    width = 2 * fields.integer("intermediate_size") if is_wide else None
    found = []
    for index, layer in enumerate(layers):
        if layer.window is None:
            heads = of_full if own is None else own.get(index, {}).get("num_key_value_heads")
            layer = replace(
                layer,
                head_size=full_size(fields, own, index),
                num_kv_heads=heads,
                values_are_keys=one_projection,
            )
        elif own is not None and index in own:
            raise ConfigError(
                f"{fields.source} has layer {index} in per_layer_config, which has a window; "
                "supported are full layers"
            )
        if index >= first_shared:
            source = _key_source(fields, layers, first_shared, index)
            layer = replace(layer, kv_from=source, values_are_keys=False, width=width)
        found.append(layer)
    return tuple(found)


def _first_shared(fields: ConfigFields, layers: Sequence[LayerSpec]) -> int:
    """The first of the last layers, which read the keys of others."""
    return len(layers) - (fields.optional_integer("num_kv_shared_layers") or 0)


def _key_source(
    fields: ConfigFields, layers: Sequence[LayerSpec], first_shared: int, index: int
) -> int:
    """Whose keys a layer reads: those of the last one of its kind that has keys."""
    before = [i for i in range(first_shared) if layers[i].window == layers[index].window]
    if not before:
        raise ConfigError(
            f"{fields.source} has no layer before {first_shared} of the kind of layer "
            f"{index}, whose keys it would read"
        )
    return before[-1]


def gemma3n_layers(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """The last layers read the keys of the last one of their kind before them; the first ones set
    most gates to 0.
    """
    first_shared, cutoffs = _first_shared(fields, layers), _gate_cutoffs(fields, len(layers))
    widths = fields.sequence("intermediate_size") if _has_list(fields) else (None,) * len(layers)
    if widths is None or len(widths) != len(layers):
        raise ConfigError(f"{fields.source} has no intermediate_size for each of its layers")
    model_width, found = gemma3n_width(fields), []
    for index, (layer, width) in enumerate(zip(layers, widths, strict=True)):
        shares = index >= first_shared
        source = _key_source(fields, layers, first_shared, index) if shares else None
        own = width if isinstance(width, int) and width != model_width else None
        found.append(replace(layer, kv_from=source, width=own, gate_cutoff=cutoffs[index]))
    return tuple(found)


def _has_list(fields: ConfigFields) -> bool:
    return isinstance(fields.value("intermediate_size"), (list, tuple))


def gemma3n_width(fields: ConfigFields) -> int:
    """The widest, where there is a list."""
    if not _has_list(fields):
        return fields.integer("intermediate_size")
    listed = [value for value in fields.sequence("intermediate_size") or () if is_size(value)]
    return max(listed, default=0) or fields.integer("intermediate_size")


def is_size(value: object) -> TypeGuard[int]:
    """Whether it is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # of the first layers, where a config says nothing


def _gate_cutoffs(fields: ConfigFields, num_layers: int) -> tuple[float | None, ...]:
    """Of each layer, the deviation above which a normal distribution has the part of gates that is
    not 0.
    """
    listed = fields.sequence("activation_sparsity_pattern")
    if listed is None:
        num_sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        listed = (_SPARSITY,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    parts = [part for part in listed if isinstance(part, (int, float)) and 0.0 <= part < 1.0]
    if len(parts) != num_layers or len(listed) != num_layers:
        raise ConfigError(
            f"{fields.source} has an activation_sparsity_pattern of {len(listed)} values; it needs "
            f"one from 0 to below 1 for each of {num_layers} layers"
        )
    normal = NormalDist()
    return tuple([normal.inv_cdf(part) if part > 0.0 else None for part in parts])


def gemma3n_inputs(fields: ConfigFields) -> LayerInputs:
    """A row for each token that is no image and no sound; all others have the first."""
    fields.value("query_pre_attn_scalar")  # which its attention does not read
    rows = fields.integer("vocab_size_per_layer_input")
    size = fields.integer("hidden_size_per_layer_input")
    return LayerInputs(size, min(rows, fields.integer("vocab_size")))


def gemma3n_streams(fields: ConfigFields) -> AltUp:
    """Several residual streams."""
    fields.value("altup_coef_clip")  # of coefficients in training
    count = fields.integer("altup_num_inputs")
    active = fields.optional_integer("altup_active_idx") or 0
    if count < _LEAST_STREAMS or active >= count:
        raise ConfigError(
            f"{fields.source} computes stream {active} of {count}; there must be at least "
            f"{_LEAST_STREAMS}"
        )
    return AltUp(
        num_streams=count,
        active=active,
        scaled=fields.flag("altup_correct_scale"),
        laurel_rank=fields.integer("laurel_rank"),
    )


_LEAST_STREAMS = 2


def gemma4_inputs(fields: ConfigFields) -> LayerInputs | None:
    """A row for each token of the vocabulary."""
    rows = fields.optional_integer("vocab_size_per_layer_input")
    size = fields.optional_integer("hidden_size_per_layer_input")
    if not size:
        return None
    vocab_size = fields.integer("vocab_size")
    if rows is None or rows < vocab_size:
        raise ConfigError(
            f"{fields.source} has inputs of layers for {rows} tokens of a vocabulary of "
            f"{vocab_size}, each needs some"
        )
    return LayerInputs(size, rows)


def llama4_layers(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Layers with positions attend in chunks, unless `layer_types` says otherwise."""
    chunk, listed = fields.optional_integer("attention_chunk_size"), fields.sequence("layer_types")
    kinds = ("full_attention", "chunked_attention")
    of_layers = listed or [kinds[layer.rope is not None] for layer in layers]
    if len(of_layers) != len(layers) or not set(of_layers) <= set(kinds):
        raise ConfigError(
            f"{fields.source} has {len(of_layers)} layer_types for {len(layers)} layers; each is "
            f"{' or '.join(map(repr, kinds))}"
        )
    return tuple(
        [
            replace(layer, chunk=chunk if kind == kinds[1] else None)
            for layer, kind in zip(layers, of_layers, strict=True)
        ]
    )
