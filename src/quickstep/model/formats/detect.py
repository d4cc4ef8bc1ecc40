"""Which format a checkpoint is stored in, by its config's `quantization_config` or its file.

The formats decode with torch, so each is imported where a checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.gguf_spec import GGUF_ARCHITECTURE
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.decoder_spec import ModelSpec

if TYPE_CHECKING:
    from quickstep.model.checkpoint.tensor_schema import Shapes
    from quickstep.model.formats.quantized_reader import QuantizedReader
    from quickstep.model.formats.storage import MatrixStorage

__all__ = ["find_storage", "open_quantized_reader", "quantization_config"]

_METHODS = (
    "compressed-tensors (int4, int8, fp8), fp8, awq, gptq, bitsandbytes, GGUF files, and mxfp4 "
    "for gpt-oss"
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
    method = str(found.get("quant_method", "")).lower()
    if method == "compressed-tensors" or (not method and "config_groups" in found):
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
    if method == "bitsandbytes" or "load_in_4bit" in found or "load_in_8bit" in found:
        from quickstep.model.formats.bitsandbytes import BitsAndBytesStorage

        return BitsAndBytesStorage(found, files)
    raise ConfigError(
        f"the checkpoint is quantized by {method or 'an unnamed method'}, which is not supported; "
        f"supported are {_METHODS}"
    )


def open_quantized_reader(
    reader: TensorReader,
    storage: MatrixStorage,
    shapes: Shapes,
    config: Mapping[str, object],
    spec: ModelSpec,
) -> QuantizedReader:
    """The checkpoint's tensors as the architecture has them."""
    from quickstep.model.formats.gguf import GgufStorage, gguf_row_order
    from quickstep.model.formats.quantized_reader import QuantizedReader

    order = gguf_row_order(config, spec) if isinstance(storage, GgufStorage) else None
    return QuantizedReader(reader, storage, shapes, order)


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
