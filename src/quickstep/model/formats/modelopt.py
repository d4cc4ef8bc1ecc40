"""NVIDIA ModelOpt checkpoints: NVFP4 and fp8, also mixed by module.

    NVFP4  weight [N, C / 2] uint8, the low half first, each half e2m1 (OCP Microscaling 1.0)
           weight_scale [N, C / 16] e4m3, weight_scale_2 one float32
           w = e2m1 * weight_scale * weight_scale_2
    fp8    weight [N, C] e4m3, weight_scale one number, [N] or [N, 1]

compressed-tensors' `nvfp4-pack-quantized` divides by `weight_global_scale` in place of the last
factor. The 16 values of e2m1, doubled, are integers from -12 to 12: quantized values of 6 bits in
groups of 16, exactly, of which the native kernels hold 4. Files fix the scales of activations
(`input_scale`) and of the KV cache (`k_scale`, `v_scale`) for products in 4 and 8 bits; here
activations are quantized per token, and these tensors are left out. The tensors show which modules
are quantized, and how.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.tensor_schema import Shape, Shapes, is_fixed_scale
from quickstep.model.formats.fp8 import check_float8, float8_rows
from quickstep.model.formats.storage import E2M1_LEVELS, checked_group, factors, module_of
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.tensors import UINT8, Array, HostTensor
from quickstep.ops.weights import StoredRows

NVFP4_GROUP = 16  # inputs that share a scale

_SOURCE = "the quantization config"
_ALGORITHMS = ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION")


class ModelOptStorage:
    """`quant_method: modelopt`, or a file `hf_quant_config.json`."""

    name = "modelopt"

    def __init__(self, config: Mapping[str, object], files: TensorFiles) -> None:
        algorithm = ConfigFields(config, {}, _SOURCE).text("quant_algo").upper()
        if algorithm not in _ALGORITHMS:
            raise ConfigError(
                f"{_SOURCE} has the quant_algo {algorithm or 'of no name'} of ModelOpt; supported "
                f"are {', '.join(_ALGORITHMS)}"
            )
        self._files = files

    def parts(self, name: str, shape: Shape) -> Shapes | None:
        """The weight and its scales, where the module has scales."""
        module, tensors = module_of(name), self._files.tensors
        scale = tensors.get(f"{module}.weight_scale")
        if len(shape) != 2 or scale is None:
            return None
        if self._is_nvfp4(name):
            found = nvfp4_parts(self._files, name, f"{module}.weight_scale", shape)
            total = tensors.get(f"{module}.weight_scale_2")
            return found | {f"{module}.weight_scale_2": () if total is None else _one(total.shape)}
        check_float8(self._files, name)
        shapes = ((), (1,), (1, 1), (shape[0],))
        return {
            name: shape,
            f"{module}.weight_scale": scale.shape if scale.shape in shapes else (shape[0], 1),
        }

    def form(self, name: str, shape: Shape) -> MatrixFormat:
        """16 levels of 6 bits in groups of 16, or e4m3."""
        return nvfp4_form(shape) if self._is_nvfp4(name) else MatrixFormat(8, is_float8=True)

    def rows(self, name: str, shape: Shape, reader: TensorReader) -> StoredRows:
        """Half bytes that name a value of e2m1, or numbers in e4m3."""
        module = module_of(name)
        if not self._is_nvfp4(name):
            scale = reader.floats(f"{module}.weight_scale")
            return float8_rows(name, shape, scale, None, reader)
        factor = reader.floats(f"{module}.weight_scale_2").reshape(())
        scales = float8_scales(reader, f"{module}.weight_scale") * factor
        return nvfp4_rows(name, shape, scales, reader)

    def has_no_effect(self, name: str) -> bool:
        """Scales of activations and of the KV cache."""
        return is_fixed_scale(name)

    def _is_nvfp4(self, name: str) -> bool:
        stored = self._files.tensors.get(name)
        return stored is not None and stored.dtype == "U8"


def nvfp4_parts(files: TensorFiles, name: str, scale: str, shape: Shape) -> Shapes:
    """The two tensors of a matrix in e2m1 with a scale for each 16 inputs. Raises ConfigError."""
    checked_group(name, NVFP4_GROUP, shape[1])
    if shape[1] % NVFP4_GROUP:
        raise ConfigError(f"{name} has {shape[1]} inputs, NVFP4 has them in groups of 16")
    stored = files.tensors.get(scale)
    if stored is None or stored.dtype != "F8_E4M3":
        dtype = "missing" if stored is None else f"stored as {stored.dtype}"
        raise ConfigError(f"{scale} is {dtype}; the scales of NVFP4 are F8_E4M3")
    return {name: (shape[0], shape[1] // 2), scale: (shape[0], shape[1] // NVFP4_GROUP)}


def nvfp4_form(shape: Shape) -> MatrixFormat:
    """How such a matrix is held."""
    group_size = None if shape[1] == NVFP4_GROUP else NVFP4_GROUP
    return MatrixFormat(6, group_size, wide_scales=True, has_levels=True)


def nvfp4_rows(name: str, shape: Shape, scales: Array, reader: TensorReader) -> StoredRows:
    """Where such a matrix is; `scales` [N, C / 16] float32, of e2m1's values."""
    if reader.stored_as(name) != "U8":
        raise ConfigError(f"{name} is stored as {reader.stored_as(name)}; NVFP4 is stored as U8")
    return replace(
        reader.rows(name, shape[0], "LEVELS"),
        scales=factors(scales * np.float32(0.5)),  # of the doubled values
        levels=HostTensor(E2M1_LEVELS, UINT8),
    )


def float8_scales(reader: TensorReader, name: str) -> Array:
    """A tensor of scales in e4m3, as float32. Raises ConfigError."""
    scales = _E4M3[reader.array(name)]
    if np.isnan(scales).any():
        raise ConfigError(f"tensor {name!r} holds a scale that is not a number")
    return scales


def _one(shape: Shape) -> Shape:
    """The shape of a single number, as it is stored or as it should be."""
    return shape if shape in ((), (1,), (1, 1)) else ()


def _e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    value = (mantissa if exponent == 0 else 8 + mantissa) * 2.0 ** (max(exponent, 1) - 10)
    return -value if byte & 128 else value


_E4M3: Array = np.array([_e4m3(byte) for byte in range(256)], np.float32)
