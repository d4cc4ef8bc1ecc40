"""GPTQ checkpoints: 4 or 8 bits, packed along the inputs.

    qweight [C*bits/32, N] int32, qzeros [G, N*bits/32] int32, scales [G, N], g_idx [C] int32
    w[n, c] = (q[c, n] - z[g_idx[c], n]) * scale[g_idx[c], n]

The files of `checkpoint_format: gptq` (and those without one) hold each zero point less 1,
modulo 2**bits; those of `gptq_v2` hold it as it is. Labels are wrong at times. Where every zero
point of a matrix is the middle, its stored values prove the form and the label is not used. `sym:
true` says that they all are: then values of neither form are refused.

AutoRound's files in this packing are the same (`quant_method: auto-round`). Rules for some modules
(`dynamic`, AutoRound's `extra_config`) may leave modules unquantized, which the files show; a rule
that changes the form of a module is refused.

Act-order (`desc_act`) scatters the groups over the inputs, as in `g_idx`. No product here gathers
its activations, so such a matrix is dequantized and rounded again, to 8 bits in groups of 32: an
error of about 0.4 % of a group's weights, where its own 4 bits cost ten times that. A `g_idx` in
order, as files with static groups have it, changes nothing. compressed-tensors uses the same.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.tensor_schema import Shape, Shapes
from quickstep.model.formats.storage import checked_group, factors, module_of
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.tensors import INT32, Array, HostTensor
from quickstep.ops.weights import REQUANTIZED_GROUPS, StoredRows

_SOURCE = "config.json's quantization_config"
_UNQUANTIZED_BITS = 16


class GptqStorage:
    """`quant_method: gptq`."""

    name = "gptq"

    def __init__(self, config: Mapping[str, object], files: TensorFiles) -> None:
        fields = ConfigFields(config, {"checkpoint_format": "gptq", "group_size": -1}, _SOURCE)
        bits = fields.optional_integer("bits")
        if bits not in (4, 8):
            raise ConfigError(f"{_SOURCE} asks for GPTQ of {bits} bits; 4 and 8 are supported")
        form = fields.text("checkpoint_format").lower()
        if form not in ("gptq", "gptq_v2"):
            raise ConfigError(
                f"{_SOURCE} asks for GPTQ checkpoint_format {form!r}; gptq and gptq_v2 are "
                "supported"
            )
        _refuse_rules(fields)
        self._bits = bits
        self._less = 1 if form == "gptq" else 0
        self._symmetric = fields.flag("sym")
        self._act_order = fields.flag("desc_act")
        self._group_size = fields.optional_integer("group_size")
        self._files = files

    def parts(self, name: str, shape: Shape) -> Shapes | None:
        """Three tensors and an optional order where the module has a `qweight`."""
        module = module_of(name)
        if len(shape) != 2 or f"{module}.qweight" not in self._files.tensors:
            return None
        outputs, inputs = shape
        per_word = 32 // self._bits
        if outputs % per_word or inputs % per_word:
            raise ConfigError(
                f"{module} is {outputs} x {inputs}, GPTQ packs multiples of {per_word}"
            )
        groups = inputs // checked_group(module, self._group_size, inputs)
        found: Shapes = {
            f"{module}.qweight": (inputs // per_word, outputs),
            f"{module}.qzeros": (groups, outputs // per_word),
            f"{module}.scales": (groups, outputs),
        }
        if self._act_order or f"{module}.g_idx" in self._files.tensors:
            found[f"{module}.g_idx"] = (inputs,)
        return found

    def form(self, name: str, shape: Shape) -> MatrixFormat:
        """The files' own form; 8 bits where act-order scatters the groups."""
        group_size = checked_group(name, self._group_size, shape[1])
        if group_indices(self._files, f"{module_of(name)}.g_idx", group_size) is not None:
            return requantized_form(shape[1])
        wide = self._files.tensors[f"{module_of(name)}.scales"].dtype != "F16"
        group = None if group_size == shape[1] else group_size
        return MatrixFormat(self._bits, group, True, wide)

    def rows(self, name: str, shape: Shape, reader: TensorReader) -> StoredRows:
        """Words of neighbouring inputs; the files have the matrix as [C, N]."""
        module, bits = module_of(name), self._bits
        group_size = checked_group(name, self._group_size, shape[1])
        check_words(self._files, f"{module}.qweight")
        check_words(self._files, f"{module}.qzeros")
        stored = unpack_words(reader.array(f"{module}.qzeros"), bits)
        zeros = (stored + np.uint8(self._stored_less(module, stored))) & np.uint8(2**bits - 1)
        return replace(
            reader.rows(f"{module}.qweight", shape[0], f"U{bits}"),
            layout="columns",
            stored_rows=shape[0],
            scales=factors(reader.floats(f"{module}.scales").T),
            zeros=factors(zeros.T),
            order=read_order(self._files, f"{module}.g_idx", group_size, reader),
        )

    def _stored_less(self, module: str, stored: npt.NDArray[np.uint8]) -> int:
        """What is to be added to stored zero points: by their values where all are the middle in
        one of the two forms, else by the label.
        """
        middle = 2 ** (self._bits - 1)
        for less in (self._less, 1 - self._less):
            if bool((stored == middle - less).all()):
                return less
        if not self._symmetric:
            return self._less
        raise ConfigError(
            f"{_SOURCE} says that {module} is symmetric (sym), so its zero points are {middle}, "
            f"stored as {middle - 1} (gptq) or {middle} (gptq_v2); the files hold "
            f"{int(stored.min())} to {int(stored.max())}"
        )

    def has_no_effect(self, name: str) -> bool:
        """AutoGPTQ writes a bias for every module, of zeros where the model has none."""
        module, _, kind = name.rpartition(".")
        if kind != "bias" or f"{module}.qweight" not in self._files.tensors:
            return False
        content = bytearray(self._files.tensors[name].nbytes)
        self._files.read_into(name, memoryview(content))
        return not any(content)


def _refuse_rules(fields: ConfigFields) -> None:
    """Raise ConfigError for a rule that gives some modules another form than the others."""
    for pattern, rule in (fields.mapping("dynamic") or {}).items():
        if not pattern.startswith("-:") and rule:
            raise ConfigError(
                f"{_SOURCE} has a rule of its own for the modules {pattern!r} (dynamic), which is "
                "not supported; rules that leave modules unquantized (-:) are"
            )
    for module, rule in (fields.mapping("extra_config") or {}).items():
        changed = rule if isinstance(rule, Mapping) else {}
        bits = changed.get("bits")
        if isinstance(bits, int) and bits >= _UNQUANTIZED_BITS:
            continue
        for name in ("bits", "group_size", "sym", "data_type"):
            if name in changed and changed[name] != fields.value(name):
                raise ConfigError(
                    f"{_SOURCE} gives {module!r} {name} {changed[name]} of its own (extra_config); "
                    "modules that differ are not supported, unless they are not quantized"
                )
    if fields.text("data_type") not in ("", "int"):
        raise ConfigError(
            f"{_SOURCE} asks for data_type {fields.text('data_type')!r}; int is supported"
        )
    act_bits = fields.optional_integer("act_bits")
    if act_bits is not None and act_bits < _UNQUANTIZED_BITS:
        raise ConfigError(f"{_SOURCE} asks for activations of {act_bits} bits; 16 are supported")


assert sys.byteorder == "little", "words are read byte by byte"


def check_words(files: TensorFiles, name: str) -> None:
    """Raise ConfigError unless a tensor holds 32-bit words."""
    stored = files.tensors[name]
    if stored.dtype != "I32":
        raise ConfigError(f"{name} is stored as {stored.dtype}; packed values are I32 words")


def unpack_words(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """32-bit words [R, W], lowest bits first, -> quantized values [R, W * 32 / bits], as AWQ, GPTQ
    and compressed-tensors pack 4 or 8 bits.
    """
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack((octets & 15, octets >> 4), -1).reshape(octets.shape[0], -1)


def read_order(
    files: TensorFiles, name: str, group_size: int, reader: TensorReader
) -> HostTensor | None:
    """A `g_idx`, [C] int32, which counts as read; None if the groups are in order."""
    if name not in files.tensors:
        return None
    reader.array(name)
    order = group_indices(files, name, group_size)
    return None if order is None else HostTensor(order, INT32)


def group_indices(files: TensorFiles, name: str, group_size: int) -> npt.NDArray[np.int32] | None:
    """A `g_idx`: the group of each input, [C]; None if they are in order or it is missing.

    Raises:
        ConfigError: An input belongs to no group.
    """
    stored = files.tensors.get(name)
    if stored is None:
        return None
    if stored.dtype != "I32":
        raise ConfigError(f"{name} is stored as {stored.dtype}, it must be I32")
    content = bytearray(stored.nbytes)
    files.read_into(name, memoryview(content))
    order = np.frombuffer(content, dtype=np.int32)
    in_order = np.arange(order.size, dtype=np.int32) // group_size
    if np.array_equal(order, in_order):
        return None
    for group in (order.min(), order.max()):
        if not 0 <= group <= in_order[-1]:
            raise ConfigError(f"{name} names group {group}, they are 0 to {in_order[-1]}")
    return order


def requantized_form(num_inputs: int) -> MatrixFormat:
    """The form that a matrix with scattered groups is held in."""
    return MatrixFormat(
        8,
        next((size for size in REQUANTIZED_GROUPS if num_inputs % size == 0), None),
        is_rounded_again=True,
    )
