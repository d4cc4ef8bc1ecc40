"""MODEL of `quickstep plan`: a config.json, a checkpoint, or a name of the bundled table.

The table, `models.yaml`, holds the published sizes of well-known models; no weights are read.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import msgspec

from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.gguf_names import is_gguf
from quickstep.model.checkpoint.source import cached_checkpoint, local_checkpoint
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.loader import quantized_weight_bytes
from quickstep.model.sizing import ElementBytes
from quickstep.model.spec import parse_spec, read_spec
from quickstep.yaml_file import read_yaml

_BUNDLED = Path(__file__).parent / "models.yaml"


class KnownModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the table: fields of `config.json`, and 10^9 published parameters."""

    parameters_b: float
    config: dict[str, Any]


def known_models() -> dict[str, KnownModel]:
    """The bundled table."""
    return read_yaml(_BUNDLED, dict[str, KnownModel], "the table")


def find_model(text: str) -> ModelSpec:
    """The spec of a name in the table, a config.json or a checkpoint.

    Raises:
        ConfigError: There is no such model or file, or its architecture is not supported.
    """
    path = _checkpoint_of(text)
    if path is not None:
        return read_spec(path)
    known = known_models()
    name = text.rpartition("/")[2].lower().removesuffix("-instruct").removeprefix("meta-")
    if name in known:
        return parse_spec(known[name].config)
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
    raise ConfigError(
        f"model {text} is neither a config.json, nor a checkpoint, nor a known name; {hint}"
    )


def planned_weight_bytes(
    text: str, spec: ModelSpec, elements: ElementBytes, *, natively: bool
) -> int | None:
    """Bytes that the weights of a checkpoint in quantized values take in memory, by the headers of
    its files; None of any other model. `natively` as for `CheckpointWeights.held_bytes`.

    Raises:
        ConfigError: The files are broken, or `elements.quantization` would quantize them again.
    """
    path = _checkpoint_of(text)
    if path is None or not spec.native:
        return None
    if not is_gguf(path) and not any(path.glob("*.safetensors")):
        return None  # a config.json by itself
    sizes = path, spec, elements.quantization, elements.dtype
    return quantized_weight_bytes(*sizes, natively=natively)


def _checkpoint_of(text: str) -> Path | None:
    """The directory or GGUF file of a config.json, a checkpoint, or a model that is installed or in
    the hub's cache.
    """
    path = Path(text)
    if path.name == "config.json" and path.is_file():
        return path.parent
    if path.is_dir() or (path.is_file() and is_gguf(path)):
        return path
    # names of the table have no organisation, and looking into the hub's cache takes its library
    found = cached_checkpoint(LoadConfig(text)) if "/" in text else local_checkpoint(text)
    return None if found is None else found.path
