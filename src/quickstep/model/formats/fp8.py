"""fp8 checkpoints (`quant_method: fp8`): DeepSeek's and Qwen's with a scale per block, and others.

    weight             [N, C] e4m3
    weight_scale_inv   [N / 128, C / 128], with `weight_block_size`: a scale per block
    weight_scale       one number, [1] or [N, 1]: a scale per tensor or output
    w = q * scale

`weight_scale_inv` multiplies as well, in spite of its name. Modules without a scale are not
quantized. Activations are quantized per token here, and per 128 inputs with blocks; scales that
files fix for them (`input_scale`) are left out. Also: what compressed-tensors shares with this
format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.tensor_schema import Shape, Shapes, is_fixed_scale
from quickstep.model.formats.storage import checked_group, factors, module_of
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.tensors import Array
from quickstep.ops.weights import StoredRows

_SOURCE = "config.json's quantization_config"
_ACTIVATIONS = ("dynamic", "static")

# Outputs and inputs that share a scale.
Block = tuple[int, int]


class Fp8Storage:
    """`quant_method: fp8`."""

    name = "fp8"

    def __init__(self, config: Mapping[str, object], files: TensorFiles) -> None:
        defaults = {"activation_scheme": "dynamic", "fmt": "e4m3"}
        fields = ConfigFields(config, defaults, _SOURCE)
        scheme, form = fields.text("activation_scheme"), fields.text("fmt")
        if scheme not in _ACTIVATIONS:
            known = " and ".join(_ACTIVATIONS)
            raise ConfigError(
                f"{_SOURCE} has the activation_scheme {scheme!r}; {known} are supported"
            )
        if form.lower() not in ("e4m3", "float8_e4m3fn"):
            raise ConfigError(f"{_SOURCE} has the fmt {form!r}; e4m3 is supported")
        self._block = block_of(fields.sequence("weight_block_size"), _SOURCE)
        self._scale = "weight_scale" if self._block is None else "weight_scale_inv"
        self._files = files

    def parts(self, name: str, shape: Shape) -> Shapes | None:
        """The weight and its scales, where the module has scales."""
        module = module_of(name)
        scale = f"{module}.{self._scale}"
        if len(shape) != 2 or scale not in self._files.tensors:
            return None
        check_float8(self._files, name)
        expected: Shape = (shape[0], 1)
        if self._block is not None:
            checked_group(module, self._block[1], shape[1])
            expected = (-(-shape[0] // self._block[0]), shape[1] // self._block[1])
        elif self._files.tensors[scale].shape in ((), (1,), (1, 1), (shape[0],)):
            expected = self._files.tensors[scale].shape
        return {name: shape, scale: expected}

    def form(self, name: str, shape: Shape) -> MatrixFormat:
        """E4m3 with a scale per output, or per output and block."""
        del name
        group = None if self._block is None or self._block[1] == shape[1] else self._block[1]
        return MatrixFormat(8, group, is_float8=True)

    def rows(self, name: str, shape: Shape, reader: TensorReader) -> StoredRows:
        """The numbers [N, C], each output with the scales of its blocks."""
        scale = reader.floats(f"{module_of(name)}.{self._scale}")
        return float8_rows(name, shape, scale, self._block, reader)

    def has_no_effect(self, name: str) -> bool:
        """Scales of activations and of the KV cache."""
        return is_fixed_scale(name)


def block_of(size: Sequence[object] | None, where: str) -> Block | None:
    """A block size of a config, two integers or nothing. Raises ConfigError."""
    if size is None:
        return None
    match list(size):
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
    raise ConfigError(f"{where} has blocks of {size}, they must be two positive integers")


def check_float8(files: TensorFiles, name: str) -> None:
    """Raise ConfigError unless a tensor is stored in e4m3."""
    stored = files.tensors.get(name)
    if stored is None or stored.dtype != "F8_E4M3":
        dtype = "missing" if stored is None else f"stored as {stored.dtype}"
        raise ConfigError(f"{name} has a scale of fp8 and is {dtype}; F8_E4M3 is supported")


def float8_rows(
    name: str, shape: Shape, scale: Array, block: Block | None, reader: TensorReader
) -> StoredRows:
    """A weight of e4m3 [N, C] with its scales: one, [N], [N, 1], or one per block."""
    outputs = shape[0]
    if block is None:
        rows = np.broadcast_to(scale.reshape(-1, 1), (outputs, 1))
    else:
        rows = scale.repeat(block[0], 0)[:outputs]
    return replace(reader.rows(name, outputs, "E4M3"), scales=factors(rows))
