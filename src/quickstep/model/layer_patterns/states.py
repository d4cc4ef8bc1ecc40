"""Layers that keep a state of each sequence, in place of attention or next to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.decoder_spec import (
    GatedDelta,
    Mamba2,
    ShortConv,
    StateMixer,
)

# Of each layer what it has in place of attention; None for attention.
StateMixers = tuple[StateMixer | None, ...]


def all_attention(fields: ConfigFields, num_layers: int) -> StateMixers:
    """No layer keeps a state."""
    del fields
    return (None,) * num_layers


def lfm_mixers(fields: ConfigFields, num_layers: int) -> StateMixers:
    """Short convolutions, but for the layers of `layer_types` or `full_attn_idxs` (LFM2)."""
    listed = fields.sequence("layer_types")
    attention = fields.sequence("full_attn_idxs")
    if listed is None:
        chosen = range(num_layers) if attention is None else attention
        listed = ["full_attention" if i in chosen else "conv" for i in range(num_layers)]
    conv = ShortConv(
        fields.integer("hidden_size"), fields.integer("conv_L_cache"), fields.flag("conv_bias")
    )
    return _by_type(fields, listed, num_layers, {"conv": conv, "full_attention": None})


def delta_mixers(fields: ConfigFields, num_layers: int) -> StateMixers:
    """Gated DeltaNet, but for each `full_attention_interval`-th layer (Qwen3-Next, Qwen3.5)."""
    listed = fields.sequence("layer_types")
    period = fields.optional_integer("full_attention_interval") or 4
    fields.only("output_gate_type", "swish")
    if listed is None:
        kinds = ("linear_attention", "full_attention")
        listed = [kinds[(i + 1) % period == 0] for i in range(num_layers)]
    delta = GatedDelta(
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_size=fields.integer("linear_key_head_dim"),
        value_size=fields.integer("linear_value_head_dim"),
        width=fields.integer("linear_conv_kernel_dim"),
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise ConfigError(
            f"{fields.source} has {delta.num_value_heads} value heads of linear attention, not a "
            f"multiple of {delta.num_key_heads} key heads"
        )
    return _by_type(fields, listed, num_layers, {"linear_attention": delta, "full_attention": None})


def mamba_mixers(fields: ConfigFields, num_layers: int) -> StateMixers:
    """Mamba-2 but for the layers of attention in `layer_types` (Granite 4)."""
    listed = fields.sequence("layer_types") or fields.sequence("layers_block_type")
    fields.sequence("layers_block_type")
    mamba = _mamba2(fields, fields.integer("mamba_expand") * fields.integer("hidden_size"))
    kinds = {"linear_attention": mamba, "mamba": mamba, "full_attention": None, "attention": None}
    return _by_type(fields, listed or ["mamba"] * num_layers, num_layers, kinds)


def falcon_h1_mixers(fields: ConfigFields, num_layers: int) -> StateMixers:
    """Mamba-2 in every layer, next to attention; factors of its inputs (Falcon-H1)."""
    for name in ("layer_types", "layers_block_type"):
        if {"hybrid"} != {*(fields.sequence(name) or ["hybrid"])}:
            raise ConfigError(f"{fields.source} has {name} other than 'hybrid'")
    _read_initial_steps(fields)
    expanded = fields.integer("mamba_expand") * fields.integer("hidden_size")
    mamba = _mamba2(fields, fields.optional_integer("mamba_d_ssm") or expanded)
    gate, values, keys, queries, steps = fields.numbers("ssm_multipliers", 5)
    is_normed, before = fields.flag("mamba_rms_norm"), fields.flag("mamba_norm_before_gate")
    if mamba.bias != fields.flag("projectors_bias"):
        raise ConfigError(
            f"{fields.source} sets 'mamba_proj_bias' to {mamba.bias} and 'projectors_bias' to "
            f"{not mamba.bias}; they must agree"
        )
    factors = (gate, values, keys, queries, steps)
    norms_first = is_normed and before
    mamba = replace(mamba, has_norm=is_normed, factors=factors, norms_first=norms_first)
    return (mamba,) * num_layers


def _read_initial_steps(fields: ConfigFields) -> None:
    """Time steps with which training began."""
    for name in ("time_step_floor", "time_step_max", "time_step_min", "time_step_rank"):
        fields.value(name)


_NEMOTRON_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


_NEMOTRON_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def nemotron_h_kinds(fields: ConfigFields) -> tuple[str, ...]:
    """What each layer is: by a list, or letters in `hybrid_override_pattern`."""
    letters = fields.text("hybrid_override_pattern")
    listed = fields.sequence("layers_block_type") or fields.sequence("layer_types")
    fields.sequence("layer_types")
    kinds = [_NEMOTRON_KINDS.get(letter, letter) for letter in letters]
    if listed is not None:
        kinds = [_NEMOTRON_NAMES.get(str(kind), str(kind)) for kind in listed]
    if not kinds:
        kinds = ["linear_attention", "moe", "full_attention", "mlp"]  # as transformers has it
    unknown = next((kind for kind in kinds if kind not in _NEMOTRON_KINDS.values()), None)
    if unknown is not None:
        known = ", ".join(map(repr, _NEMOTRON_KINDS.values()))
        raise ConfigError(f"{fields.source} has a layer of kind {unknown!r}; supported are {known}")
    return tuple(kinds)


def nemotron_h_mixers(fields: ConfigFields, num_layers: int) -> StateMixers:
    """Mamba-2 in the layers that are one, in the keys of Nemotron-H."""
    _read_initial_steps(fields)
    for name in ("chunk_size", "expand", "mamba_proj_bias", "time_step_limit"):
        fields.value(name)  # which nothing reads, but for a kernel's size of blocks
    for name in ("mtp_layers_block_type", "mtp_hybrid_override_pattern"):
        fields.value(name)  # of layers for drafts
    fields.only("mamba_hidden_act", "silu")
    mamba = Mamba2(
        num_heads=fields.integer("mamba_num_heads"),
        head_size=fields.integer("mamba_head_dim"),
        num_groups=fields.integer("n_groups"),
        state_size=fields.integer("ssm_state_size"),
        width=fields.integer("conv_kernel"),
        bias=fields.flag("use_bias"),
        conv_bias=fields.flag("use_conv_bias"),
        least_step=fields.number("time_step_min"),
    )
    del num_layers  # those that are listed
    kinds = nemotron_h_kinds(fields)
    return tuple([mamba if kind == "linear_attention" else None for kind in kinds])


def _mamba2(fields: ConfigFields, values: int) -> Mamba2:
    """So many values of a token, in the keys of Granite 4 and Falcon-H1."""
    num_heads = fields.integer("mamba_n_heads")
    head_size = fields.value("mamba_d_head")
    if values % num_heads or head_size not in ("auto", values // num_heads):
        raise ConfigError(
            f"{fields.source} has {num_heads} heads of mamba_d_head {head_size} for {values} values"
        )
    limits = fields.sequence("time_step_limit") or (0.0, math.inf)
    # JSON has no infinity, which transformers writes as an object
    least, most = (limit if isinstance(limit, (int, float)) else math.inf for limit in limits)
    fields.optional_integer("mamba_chunk_size")  # of a kernel, not of the result
    return Mamba2(
        num_heads=num_heads,
        head_size=values // num_heads,
        num_groups=fields.integer("mamba_n_groups"),
        state_size=fields.integer("mamba_d_state"),
        width=fields.integer("mamba_d_conv"),
        bias=fields.flag("mamba_proj_bias"),
        conv_bias=fields.flag("mamba_conv_bias"),
        least_step=float(least),
        most_step=float(most),
    )


def _by_type(
    fields: ConfigFields,
    listed: Sequence[object],
    num_layers: int,
    mixers: Mapping[str, StateMixer | None],
) -> StateMixers:
    if len(listed) != num_layers:
        raise ConfigError(
            f"{fields.source} has {len(listed)} layer_types for {num_layers} layers, they must "
            "match"
        )
    unknown = next((kind for kind in listed if kind not in mixers), None)
    if unknown is not None:
        known = " and ".join(map(repr, mixers))
        raise ConfigError(f"{fields.source} has a layer of type {unknown!r}; supported are {known}")
    return tuple([mixers[str(kind)] for kind in listed])
