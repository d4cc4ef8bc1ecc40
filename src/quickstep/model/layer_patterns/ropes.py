"""The frequencies of positions, and which layer uses which."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.layer_patterns.own_sizes import full_size, sizes_of_layers
from quickstep.model.layer_patterns.windows import (
    Windows,
    cohere2_windows,
    exaone_windows,
    gemma3_windows,
    gemma3n_windows,
    gemma4_windows,
    olmo3_windows,
    smollm_rotated,
)
from quickstep.model.rope_spec import (
    RopeKind,
    RopeSpec,
    extended_len,
    read_rope,
    rope_parameters,
)


class Ropes(msgspec.Struct, frozen=True):
    """All frequency sets of a model, which one each layer uses, and the length they allow.

    `of_queries` are a layer's own set for queries, where that is another one than for keys.
    """

    specs: tuple[RopeSpec, ...]
    of_layer: tuple[int | None, ...]
    max_model_len: int
    of_queries: tuple[int | None, ...] = ()


def no_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """Positions are left out."""
    del head_size
    for name in ("rope_theta", "partial_rotary_factor", "rope_parameters", "rope_scaling"):
        fields.value(name)
    return Ropes((), (None,) * num_layers, fields.integer("max_position_embeddings"))


def granite_hybrid_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """Positions are left out, unless `position_embedding_type` is `rope` (Granite 4)."""
    rotated = one_rope(fields, num_layers, head_size)
    if fields.text("position_embedding_type") == "rope":
        return rotated
    return Ropes((), (None,) * num_layers, rotated.max_model_len)


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
    rotated = smollm_rotated(fields, num_layers)
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
    return _local_ropes(fields, head_size, gemma3_windows(fields, num_layers))


def gemma3n_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """As Gemma 3's."""
    return _local_ropes(fields, head_size, gemma3n_windows(fields, num_layers))


def _local_ropes(fields: ConfigFields, head_size: int, windows: Windows) -> Ropes:
    """Frequencies of full layers, and those of layers with a window."""
    max_positions = fields.integer("max_position_embeddings")
    given = {"rope_theta": fields.optional_number("rope_theta") or 1_000_000.0}
    local = {"rope_theta": fields.optional_number("rope_local_base_freq") or 10_000.0}
    newer = fields.mapping("rope_parameters") or {}
    full = given | dict(fields.mapping("rope_scaling") or {}) | _nested(newer, "full_attention")
    sliding = local | _nested(newer, "sliding_attention")
    specs = tuple(read_rope(p, head_size, max_positions, None) for p in (full, sliding))
    of_layer = tuple(0 if window is None else 1 for window in windows)
    return Ropes(specs, of_layer, max_positions)


def _nested(parameters: object, name: str) -> dict[str, object]:
    inner = parameters.get(name) if isinstance(parameters, dict) else None
    return dict(inner) if isinstance(inner, dict) else {}


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


def minimax_ropes(fields: ConfigFields, num_layers: int, head_size: int) -> Ropes:
    """As `one_rope`; released files state how many dimensions are rotated."""
    max_positions = fields.integer("max_position_embeddings")
    parameters = rope_parameters(fields)
    rotated = fields.optional_integer("rotary_dim")
    if rotated is not None:
        parameters.setdefault("partial_rotary_factor", rotated / head_size)
    rope = read_rope(parameters, head_size, max_positions, None)
    return Ropes((rope,), (0,) * num_layers, extended_len(rope, max_positions))


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
    own = sizes_of_layers(fields, num_layers)
    wide = {full_size(fields, own, i) or head_size for i, w in enumerate(windows) if w is None}
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
    return smollm_rotated(fields, num_layers)


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
