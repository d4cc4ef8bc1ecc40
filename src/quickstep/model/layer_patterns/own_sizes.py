"""Sizes that a config states for each layer by itself (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields

OwnSizes = Mapping[int, Mapping[str, int]]


def full_size(fields: ConfigFields, own: OwnSizes | None, layer: int) -> int | None:
    """The head size of a full layer; None for that of the model."""
    if own is None:
        return fields.optional_integer("global_head_dim")
    return own.get(layer, {}).get("head_dim")


def sizes_of_layers(fields: ConfigFields, num_layers: int) -> OwnSizes | None:
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
