"""How many positions a layer sees, and which layers rotate theirs."""

from __future__ import annotations

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields

Windows = tuple[int | None, ...]


def no_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Where `layer_types` name other mixers than attention."""
    del fields
    return (None,) * num_layers


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
    rotated = smollm_rotated(fields, num_layers)
    return listed or tuple(None if has_rope else window for has_rope in rotated)


def smollm_rotated(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    listed = fields.sequence("no_rope_layers")
    interval = fields.integer("no_rope_layer_interval")
    if listed is None:
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    if len(listed) < num_layers:
        raise ConfigError(
            f"{fields.source} has {len(listed)} no_rope_layers for {num_layers} layers"
        )
    return tuple(bool(value) for value in listed[:num_layers])


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


def olmo3_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """All layers slide but each fourth."""
    return _every_nth_full(fields, num_layers, 4)


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


def ministral_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Every layer slides, unless `layer_types` says otherwise."""
    window = fields.optional_integer("sliding_window")
    return _from_layer_types(fields, num_layers, window) or (window,) * num_layers


def minimax_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Full attention in every layer, which `attn_type_list` calls 1."""
    kinds = fields.sequence("attn_type_list") or ()
    if any(kind != 1 for kind in kinds):
        raise ConfigError(f"{fields.source} has an attn_type_list of other layers than 1")
    return full_attention(fields, num_layers)


def gemma4_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """All layers slide but each sixth and the last one."""
    return (*_every_nth_full(fields, num_layers, 6)[:-1], None)


def gemma3n_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """All layers slide but each fifth."""
    return _every_nth_full(fields, num_layers, 5)


def cohere2_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """All layers slide but each `sliding_window_pattern`-th (3 to 1 by default)."""
    period = fields.optional_integer("sliding_window_pattern") or 4
    fields.optional_integer("layer_switch")  # the same number
    return _every_nth_full(fields, num_layers, period)


def qwen2_moe_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Every other of the first `max_window_layers` slides if `use_sliding_window` is set."""
    window = fields.optional_integer("sliding_window") or None
    window = window if fields.flag("use_sliding_window") else None
    last = fields.optional_integer("max_window_layers") or 0
    listed = _from_layer_types(fields, num_layers, window)
    return listed or tuple(window if i % 2 == 0 and i < last else None for i in range(num_layers))
