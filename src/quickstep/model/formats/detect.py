"""Which format a checkpoint is stored in, by its config's `quantization_config` or its file.

Each format is imported where a checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import read_json
from quickstep.model.checkpoint.gguf_spec import GGUF_ARCHITECTURE
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.decoder_spec import ModelSpec

if TYPE_CHECKING:
    from quickstep.model.checkpoint.tensor_schema import Shapes
    from quickstep.model.formats.quantized_reader import QuantizedReader
    from quickstep.model.formats.storage import MatrixStorage

_METHODS = ("compressed-tensors", "fp8", "awq", "gptq", "bitsandbytes", "modelopt")
_SUPPORTED = (
    "compressed-tensors (int4, int8, fp8, nvfp4), modelopt (nvfp4, fp8), fp8, awq, gptq (also "
    "auto-round's), bitsandbytes, GGUF files, and mxfp4 for gpt-oss"
)
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
# packing_format -> the format whose layout it is, byte for byte
_PACKINGS = MappingProxyType(
    {
        "auto_round:auto_gptq": "gptq",
        "auto_round:gptq": "gptq",
        "auto_gptq": "gptq",
        "auto_round:auto_awq": "awq",
        "auto_round:awq": "awq",
        "auto_awq": "awq",
    }
)


def find_storage(config: Mapping[str, object], files: TensorFiles) -> MatrixStorage | None:
    """The format of a checkpoint; None if no matrix is quantized.

    Raises:
        ConfigError: A format, or a variant of one, that is not supported.
    """
    if GGUF_ARCHITECTURE in config:
        from quickstep.model.formats.gguf import GgufStorage

        return GgufStorage(files)
    found = quantization_config(config)
    if not found:
        return None
    method = _method(found)
    if method not in _METHODS:
        raise ConfigError(
            f"the checkpoint is quantized by {method or 'an unnamed method'}, which is not "
            f"supported; supported are {_SUPPORTED}"
        )
    return _open(method, found, files)


def _method(found: Mapping[str, object]) -> str:
    """The format's name; files of some methods are in the layout of another one."""
    method = str(found.get("quant_method", "")).lower()
    if not method and "quant_algo" in found:
        return "modelopt"
    if not method and "config_groups" in found:
        return "compressed-tensors"
    if "load_in_4bit" in found or "load_in_8bit" in found:
        return method if method in _METHODS else "bitsandbytes"
    if method.startswith("modelopt"):  # also modelopt_fp4, as some files have it
        return "modelopt"
    if method in _AUTO_ROUND:
        return _packing(found)
    return method


def _packing(found: Mapping[str, object]) -> str:
    """The format that AutoRound has written. Raises ConfigError."""
    packing = str(found.get("packing_format", "auto_round:gptq"))
    method = _PACKINGS.get(packing)
    if method is None:
        raise ConfigError(
            f"config.json's quantization_config has auto-round's packing_format {packing!r}; "
            f"supported are {', '.join(_PACKINGS)}"
        )
    return method


def _open(method: str, found: dict[str, object], files: TensorFiles) -> MatrixStorage:
    if method == "compressed-tensors":
        from quickstep.model.formats.compressed_tensors import CompressedTensorsStorage

        return CompressedTensorsStorage(found, files)
    if method == "fp8":
        from quickstep.model.formats.fp8 import Fp8Storage

        return Fp8Storage(found, files)
    if method == "awq":
        from quickstep.model.formats.awq import AwqStorage

        return AwqStorage(found, files)
    if method == "gptq":
        from quickstep.model.formats.gptq import GptqStorage

        return GptqStorage(found, files)
    if method == "modelopt":
        from quickstep.model.formats.modelopt import ModelOptStorage

        return ModelOptStorage(found, files)
    from quickstep.model.formats.bitsandbytes import BitsAndBytesStorage

    return BitsAndBytesStorage(found, files)


def open_quantized_reader(
    reader: TensorReader,
    storage: MatrixStorage,
    shapes: Shapes,
    config: Mapping[str, object],
    spec: ModelSpec,
) -> QuantizedReader:
    """The checkpoint's tensors as the architecture has them."""
    from quickstep.model.formats.gguf import GgufStorage, gguf_paired_heads
    from quickstep.model.formats.quantized_reader import QuantizedReader

    heads = gguf_paired_heads(config, spec) if isinstance(storage, GgufStorage) else None
    return QuantizedReader(reader, storage, shapes, heads)


def read_quantization(path: Path, config: Mapping[str, object]) -> Mapping[str, object]:
    """The config of the checkpoint at `path`, with ModelOpt's file next to it, if there is one and
    the config does not say how weights are stored. Raises ConfigError.
    """
    file = path / "hf_quant_config.json"
    if quantization_config(config) or not file.is_file():
        return config
    found = read_json(file).get("quantization")
    if not isinstance(found, Mapping):
        raise ConfigError(f"{file} has no object `quantization`, so it is not known what it says")
    return {**config, "quantization_config": dict(found)}


def quantization_config(config: Mapping[str, object]) -> dict[str, object]:
    """The config's part on how weights are stored; empty if there is none. Raises ConfigError."""
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            value = section.get(key)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"config.json sets {key!r} to {value!r}, it must be an object")
            if value:
                return dict(value)
    return {}
