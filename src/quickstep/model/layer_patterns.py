"""What differs from layer to layer, as configs state it: windows, NoPE, experts, frequencies.

Each function reads its keys from a `ConfigFields`; `architectures.py` names the ones that an
architecture uses. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.decoder_spec import (
    GatedDelta,
    LatentSpec,
    LayerInputs,
    LayerSpec,
    Mamba2,
    MoESpec,
    Multipliers,
    ShortConv,
    StateMixer,
)
from quickstep.model.rope_spec import (
    RopeKind,
    RopeSpec,
    extended_len,
    read_rope,
    rope_parameters,
)

Windows = tuple[int | None, ...]


class Ropes(msgspec.Struct, frozen=True):
    """All frequency sets of a model, which one each layer uses, and the length they allow.

    `of_queries` are a layer's own set for queries, where that is another one than for keys.
    """

    specs: tuple[RopeSpec, ...]
    of_layer: tuple[int | None, ...]
    max_model_len: int
    of_queries: tuple[int | None, ...] = ()


# Of each layer what it has in place of attention; None for attention.
StateMixers = tuple[StateMixer | None, ...]


def make_layers(
    windows: Windows, ropes: Ropes, sparse: Sequence[bool], mixers: StateMixers
) -> tuple[LayerSpec, ...]:
    """Zip the patterns."""
    queries = ropes.of_queries or (None,) * len(windows)
    columns = zip(windows, ropes.of_layer, sparse, mixers, queries, strict=True)
    return tuple([LayerSpec(*column) for column in columns])


def all_attention(fields: ConfigFields, num_layers: int) -> StateMixers:
    """No layer keeps a state."""
    del fields
    return (None,) * num_layers


def no_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Where `layer_types` name other mixers than attention."""
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


def lfm_width(fields: ConfigFields) -> int:
    """Two thirds of the stated width, times a factor, rounded up, unless it is stated as it is."""
    width = fields.optional_integer("block_ff_dim") or fields.integer("intermediate_size")
    fields.optional_integer("intermediate_size")
    multiple, factor = (
        fields.integer("block_multiple_of"),
        fields.number("block_ffn_dim_multiplier"),
    )
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(factor * (2 * width // 3))
    return -(-width // multiple) * multiple


def lfm_experts(fields: ConfigFields) -> MoESpec:
    """A sigmoid, and a bias of each expert for the choice unless `use_expert_bias` is off."""
    return MoESpec(
        num_experts=fields.integer("num_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob"),
        sigmoid=True,
        selection_bias=fields.flag("use_expert_bias"),
        weight_scale=fields.number("routed_scaling_factor"),
    )


def lfm_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """All but the first `num_dense_layers`."""
    first = fields.optional_integer("num_dense_layers") or 0
    return tuple(index >= first for index in range(num_layers))


def delta_mixers(fields: ConfigFields, num_layers: int) -> StateMixers:
    """Gated DeltaNet, but for each `full_attention_interval`-th layer (Qwen3-Next, Qwen3.5)."""
    listed = fields.sequence("layer_types")
    period = fields.optional_integer("full_attention_interval") or 4
    _only(fields, "output_gate_type", "swish")
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
    gate, values, keys, queries, steps = _numbers(fields, "ssm_multipliers", 5)
    is_normed, before = fields.flag("mamba_rms_norm"), fields.flag("mamba_norm_before_gate")
    if is_normed and before:
        raise ConfigError(
            f"{fields.source} sets 'mamba_norm_before_gate'; a norm before the gate is not "
            "implemented"
        )
    if mamba.bias != fields.flag("projectors_bias"):
        raise ConfigError(
            f"{fields.source} sets 'mamba_proj_bias' to {mamba.bias} and 'projectors_bias' to "
            f"{not mamba.bias}; they must agree"
        )
    mamba = replace(mamba, has_norm=is_normed, factors=(gate, values, keys, queries, steps))
    return (mamba,) * num_layers


def _read_initial_steps(fields: ConfigFields) -> None:
    """Time steps with which training began."""
    for name in ("time_step_floor", "time_step_max", "time_step_min", "time_step_rank"):
        fields.value(name)


def _numbers(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """So many numbers, all 1 where the config has none."""
    listed = fields.sequence(name)
    numbers = [value for value in listed or () if isinstance(value, (int, float))]
    if listed is not None and len(numbers) != count:
        raise ConfigError(f"{fields.source} sets {name!r} to {listed!r:.80}, not {count} numbers")
    return tuple(map(float, numbers)) or (1.0,) * count


def falcon_h1_multipliers(fields: ConfigFields) -> Multipliers:
    """But for that of keys, which is in the scale of attention."""
    gate, down = _numbers(fields, "mlp_multipliers", 2)
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


_NEMOTRON_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NEMOTRON_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def _nemotron_kinds(fields: ConfigFields) -> tuple[str, ...]:
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


def nemotron_h_count(fields: ConfigFields) -> int:
    """As many as are listed, whatever `num_hidden_layers` is: newer configs have no such key."""
    fields.optional_integer("num_hidden_layers")
    return len(_nemotron_kinds(fields))


def nemotron_h_mixers(fields: ConfigFields, num_layers: int) -> StateMixers:
    """Mamba-2 in the layers that are one, in the keys of Nemotron-H."""
    _read_initial_steps(fields)
    for name in ("chunk_size", "expand", "mamba_proj_bias", "time_step_limit"):
        fields.value(name)  # which nothing reads, but for a kernel's size of blocks
    for name in ("mtp_layers_block_type", "mtp_hybrid_override_pattern"):
        fields.value(name)  # of layers for drafts
    _only(fields, "mamba_hidden_act", "silu")
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
    kinds = _nemotron_kinds(fields)
    return tuple([mamba if kind == "linear_attention" else None for kind in kinds])


def nemotron_h_layers(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Each is a mixer or a feed-forward part."""
    kinds = _nemotron_kinds(fields)
    parts = [kind in ("linear_attention", "full_attention") for kind in kinds]
    return tuple(
        [
            replace(layer, has_mixer=is_mixer, has_feed_forward=not is_mixer)
            for layer, is_mixer in zip(layers, parts, strict=True)
        ]
    )


def nemotron_h_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """The layers that are a mixture."""
    del num_layers  # those that are listed
    return tuple([kind == "moe" for kind in _nemotron_kinds(fields)])


def nemotron_h_experts(fields: ConfigFields) -> MoESpec | None:
    """As GLM's, with an expert of all tokens that has its own width; None for a model without."""
    width = fields.optional_integer("moe_shared_expert_intermediate_size")
    for name in ("num_experts_per_tok", "n_shared_experts"):
        fields.value(name)
    experts = glm_experts(fields)
    if "moe" not in _nemotron_kinds(fields):
        return None
    return replace(experts, shared_width=width or fields.integer("moe_intermediate_size"))


def no_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """Positions are left out."""
    del head_size
    for name in ("rope_theta", "partial_rotary_factor", "rope_parameters", "rope_scaling"):
        fields.value(name)
    return Ropes((), (None,) * num_layers, fields.integer("max_position_embeddings"))


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


def granite_hybrid_width(fields: ConfigFields) -> int:
    """That of the MLP, which is an expert of all tokens in models that have others."""
    for key in ("intermediate_size", "num_experts_per_tok"):  # of experts
        fields.optional_integer(key)
    return fields.integer("shared_intermediate_size")


def granite_hybrid_experts(fields: ConfigFields) -> MoESpec | None:
    """A softmax over the chosen experts, and the MLP as an expert of all tokens; None for a dense
    model (Granite 4).
    """
    count = fields.optional_integer("num_local_experts")
    if not count:
        return None
    return MoESpec(
        num_experts=count,
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalise=True,
        shared_width=fields.integer("shared_intermediate_size"),
    )


def granite_hybrid_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Every layer, if there are experts."""
    return (bool(fields.optional_integer("num_local_experts")),) * num_layers


def granite_hybrid_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """Positions are left out, unless `position_embedding_type` is `rope` (Granite 4)."""
    rotated = one_rope(fields, num_layers, head_size)
    if fields.text("position_embedding_type") == "rope":
        return rotated
    return Ropes((), (None,) * num_layers, rotated.max_model_len)


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


def _from_layer_types(fields: ConfigFields, num_layers: int, window: int | None) -> Windows | None:
    """Windows by `layer_types`, where the config has them."""
    types = fields.sequence("layer_types")
    if types is None:
        return None
    if len(types) != num_layers:
        raise ConfigError(
            f"{fields.source} has {len(types)} layer_types for {num_layers} layers, they must match"
        )
    unknown = next((t for t in types if t not in ("full_attention", "sliding_attention")), None)
    if unknown is not None:
        raise ConfigError(
            f"{fields.source} has a layer of type {unknown!r}; supported are 'full_attention' and "
            "'sliding_attention'"
        )
    if window is None and "sliding_attention" in types:
        raise ConfigError(f"{fields.source} has sliding_attention layers and no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def full_attention(fields: ConfigFields, num_layers: int) -> Windows:
    """No windows. `layer_types`, if present, must agree."""
    windows = _from_layer_types(fields, num_layers, window=None)
    return windows or (None,) * num_layers


def every_layer_window(fields: ConfigFields, num_layers: int) -> Windows:
    """One window for all layers, or none (Mistral, Mixtral, Phi-3)."""
    return (fields.optional_integer("sliding_window"),) * num_layers


def optional_window(fields: ConfigFields, num_layers: int) -> Windows:
    """One window for all layers if `use_sliding_window` is set (Qwen3-MoE)."""
    window = fields.optional_integer("sliding_window")
    fields.optional_integer("max_window_layers")
    used = fields.flag("use_sliding_window")
    return (window if used else None,) * num_layers


def qwen_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Layers from `max_window_layers` on slide if `use_sliding_window` is set (Qwen2, Qwen3)."""
    window = fields.optional_integer("sliding_window")
    window = window if fields.flag("use_sliding_window") else None
    first = fields.optional_integer("max_window_layers") or 0
    listed = _from_layer_types(fields, num_layers, window)
    return listed or tuple(window if i >= first else None for i in range(num_layers))


def gemma2_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Every other layer slides, the first one included."""
    return _every_nth_full(fields, num_layers, 2)


def gemma3_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """All layers slide but each `sliding_window_pattern`-th (5 to 1 by default)."""
    hidden = fields.optional_integer("_sliding_window_pattern")
    period = fields.optional_integer("sliding_window_pattern") or hidden or 6
    return _every_nth_full(fields, num_layers, period)


def _every_nth_full(fields: ConfigFields, num_layers: int, period: int) -> Windows:
    window = fields.integer("sliding_window")
    listed = _from_layer_types(fields, num_layers, window)
    return listed or tuple(window if (i + 1) % period else None for i in range(num_layers))


def granite_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """All layers slide but each fourth, the first one included (Granite with sliding windows)."""
    window = fields.optional_integer("sliding_window")
    listed = _from_layer_types(fields, num_layers, window)
    return listed or tuple(window if i % 4 else None for i in range(num_layers))


def smollm_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """NoPE layers slide if `use_sliding_window` is set."""
    window = fields.optional_integer("sliding_window")
    window = window if fields.flag("use_sliding_window") else None
    fields.optional_integer("max_window_layers")
    listed = _from_layer_types(fields, num_layers, window)
    rotated = _smollm_rotated(fields, num_layers)
    return listed or tuple(None if has_rope else window for has_rope in rotated)


def _smollm_rotated(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    listed = fields.sequence("no_rope_layers")
    interval = fields.integer("no_rope_layer_interval")
    if listed is None:
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    if len(listed) < num_layers:
        raise ConfigError(
            f"{fields.source} has {len(listed)} no_rope_layers for {num_layers} layers"
        )
    return tuple(bool(value) for value in listed[:num_layers])


def one_rope(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """The same frequencies in every layer."""
    max_positions = fields.integer("max_position_embeddings")
    trained_len = fields.optional_integer("original_max_position_embeddings")
    rope = read_rope(rope_parameters(fields), head_size, max_positions, trained_len)
    return Ropes((rope,), (0,) * num_layers, extended_len(rope, max_positions))


def phi_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """As `one_rope`; old Phi-3 files have `su` or `yarn` for longrope."""
    max_positions = fields.integer("max_position_embeddings")
    trained_len = fields.integer("original_max_position_embeddings")
    parameters = rope_parameters(fields)
    for name in ("type", "rope_type"):
        if parameters.get(name) == "yarn":
            parameters[name] = RopeKind.LONGROPE.value
    rope = read_rope(parameters, head_size, max_positions, trained_len)
    return Ropes((rope,), (0,) * num_layers, extended_len(rope, max_positions))


def smollm_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """One set of frequencies; NoPE layers use none."""
    ropes = one_rope(fields, num_layers, head_size)
    rotated = _smollm_rotated(fields, num_layers)
    return Ropes(ropes.specs, tuple(0 if on else None for on in rotated), ropes.max_model_len)


def granite_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """A base of wavelengths per layer, where `layer_rope_theta` lists them; 0 is NoPE."""
    listed = fields.sequence("layer_rope_theta")
    if listed is None:
        return one_rope(fields, num_layers, head_size)
    thetas = [value for value in listed if isinstance(value, (int, float))]
    if len(thetas) != num_layers or len(thetas) != len(listed):
        raise ConfigError(
            f"{fields.source} has {len(thetas)} numbers in layer_rope_theta for {num_layers} layers"
        )
    max_positions = fields.integer("max_position_embeddings")
    parameters = rope_parameters(fields)
    used = sorted({float(theta) for theta in thetas if theta})
    specs = tuple(
        read_rope(parameters | {"rope_theta": theta}, head_size, max_positions, None)
        for theta in used
    )
    of_layer = tuple(used.index(float(theta)) if theta else None for theta in thetas)
    longest = min((extended_len(rope, max_positions) for rope in specs), default=max_positions)
    return Ropes(specs, of_layer, longest)


def gpt_oss_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """As `one_rope`; the released files name the trained length a second time."""
    fields.optional_integer("initial_context_length")
    return one_rope(fields, num_layers, head_size)


def gemma3_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """Full layers use (scaled) global frequencies, sliding layers local ones.

    `max_position_embeddings` already counts the scaling.
    """
    max_positions = fields.integer("max_position_embeddings")
    given = {"rope_theta": fields.optional_number("rope_theta") or 1_000_000.0}
    local = {"rope_theta": fields.optional_number("rope_local_base_freq") or 10_000.0}
    newer = fields.mapping("rope_parameters") or {}
    full = given | dict(fields.mapping("rope_scaling") or {}) | _nested(newer, "full_attention")
    sliding = local | _nested(newer, "sliding_attention")
    specs = tuple(read_rope(p, head_size, max_positions, None) for p in (full, sliding))
    windows = gemma3_windows(fields, num_layers)
    of_layer = tuple(0 if window is None else 1 for window in windows)
    return Ropes(specs, of_layer, max_positions)


def _nested(parameters: object, name: str) -> dict[str, object]:
    inner = parameters.get(name) if isinstance(parameters, dict) else None
    return dict(inner) if isinstance(inner, dict) else {}


def mixtral_experts(fields: ConfigFields) -> MoESpec:
    """Every chosen expert's weight is normalised."""
    return MoESpec(
        num_experts=fields.integer("num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalise=True,
    )


def qwen_experts(fields: ConfigFields) -> MoESpec:
    """Normalised only if `norm_topk_prob` is set."""
    count = fields.optional_integer("num_local_experts")
    return MoESpec(
        num_experts=count or fields.integer("num_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob"),
    )


def qwen_vl_experts(fields: ConfigFields) -> MoESpec:
    """As Qwen's, always normalised."""
    return replace(qwen_experts(fields), normalise=True)


def glm_experts(fields: ConfigFields) -> MoESpec:
    """DeepSeek-V3's: a sigmoid, a bias of each expert, groups, and an expert of all tokens."""
    count = fields.optional_integer("num_local_experts") or fields.integer("n_routed_experts")
    width = fields.integer("moe_intermediate_size")
    groups, of_token = fields.integer("n_group"), fields.integer("topk_group")
    groups, of_token = _checked_groups(fields, count, groups, of_token)
    return MoESpec(
        num_experts=count,
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=width,
        normalise=fields.flag("norm_topk_prob"),
        sigmoid=True,
        selection_bias=True,
        num_groups=groups,
        groups_per_token=of_token,
        weight_scale=fields.number("routed_scaling_factor"),
        shared_width=width * fields.integer("n_shared_experts"),
    )


def _checked_groups(
    fields: ConfigFields, count: int, groups: int, of_token: int
) -> tuple[int, int]:
    if groups < 1 or count % groups or not 1 <= of_token <= groups:
        raise ConfigError(
            f"{fields.source} has {count} experts in {groups} groups, of which a token has "
            f"{of_token}; the groups must be of equal size"
        )
    return groups, of_token


def olmoe_experts(fields: ConfigFields) -> MoESpec:
    """As Qwen's; an expert is as wide as `intermediate_size`."""
    return MoESpec(
        num_experts=fields.optional_integer("num_local_experts") or fields.integer("num_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalise=fields.flag("norm_topk_prob"),
    )


def gpt_oss_experts(fields: ConfigFields) -> MoESpec:
    """Biases everywhere, and a softmax over only the chosen experts."""
    chosen = fields.integer("num_experts_per_tok")
    fields.repeated("experts_per_token", "num_experts_per_tok")
    return MoESpec(
        num_experts=fields.integer("num_local_experts"),
        experts_per_token=chosen,
        intermediate_size=fields.integer("intermediate_size"),
        normalise=True,
        biases=True,
    )


def all_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Every layer is a mixture of experts."""
    del fields
    return (True,) * num_layers


def glm_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """All but the first `first_k_dense_replace` layers."""
    first = fields.optional_integer("first_k_dense_replace") or 0
    return tuple(index >= first for index in range(num_layers))


def qwen_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer, but those in `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step")
    dense = set(fields.sequence("mlp_only_layers") or ())
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


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


def latent_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """As `one_rope`, of the part of a head that is rotated; no more positions than an indexer would
    choose among.
    """
    del head_size
    ropes = one_rope(fields, num_layers, fields.integer("qk_rope_head_dim"))
    num_indexed = fields.optional_integer("index_topk")
    if num_indexed is None:
        return ropes
    return Ropes(ropes.specs, ropes.of_layer, min(ropes.max_model_len, num_indexed))


def indexed_attention(fields: ConfigFields, num_layers: int) -> Windows:
    """Every layer attends to the positions that an indexer chooses: to all, as long as there are
    not more of them.
    """
    for name in ("index_head_dim", "index_n_heads", "index_topk_freq", "index_topk_pattern"):
        fields.value(name)
    for name in ("index_skip_topk_offset", "indexer_types", "indexer_rope_interleave"):
        fields.value(name)
    unknown = {"sliding_attention"} & set(fields.sequence("layer_types") or ())
    if unknown:
        raise ConfigError(f"{fields.source} has layers with windows, which need another mixer")
    return (None,) * num_layers


def listed_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """By `mlp_layer_types`, or all but the first `first_k_dense_replace` layers."""
    types = fields.sequence("mlp_layer_types")
    after = glm_sparse(fields, num_layers)
    if types is None:
        return after
    if len(types) != num_layers or not {"dense", "sparse"}.issuperset(types):
        raise ConfigError(
            f"{fields.source} has {len(types)} mlp_layer_types for {num_layers} layers; each is "
            "'dense' or 'sparse'"
        )
    return tuple(kind == "sparse" for kind in types)


def deepseek_experts(fields: ConfigFields) -> MoESpec:
    """As GLM's, with the keys that only DeepSeek's files have."""
    _only(fields, "topk_method", "noaux_tc")
    _only(fields, "scoring_func", "sigmoid")
    _read_training_keys(fields)
    return glm_experts(fields)


def deepseek_v2_experts(fields: ConfigFields) -> MoESpec:
    """Weights of a softmax, not normalised; the best groups are those of the best experts."""
    method = fields.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"{fields.source} sets 'topk_method' to {method!r}; supported are 'greedy' and "
            "'group_limited_greedy'"
        )
    _only(fields, "scoring_func", "softmax")
    _read_training_keys(fields)
    count, width = fields.integer("n_routed_experts"), fields.integer("moe_intermediate_size")
    groups, of_token = fields.optional_integer("n_group"), fields.optional_integer("topk_group")
    if method == "greedy":
        groups = of_token = 1
    groups, of_token = _checked_groups(fields, count, groups or 1, of_token or 1)
    return MoESpec(
        num_experts=count,
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=width,
        normalise=False,
        num_groups=groups,
        groups_per_token=of_token,
        counted_per_group=1,
        weight_scale=fields.number("routed_scaling_factor"),
        shared_width=width * fields.integer("n_shared_experts"),
    )


def _only(fields: ConfigFields, name: str, supported: str) -> None:
    value = fields.text(name)
    if value not in ("", supported):
        raise ConfigError(f"{fields.source} sets {name!r} to {value!r}; supported is {supported!r}")


def _read_training_keys(fields: ConfigFields) -> None:
    """Where experts were, and what balanced them, in training."""
    for name in ("ep_size", "aux_loss_alpha", "seq_aux"):
        fields.value(name)


def olmo3_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """All layers slide but each fourth."""
    return _every_nth_full(fields, num_layers, 4)


def olmo3_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """Only full layers have scaled frequencies; older files have one scaling for both kinds."""
    max_positions = fields.integer("max_position_embeddings")
    given: dict[str, object] = {"rope_theta": fields.number("rope_theta")}
    local: dict[str, object] = {"rope_theta": 500_000.0}  # `rope_theta` is of full layers only
    newer = fields.mapping("rope_parameters") or {}
    full = given | dict(fields.mapping("rope_scaling") or {}) | _nested(newer, "full_attention")
    sliding = local | _nested(newer, "sliding_attention")
    specs = tuple(read_rope(p, head_size, max_positions, None) for p in (full, sliding))
    windows = olmo3_windows(fields, num_layers)
    of_layer = tuple(0 if window is None else 1 for window in windows)
    return Ropes(specs, of_layer, extended_len(specs[0], max_positions))


def exaone_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """All layers slide but each `sliding_window_pattern`-th; none without a window."""
    window, pattern = fields.optional_integer("sliding_window"), 0
    listed = _from_layer_types(fields, num_layers, window)
    if listed is not None:
        fields.value("sliding_window_pattern")  # may be letters, which the list spells out
        return listed
    if window is not None:
        pattern = fields.integer("sliding_window_pattern")
    return tuple(window if pattern and (i + 1) % pattern else None for i in range(num_layers))


def exaone_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """Full layers leave positions out where others slide."""
    ropes = one_rope(fields, num_layers, head_size)
    if fields.optional_integer("sliding_window") is None:
        return ropes
    windows = exaone_windows(fields, num_layers)
    of_layer = tuple(None if window is None else 0 for window in windows)
    return Ropes(ropes.specs, of_layer, ropes.max_model_len)


def interleaved_rope(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """As `one_rope`; neighbours are turned."""
    ropes = one_rope(fields, num_layers, head_size)
    specs = tuple(replace(rope, interleaved=True) for rope in ropes.specs)
    return replace(ropes, specs=specs)


def ministral_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Every layer slides, unless `layer_types` says otherwise."""
    window = fields.optional_integer("sliding_window")
    return _from_layer_types(fields, num_layers, window) or (window,) * num_layers


def ministral3_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """As `one_rope`; queries grow with the distance from the start, by `llama_4_scaling_beta`."""
    max_positions = fields.integer("max_position_embeddings")
    parameters = rope_parameters(fields)
    parameters.pop("max_position_embeddings", None)  # the same number once more
    growth = parameters.pop("llama_4_scaling_beta", None)
    rope = read_rope(parameters, head_size, max_positions, None)
    keys, longest = (0,) * num_layers, extended_len(rope, max_positions)
    if not isinstance(growth, (int, float)) or not growth:
        return Ropes((rope,), keys, longest)
    grown = replace(rope, growth=float(growth), growth_len=rope.trained_len)
    return Ropes((rope, grown), keys, longest, (1,) * num_layers)


def minimax_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Full attention in every layer, which `attn_type_list` calls 1."""
    kinds = fields.sequence("attn_type_list") or ()
    if any(kind != 1 for kind in kinds):
        raise ConfigError(f"{fields.source} has an attn_type_list of other layers than 1")
    return full_attention(fields, num_layers)


def minimax_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """As `one_rope`; released files state how many dimensions are rotated."""
    max_positions = fields.integer("max_position_embeddings")
    parameters = rope_parameters(fields)
    rotated = fields.optional_integer("rotary_dim")
    if rotated is not None:
        parameters.setdefault("partial_rotary_factor", rotated / head_size)
    rope = read_rope(parameters, head_size, max_positions, None)
    return Ropes((rope,), (0,) * num_layers, extended_len(rope, max_positions))


def minimax_experts(fields: ConfigFields) -> MoESpec:
    """A sigmoid, and a bias of each expert for the choice."""
    for name in ("mlp_intermediate_size", "mtp_transformer_layers", "use_mtp"):
        fields.value(name)  # of layers that are not there, and of heads that are not computed
    return MoESpec(
        num_experts=fields.integer("num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalise=True,
        sigmoid=True,
        selection_bias=True,
    )


def ernie_experts(fields: ConfigFields) -> MoESpec:
    """A softmax, a bias of each expert for the choice, and an expert of all tokens."""
    fields.value("moe_capacity")  # limits of a token's experts in training
    width = fields.integer("moe_intermediate_size")
    return MoESpec(
        num_experts=fields.optional_integer("num_experts") or fields.integer("moe_num_experts"),
        experts_per_token=fields.integer("moe_k"),
        intermediate_size=width,
        normalise=True,
        selection_bias=True,
        shared_width=width * (fields.optional_integer("moe_num_shared_experts") or 0),
    )


def ernie_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Each `moe_layer_interval`-th layer, from one to another."""
    first = fields.optional_integer("moe_layer_start_index") or 0
    last = fields.optional_integer("moe_layer_end_index")
    last = num_layers - 1 if last in (None, -1) else last
    step = fields.integer("moe_layer_interval")
    return tuple(first <= i <= last and (i + 1) % step == 0 for i in range(num_layers))


def gemma4_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """All layers slide but each sixth and the last one."""
    return (*_every_nth_full(fields, num_layers, 6)[:-1], None)


def gemma4_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """Full layers turn a part of wider heads, as if they turned all of them."""
    max_positions = fields.integer("max_position_embeddings")
    full: dict[str, object] = {"rope_type": "proportional", "rope_theta": 1_000_000.0}
    full["partial_rotary_factor"] = 0.25
    sliding: dict[str, object] = {"rope_theta": 10_000.0}
    given = fields.mapping("rope_parameters")
    if given is not None:
        full, sliding = _nested(given, "full_attention"), _nested(given, "sliding_attention")
    windows = gemma4_windows(fields, num_layers)
    own = _per_layer(fields, num_layers)
    wide = {_full_size(fields, own, i) or head_size for i, w in enumerate(windows) if w is None}
    if len(wide) > 1:
        raise ConfigError(
            f"{fields.source} has full layers of several head sizes; one is supported"
        )
    specs = (
        read_rope(full, wide.pop(), max_positions, None),
        read_rope(sliding, head_size, max_positions, None),
    )
    of_layer = tuple(0 if window is None else 1 for window in windows)
    return Ropes(specs, of_layer, extended_len(specs[0], max_positions))


OwnSizes = Mapping[int, Mapping[str, int]]


def _full_size(fields: ConfigFields, own: OwnSizes | None, layer: int) -> int | None:
    """The head size of a full layer; None for that of the model."""
    if own is None:
        return fields.optional_integer("global_head_dim")
    return own.get(layer, {}).get("head_dim")


def _per_layer(fields: ConfigFields, num_layers: int) -> OwnSizes | None:
    """What newer files list of each layer that differs; None without a list. A layer's number may
    have zeros in front.
    """
    listed = fields.mapping("per_layer_config")
    if listed is None:
        return None
    found: dict[int, Mapping[str, int]] = {}
    for name, values in listed.items():
        index = int(name) if name.isdecimal() else num_layers
        if index >= num_layers or not isinstance(values, Mapping):
            raise ConfigError(
                f"{fields.source} has {name!r} in per_layer_config; it must be one of "
                f"{num_layers} layers with an object"
            )
        for key, value in values.items():
            if key not in ("head_dim", "num_key_value_heads") or not isinstance(value, int):
                raise ConfigError(
                    f"{fields.source} sets {key!r} of layer {index} to {value!r} in "
                    "per_layer_config; supported are numbers of 'head_dim' and "
                    "'num_key_value_heads'"
                )
        found[index] = dict(values)
    return found


def gemma4_sizes(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Full layers have other heads; the last layers read the keys of the last one of their kind
    before them.
    """
    own = _per_layer(fields, len(layers))
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
                head_size=_full_size(fields, own, index),
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


def gemma4_experts(fields: ConfigFields) -> MoESpec | None:
    """Next to the MLP, where `enable_moe_block` is set."""
    sizes = [fields.optional_integer(n) for n in ("top_k_experts", "moe_intermediate_size")]
    count = fields.optional_integer("num_experts")
    if not fields.flag("enable_moe_block"):
        return None
    return MoESpec(
        num_experts=count or fields.integer("num_experts"),
        experts_per_token=sizes[0] or fields.integer("top_k_experts"),
        intermediate_size=sizes[1] or fields.integer("moe_intermediate_size"),
        normalise=True,
        with_mlp=True,
    )


def gemma4_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """All layers or none."""
    return (fields.flag("enable_moe_block"),) * num_layers


def cohere2_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """All layers slide but each `sliding_window_pattern`-th (3 to 1 by default)."""
    period = fields.optional_integer("sliding_window_pattern") or 4
    fields.optional_integer("layer_switch")  # the same number
    return _every_nth_full(fields, num_layers, period)


def cohere2_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """Neighbours are turned where layers slide; full layers leave positions out."""
    ropes = interleaved_rope(fields, num_layers, head_size)
    windows = cohere2_windows(fields, num_layers)
    return replace(ropes, of_layer=tuple(None if window is None else 0 for window in windows))


def _llama4_rotated(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """All but each `no_rope_layer_interval`-th; an empty list of exceptions is none."""
    interval = fields.integer("no_rope_layer_interval")
    if not fields.sequence("no_rope_layers"):
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    return _smollm_rotated(fields, num_layers)


def llama4_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """Neighbours are turned; in layers without positions, queries grow with theirs."""
    ropes = interleaved_rope(fields, num_layers, head_size)
    rotated = _llama4_rotated(fields, num_layers)
    of_layer = tuple(0 if on else None for on in rotated)
    scale, period = fields.number("attn_scale"), fields.integer("floor_scale")
    if not fields.value("attn_temperature_tuning") or not scale or all(rotated):
        return replace(ropes, of_layer=of_layer)
    grown = RopeSpec(
        RopeKind.PROPORTIONAL,
        head_size,
        1.0,
        ropes.max_model_len,
        growth=scale,
        growth_len=period,
        growth_first=1,
    )
    of_queries = tuple(None if on else 1 for on in rotated)
    return Ropes((*ropes.specs, grown), of_layer, ropes.max_model_len, of_queries)


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


def llama4_width(fields: ConfigFields) -> int:
    """That of the MLP, which is not that of experts."""
    return fields.integer("intermediate_size_mlp")


def llama4_experts(fields: ConfigFields) -> MoESpec:
    """The sigmoid of the best scores multiplies what the experts read; an expert of all tokens."""
    width = fields.integer("intermediate_size")
    return MoESpec(
        num_experts=fields.integer("num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=width,
        normalise=False,
        sigmoid=True,
        shared_width=width,
        weighs_inputs=True,
    )


def llama4_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Those of `moe_layers`, or each `interleave_moe_layer_step`-th."""
    step, listed = fields.integer("interleave_moe_layer_step"), fields.sequence("moe_layers")
    if listed is not None:
        return tuple(i in listed for i in range(num_layers))
    return tuple((i + 1) % step == 0 for i in range(num_layers))


def qwen2_moe_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Every other of the first `max_window_layers` slides if `use_sliding_window` is set."""
    window = fields.optional_integer("sliding_window") or None
    window = window if fields.flag("use_sliding_window") else None
    last = fields.optional_integer("max_window_layers") or 0
    listed = _from_layer_types(fields, num_layers, window)
    return listed or tuple(window if i % 2 == 0 and i < last else None for i in range(num_layers))


def qwen2_moe_experts(fields: ConfigFields) -> MoESpec:
    """As Qwen3's, and an expert of all tokens with a gate."""
    width = fields.integer("shared_expert_intermediate_size")
    return replace(qwen_experts(fields), shared_width=width, shared_gate=True)


def qwen3_5_experts(fields: ConfigFields) -> MoESpec:
    """As Qwen2's, always normalised."""
    return replace(qwen2_moe_experts(fields), normalise=True)


def expert_width(fields: ConfigFields) -> int:
    """That of an expert: no layer has another feed-forward part."""
    fields.optional_integer("intermediate_size")
    return fields.integer("moe_intermediate_size")
