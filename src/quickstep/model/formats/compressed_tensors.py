"""compressed-tensors checkpoints (LLM Compressor): integer weights of 4 or 8 bits, and fp8.

    pack-quantized                   weight_packed [N, C*bits/32] int32, weight_shape [2]
    int-quantized, naive-quantized   weight [N, C] int8
    float-quantized, naive-quantized weight [N, C] e4m3, with a scale per tensor, output or block
    nvfp4-pack-quantized             weight_packed [N, C/2] e2m1, weight_scale [N, C/16] e4m3 over
                                     weight_global_scale (`formats.modelopt`)
    all                              weight_scale [N, G], weight_zero_point, weight_g_idx [C]
    w = (q - zero) * scale

q is signed; packed words hold q + 2**(bits - 1), and so do the zero points of packed files, along
the outputs. `quantization_config` lists groups of modules, each with a scheme for its weights and
activations; `targets` and `ignore` are names, classes (`Linear`) or regular expressions (`re:...`),
names before classes. Activations are quantized per token here, whatever the file says, and the KV
cache as `--kv-cache-dtype` says: scales that files fix for them are left out. Groups that
`actorder` scatters over the inputs are scattered as in GPTQ's act-order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.tensor_schema import Shape, Shapes, is_fixed_scale
from quickstep.model.formats.fp8 import Block, block_of, check_float8, float8_rows
from quickstep.model.formats.gptq import (
    check_words,
    group_indices,
    read_order,
    requantized_form,
    unpack_words,
)
from quickstep.model.formats.modelopt import (
    NVFP4_GROUP,
    float8_scales,
    nvfp4_form,
    nvfp4_parts,
    nvfp4_rows,
)
from quickstep.model.formats.storage import checked_group, factors, module_of
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.tensors import HostTensor
from quickstep.ops.weights import StoredRows

_SOURCE = "config.json's quantization_config"
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
_STRATEGIES = ("channel", "group", "tensor")
_FLOAT_STRATEGIES = ("channel", "tensor", "block")
_NVFP4 = "nvfp4-pack-quantized"
_SCATTERING = ("group", "dynamic", True)  # of actorder; `weight` and `static` keep groups in order
_EXPRESSION = "re:"


class WeightScheme(msgspec.Struct, frozen=True):
    """How the weights of a group of modules are held; `group_size` None for all inputs.

    `is_scattered`: the files must hold the order of the groups, `weight_g_idx`. `block` is that of
    e4m3, outputs and inputs, None for one scale per tensor or output.
    """

    targets: tuple[str, ...]
    bits: int
    symmetric: bool
    group_size: int | None
    is_float8: bool = False
    block: Block | None = None
    is_scattered: bool = False
    is_nvfp4: bool = False


class Schemes(msgspec.Struct, frozen=True):
    """All groups of a checkpoint, and the modules that are not quantized."""

    groups: tuple[WeightScheme, ...]
    ignored: tuple[str, ...]

    def of(self, module: str) -> WeightScheme | None:
        """The scheme of a module, None if it must not be quantized."""
        if any(_names(entry, module) for entry in self.ignored):
            return None
        for group in self.groups:
            if any(_names(target, module) for target in group.targets):
                return group
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        return next((group for group in self.groups if kind in group.targets), None)


def read_schemes(config: Mapping[str, object]) -> Schemes:
    """Read and check a `quantization_config`. Raises ConfigError."""
    fields = ConfigFields(config, {}, _SOURCE)
    status = fields.text("quantization_status")
    if status not in ("", "compressed", "frozen"):
        raise ConfigError(f"{_SOURCE} has the status {status!r}; save the model compressed")
    _refuse(fields)
    groups = fields.mapping("config_groups")
    if not groups:
        raise ConfigError(f"{_SOURCE} has no config_groups, so it is not known what is quantized")
    form = fields.text("format")
    schemes = tuple(_scheme(str(name), group, form) for name, group in groups.items())
    return Schemes(schemes, _texts(fields.sequence("ignore")))


def _refuse(fields: ConfigFields) -> None:
    """Raise ConfigError for what changes the computation and is not done here."""
    sparsity = fields.mapping("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ConfigError(
            f"{_SOURCE} has sparse weights ({sparsity['format']}); dense is supported"
        )
    if fields.mapping("transform_config"):
        raise ConfigError(
            f"{_SOURCE} asks for rotated weights (transform_config), which is not supported"
        )


def _scheme(name: str, group: object, outer_format: str) -> WeightScheme:
    where = f"{_SOURCE}, {name},"
    if not isinstance(group, Mapping):
        raise ConfigError(f"{where} must be an object")
    fields = ConfigFields(group, {"format": outer_format}, where)
    weights = fields.mapping("weights")
    if weights is None:
        raise ConfigError(f"{where} quantizes no weights; only that is supported")
    form = fields.text("format")
    weight_fields = ConfigFields(
        weights, {"type": "int", "symmetric": True, "strategy": "channel"}, f"{where} weights"
    )
    kind, bits = weight_fields.text("type"), weight_fields.optional_integer("num_bits")
    if form == _NVFP4 and kind == "float" and bits == 4:
        if weight_fields.optional_integer("group_size") not in (None, NVFP4_GROUP):
            raise ConfigError(f"{where} has groups other than of {NVFP4_GROUP} inputs as {form}")
        targets = _texts(fields.sequence("targets"))
        return WeightScheme(targets, bits, True, NVFP4_GROUP, is_nvfp4=True)
    is_float8 = kind == "float" and bits == 8 and form in _FLOAT_FORMATS
    if not is_float8 and (form not in _FORMATS or kind != "int"):
        known = ", ".join(_FORMATS)
        raise ConfigError(
            f"{where} holds weights of {kind}{bits} as {form or 'no named format'}; supported are "
            f"int4 and int8 as {known}, float8 as {' or '.join(_FLOAT_FORMATS)}, and float4 as "
            f"{_NVFP4}"
        )
    if bits not in (4, 8):
        raise ConfigError(f"{where} holds weights of {bits} bits; 4 and 8 are supported")
    strategy = weight_fields.text("strategy")
    strategies = _FLOAT_STRATEGIES if is_float8 else _STRATEGIES
    if strategy not in strategies:
        known = ", ".join(strategies)
        raise ConfigError(f"{where} has the strategy {strategy!r}; supported are {known}")
    _check_activations(fields, where, "float8" if is_float8 else "int8")
    if is_float8:
        block = None
        if strategy == "block":
            block = block_of(weight_fields.sequence("block_structure"), f"{where} weights")
        targets = _texts(fields.sequence("targets"))
        return WeightScheme(targets, bits, True, None, is_float8=True, block=block)
    size = weight_fields.integer("group_size") if strategy == "group" else None
    return WeightScheme(
        _texts(fields.sequence("targets")),
        bits,
        weight_fields.flag("symmetric"),
        size,
        is_scattered=weight_fields.value("actorder") in _SCATTERING,
    )


def _check_activations(fields: ConfigFields, where: str, expected: str) -> None:
    for part in ("input_activations", "output_activations"):
        values = fields.mapping(part)
        if values is None:
            continue
        kind = f"{values.get('type', 'int')}{values.get('num_bits')}"
        if kind != expected or part.startswith("output"):
            raise ConfigError(
                f"{where} has {part} of {kind}; supported are inputs of {expected}, or none"
            )


def _texts(values: Sequence[object] | None) -> tuple[str, ...]:
    return tuple(str(value) for value in values or ())


def _names(entry: str, module: str) -> bool:
    """Whether an entry of `targets` or `ignore` is this module's name, or matches it."""
    if not entry.startswith(_EXPRESSION):
        return entry == module
    try:
        return re.match(entry.removeprefix(_EXPRESSION), module) is not None
    except re.error as error:
        raise ConfigError(f"{_SOURCE} has a bad expression {entry!r}: {error}") from None


class CompressedTensorsStorage:
    """`quant_method: compressed-tensors`."""

    name = "compressed-tensors"

    def __init__(self, config: dict[str, object], files: TensorFiles) -> None:
        self._schemes = read_schemes(config)
        self._files = files

    def parts(self, name: str, shape: Shape) -> Shapes | None:
        """Quantized values and scales; zero points and an order where the files have them."""
        module, tensors = module_of(name), self._files.tensors
        packed = f"{module}.weight_packed" in tensors
        if len(shape) != 2 or not (packed or f"{module}.weight_scale" in tensors):
            return None
        scheme = self._scheme(module)
        if scheme.is_float8:
            return self._float8_parts(name, shape, scheme)
        if scheme.is_nvfp4:
            stored = f"{module}.weight_packed"
            parts = nvfp4_parts(self._files, stored, f"{module}.weight_scale", shape)
            return parts | {f"{module}.weight_global_scale": (1,)}
        outputs, inputs = shape
        groups = inputs // checked_group(module, scheme.group_size, inputs)
        per_word = 32 // scheme.bits
        found: Shapes = {}
        if packed:
            found[f"{module}.weight_packed"] = (outputs, -(-inputs // per_word))
            if f"{module}.weight_shape" in tensors:
                found[f"{module}.weight_shape"] = (2,)
        else:
            self._check_signed(name)
            found[name] = shape
        found[f"{module}.weight_scale"] = self._scale_shape(module, outputs, groups)
        zeros = f"{module}.weight_zero_point"
        if zeros in tensors:
            in_words = tensors[zeros].dtype == "I32"
            rows = -(-outputs // per_word) if in_words else outputs
            found[zeros] = (
                (rows, groups) if in_words else self._scale_shape(module, outputs, groups)
            )
        if scheme.is_scattered or f"{module}.weight_g_idx" in tensors:
            found[f"{module}.weight_g_idx"] = (inputs,)
        return found

    def form(self, name: str, shape: Shape) -> MatrixFormat:
        """The files' own form; 8 bits where an order scatters the groups."""
        module = module_of(name)
        scheme = self._scheme(module)
        if scheme.is_float8:
            group = None if scheme.block is None else scheme.block[1]
            return MatrixFormat(8, None if group == shape[1] else group, is_float8=True)
        if scheme.is_nvfp4:
            return nvfp4_form(shape)
        group_size = checked_group(module, scheme.group_size, shape[1])
        if group_indices(self._files, f"{module}.weight_g_idx", group_size) is not None:
            return requantized_form(shape[1])
        group = None if group_size == shape[1] else group_size
        wide = self._files.tensors[f"{module}.weight_scale"].dtype != "F16"
        return MatrixFormat(scheme.bits, group, self._has_zeros(module, scheme), wide)

    def rows(self, name: str, shape: Shape, reader: TensorReader) -> StoredRows:
        """Words of neighbouring inputs, signed bytes, or e4m3."""
        module = module_of(name)
        scheme = self._scheme(module)
        if scheme.is_float8:
            scale = reader.floats(f"{module}.weight_scale")
            return float8_rows(name, shape, scale, scheme.block, reader)
        if scheme.is_nvfp4:
            factor = reader.floats(f"{module}.weight_global_scale").reshape(())
            if factor == 0:
                raise ConfigError(f"{module}.weight_global_scale is 0; scales are divided by it")
            scales = float8_scales(reader, f"{module}.weight_scale") / factor
            return nvfp4_rows(f"{module}.weight_packed", shape, scales, reader)
        outputs, inputs = shape
        group_size = checked_group(module, scheme.group_size, inputs)
        groups = (outputs, inputs // group_size)
        stored, kind = name, f"I{scheme.bits}"
        if f"{module}.weight_packed" in self._files.tensors:
            stored, kind = f"{module}.weight_packed", f"U{scheme.bits}"
            check_words(self._files, stored)
            if f"{module}.weight_shape" in self._files.tensors:
                reader.array(f"{module}.weight_shape")
        return replace(
            reader.rows(stored, outputs, kind),
            scales=factors(np.broadcast_to(reader.floats(f"{module}.weight_scale"), groups)),
            zeros=self._zeros(module, scheme, groups, reader),
            order=read_order(self._files, f"{module}.weight_g_idx", group_size, reader),
        )

    def has_no_effect(self, name: str) -> bool:
        """Scales of activations and of the KV cache."""
        return is_fixed_scale(name)

    def _scheme(self, module: str) -> WeightScheme:
        scheme = self._schemes.of(module)
        if scheme is None:
            raise ConfigError(
                f"{module} is stored quantized, but no group of config.json's quantization_config "
                "has it among its targets"
            )
        return scheme

    def _float8_parts(self, name: str, shape: Shape, scheme: WeightScheme) -> Shapes:
        check_float8(self._files, name)
        module = module_of(name)
        scale = f"{module}.weight_scale"
        if scheme.block is None:
            return {name: shape, scale: self._scale_shape(module, shape[0], 1)}
        outputs, inputs = scheme.block
        checked_group(module, inputs, shape[1])
        return {name: shape, scale: (-(-shape[0] // outputs), shape[1] // inputs)}

    def _check_signed(self, name: str) -> None:
        stored = self._files.tensors.get(name)
        if stored is None or stored.dtype != "I8":
            dtype = "missing" if stored is None else f"stored as {stored.dtype}"
            raise ConfigError(f"{name} has a weight_scale and is {dtype}; int8 is supported")

    def _scale_shape(self, module: str, outputs: int, groups: int) -> Shape:
        """A scale per group; or one for all, where the files hold a single number."""
        stored = self._files.tensors.get(f"{module}.weight_scale")
        if groups == 1 and stored is not None and stored.shape in ((), (1,), (1, 1)):
            return stored.shape
        return (outputs, groups)

    def _has_zeros(self, module: str, scheme: WeightScheme) -> bool:
        return f"{module}.weight_zero_point" in self._files.tensors and not scheme.symmetric

    def _zeros(
        self, module: str, scheme: WeightScheme, groups: tuple[int, int], reader: TensorReader
    ) -> HostTensor | None:
        """[N, G] float32, None for the middle. Symmetric files may hold zero points, all zero."""
        name = f"{module}.weight_zero_point"
        if name not in self._files.tensors:
            if not scheme.symmetric:
                raise ConfigError(f"{name} is missing, although {module} is asymmetric")
            return None
        stored = reader.array(name)
        middle = 2 ** (scheme.bits - 1)
        if self._files.tensors[name].dtype == "I32":
            zeros = unpack_words(stored.T, scheme.bits).T[: groups[0]]
        elif self._files.tensors[name].dtype == "I8":
            zeros = (stored.astype(np.int16) + middle).astype(np.uint8)
        else:
            dtype = self._files.tensors[name].dtype
            raise ConfigError(f"{name} is stored as {dtype}; I8 and I32 words are supported")
        if not scheme.symmetric:
            return factors(np.broadcast_to(zeros, groups))
        if (zeros != middle).any():
            raise ConfigError(f"{name} is not zero, although {module} is symmetric")
        return None
