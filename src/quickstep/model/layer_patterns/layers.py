"""What else differs from layer to layer, and the layers put together."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.decoder_spec import (
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
    first_shared = len(layers) - (fields.optional_integer("num_kv_shared_layers") or 0)
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
            before = [i for i in range(first_shared) if layers[i].window == layer.window]
            if not before:
                raise ConfigError(
                    f"{fields.source} has no layer before {first_shared} of the kind of layer "
                    f"{index}, whose keys it would read"
                )
            layer = replace(layer, kv_from=before[-1], values_are_keys=False, width=width)
        found.append(layer)
    return tuple(found)


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
