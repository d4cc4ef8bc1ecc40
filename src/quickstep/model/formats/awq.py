"""AWQ checkpoints, as AutoAWQ's `gemm` version writes them: 4 bits, a zero point per group.

    qweight [C, N/8] int32, qzeros [C/g, N/8] int32, scales [C/g, N]; w = (q - z) * scale

`modules_to_not_convert` lists modules (`gate` is `mlp.gate` and no part of `gate_proj`); the files
show what is quantized.

A word holds eight neighbouring outputs in the order 0 2 4 6 1 3 5 7, lowest bits first.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.tensor_schema import Shape, Shapes
from quickstep.model.formats.gptq import check_words, unpack_words
from quickstep.model.formats.storage import checked_group, factors, module_of
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.weights import StoredRows

_SOURCE = "config.json's quantization_config"

# the position of output 0, 1, ... of eight within the word
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


class AwqStorage:
    """`quant_method: awq`."""

    name = "awq"

    def __init__(self, config: Mapping[str, object], files: TensorFiles) -> None:
        fields = ConfigFields(config, {"version": "gemm", "group_size": 128}, _SOURCE)
        bits = fields.optional_integer("bits")
        if bits != 4:
            raise ConfigError(f"{_SOURCE} asks for AWQ of {bits} bits; 4 are supported")
        version = fields.text("version").lower()
        if version != "gemm":
            raise ConfigError(f"{_SOURCE} asks for AWQ version {version!r}; gemm is supported")
        self._group_size = fields.optional_integer("group_size")
        self._files = files
        self._kept = tuple(str(part) for part in fields.sequence("modules_to_not_convert") or ())

    def parts(self, name: str, shape: Shape) -> Shapes | None:
        """Three tensors where the module has a `qweight`."""
        module = module_of(name)
        if len(shape) != 2 or f"{module}.qweight" not in self._files.tensors:
            return None
        kept = next((part for part in self._kept if f".{part}." in f".{module}."), None)
        if kept is not None:
            raise ConfigError(
                f"{_SOURCE} lists {kept!r} under modules_to_not_convert, but the files hold "
                f"{module} quantized"
            )
        outputs, inputs = shape
        groups = inputs // checked_group(module, self._group_size, inputs)
        if outputs % 8 or inputs % 8:
            raise ConfigError(f"{module} is {outputs} x {inputs}, AWQ packs multiples of 8")
        return {
            f"{module}.qweight": (inputs, outputs // 8),
            f"{module}.qzeros": (groups, outputs // 8),
            f"{module}.scales": (groups, outputs),
        }

    def form(self, name: str, shape: Shape) -> MatrixFormat:
        """4 bits with zeros."""
        scales = self._files.tensors[f"{module_of(name)}.scales"]
        group_size = checked_group(name, self._group_size, shape[1])
        return MatrixFormat(
            4, None if group_size == shape[1] else group_size, True, scales.dtype != "F16"
        )

    def rows(self, name: str, shape: Shape, reader: TensorReader) -> StoredRows:
        """Half bytes of 8 outputs in each word; the files have the matrix as [C, N]."""
        module, outputs = module_of(name), shape[0]
        check_words(self._files, f"{module}.qweight")
        check_words(self._files, f"{module}.qzeros")
        zeros = unpack_words(reader.array(f"{module}.qzeros"), 4)
        ordered = zeros.reshape(zeros.shape[0], -1, 8)[:, :, _PLACES].reshape(zeros.shape[0], -1)
        return replace(
            reader.rows(f"{module}.qweight", outputs, "U4"),
            layout="awq",
            stored_rows=outputs,
            scales=factors(reader.floats(f"{module}.scales").T),
            zeros=factors(ordered.T),
        )

    def has_no_effect(self, name: str) -> bool:
        """False: AWQ stores no tensor without effect."""
        del name
        return False
