"""The spec of an architecture that only `transformers` knows, from its config class.

Used by `spec.read_spec` for names outside of the native table. `transformers` is an optional
dependency and is imported here, on demand; remote code is never allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quickstep.errors import ConfigError, how_to_install
from quickstep.model.checkpoint.safetensors_files import open_tensor_files
from quickstep.model.decoder_spec import LayerSpec, ModelSpec

# Their frequencies follow the longest sequence of a batch, so that neighbours would change tokens.
_BATCH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope"})


def read_fallback_spec(path: Path, name: str, supported: str) -> ModelSpec:
    """Read what sizing and the runtime need. `supported` lists the native architectures.

    Raises:
        ConfigError: `transformers` is missing, does not know the architecture either, or the
            config has a part that paged attention cannot honour.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ConfigError(
            f"architecture {name!r} is not native to Quickstep (native are {supported}); "
            f"others run through transformers: {how_to_install('transformers')}"
        ) from None
    try:
        complete = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        config = complete.get_text_config(decoder=True)
    except (ValueError, KeyError, OSError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"architecture {name!r} is not native to Quickstep (native are {supported}) and "
            f"transformers cannot read it: {first}"
        ) from None
    values: Mapping[str, Any] = config.to_dict()
    _refuse(name, values)
    try:
        return _sizes(path, name, config, values)
    except AttributeError as error:
        raise ConfigError(
            f"architecture {name!r} cannot be served with paged attention: {error}"
        ) from None


def _sizes(path: Path, name: str, config: Any, values: Mapping[str, Any]) -> ModelSpec:
    """The spec from the attributes that configs of attention decoders have in common."""
    hidden_size, num_heads = int(config.hidden_size), int(config.num_attention_heads)
    tensors = open_tensor_files(path).tensors.values()
    num_layers = int(config.num_hidden_layers)
    return ModelSpec(
        architecture=name,
        vocab_size=int(config.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=int(values.get("intermediate_size") or 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(values.get("num_key_value_heads") or num_heads),
        head_size=int(values.get("head_dim") or hidden_size // num_heads),
        max_model_len=int(config.max_position_embeddings),
        layers=tuple(LayerSpec(window, None, False) for window in _windows(values, num_layers)),
        ropes=(),
        norm_eps=0.0,
        attention_scale=0.0,
        dtype=str(values.get("dtype") or "").removeprefix("torch."),
        native=False,
        parameter_count=sum(math.prod(tensor.shape) for tensor in tensors),
    )


def _refuse(name: str, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for what would be computed wrongly rather than not at all."""
    if values.get("is_encoder_decoder"):
        raise ConfigError(f"architecture {name!r} has an encoder; only decoders can be served")
    if values.get("quantization_config"):
        raise ConfigError(
            f"the checkpoint is quantized, and architecture {name!r} runs through transformers, "
            "where only unquantized checkpoints are served; use the unquantized one"
        )
    kinds = {str(kind) for kind in values.get("layer_types") or ()}
    strange = sorted(kinds - {"full_attention", "sliding_attention"})
    if strange:
        raise ConfigError(f"architecture {name!r} has {strange[0]!r} layers, which cannot be paged")
    parameters = values.get("rope_parameters") or {}
    nested = [part for part in parameters.values() if isinstance(part, Mapping)]
    for part in (parameters, *nested):
        kind = part.get("rope_type")
        if kind in _BATCH_DEPENDENT_ROPES:
            raise ConfigError(
                f"architecture {name!r} uses rope type {kind!r}, which transformers computes from "
                "the longest sequence of a batch; it is only supported natively"
            )


def _windows(values: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window; the loader checks that the layers do ask for these."""
    window = values.get("sliding_window")
    if window is None or values.get("use_sliding_window") is False:
        return (None,) * num_layers
    kinds = values.get("layer_types") or ("sliding_attention",) * num_layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
