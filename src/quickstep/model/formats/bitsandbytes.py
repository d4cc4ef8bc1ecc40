"""bitsandbytes checkpoints: nf4 and fp4 with or without double quantization, and int8.

4 bits:  weight [N*C/2, 1] uint8, the first of two in the high half; a quantized value names one of
the 16
         values of `weight.quant_map`, times the `absmax` of its block of 64 in row order. Double
         quantization stores absmax as quantized values of `nested_quant_map` times `nested_absmax`,
         plus an offset. The sizes are in JSON in `weight.quant_state.bitsandbytes__nf4`.
8 bits:  weight [N, C] int8, `SCB` [N]; w = quant * SCB / 127.

nf4's and fp4's 16 values are not evenly spaced, and an integer product needs even steps: they
become the nearest of 255 steps per block, within 1/254 of the block's largest weight (nf4's own
steps are 1/4 to 1/12 of it). The native kernels look them up by 4 bits. int8 is exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import msgspec
import numpy as np
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.tensor_schema import Shape, Shapes
from quickstep.model.formats.storage import checked_group, factors, module_of
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.tensors import UINT8, Array, HostTensor
from quickstep.ops.weights import StoredRows

_TYPES = ("nf4", "fp4")


class _Blocks(msgspec.Struct, frozen=True):
    """A parsed `quant_state`; `state` is its tensor's name, nested sizes are None if absent."""

    state: str
    size: int
    nested_size: int | None
    nested_offset: float


class BitsAndBytesStorage:
    """`quant_method: bitsandbytes`."""

    name = "bitsandbytes"

    def __init__(self, config: Mapping[str, object], files: TensorFiles) -> None:
        del config  # which of the two, and how large blocks are, is stored with each matrix
        self._files = files

    def parts(self, name: str, shape: Shape) -> Shapes | None:
        """The quantized values and their scales, where the files hold any."""
        tensors, module = self._files.tensors, module_of(name)
        if len(shape) != 2 or name not in tensors:
            return None
        if f"{module}.SCB" in tensors:
            return self._int8_parts(name, shape)
        blocks = self._blocks(name, shape)
        if blocks is None:
            return None
        if tensors[name].dtype != "U8":
            raise ConfigError(
                f"{name} holds 4-bit values in {tensors[name].dtype}; only bitsandbytes' uint8 "
                "storage (bnb_4bit_quant_storage) is supported"
            )
        count = math.prod(shape)
        num_blocks = -(-count // blocks.size)
        found: Shapes = {
            name: (-(-count // 2), 1),
            f"{name}.absmax": (num_blocks,),
            f"{name}.quant_map": (16,),
            blocks.state: tensors[blocks.state].shape,
        }
        if blocks.nested_size is not None:
            found[f"{name}.nested_absmax"] = (-(-num_blocks // blocks.nested_size),)
            found[f"{name}.nested_quant_map"] = (256,)
        return found

    def form(self, name: str, shape: Shape) -> MatrixFormat:
        """8 bits: 16 levels per block of a 4-bit matrix, or steps per output."""
        blocks = self._blocks(name, shape)
        if blocks is None:
            return MatrixFormat(8)
        group_size = _group_size(name, blocks, shape)
        group = None if group_size == shape[1] else group_size
        return MatrixFormat(8, group, wide_scales=True, has_levels=True, is_rounded_again=True)

    def rows(self, name: str, shape: Shape, reader: TensorReader) -> StoredRows:
        """Signed bytes, or half bytes that name one of 255 steps."""
        blocks = self._blocks(name, shape)
        if blocks is None:
            layout = f"{module_of(name)}.weight_format"
            if layout in self._files.tensors:
                reader.array(layout)
            scales = reader.floats(f"{module_of(name)}.SCB").reshape(-1, 1) / 127
            return replace(reader.rows(name, shape[0], "I8"), scales=factors(scales))
        reader.array(blocks.state)
        steps = (reader.floats(f"{name}.quant_map") * 127).round() + 128
        levels = np.nan_to_num(steps).clip(0, 255).astype(np.uint8)
        group_size = _group_size(name, blocks, shape)
        starts = np.arange(0, math.prod(shape), group_size) // blocks.size
        scales = _absmax(name, blocks, reader)[starts] / 127
        return replace(
            reader.rows(name, shape[0], "LEVELS_HIGH"),
            scales=factors(scales.reshape(shape[0], -1)),
            levels=HostTensor(levels, UINT8),
        )

    def has_no_effect(self, name: str) -> bool:
        """False: bitsandbytes stores no tensor without effect."""
        del name
        return False

    def _int8_parts(self, name: str, shape: Shape) -> Shapes:
        module = module_of(name)
        if self._files.tensors[name].dtype != "I8":
            dtype = self._files.tensors[name].dtype
            raise ConfigError(f"{module}.SCB belongs to a weight of {dtype}, it must be int8")
        found: Shapes = {name: shape, f"{module}.SCB": (shape[0],)}
        layout = f"{module}.weight_format"
        if layout in self._files.tensors:
            found[layout] = self._files.tensors[layout].shape
            if any(self._content(layout)):
                raise ConfigError(f"{layout} asks for a tiled layout; only rows are supported")
        return found

    def _blocks(self, name: str, shape: Shape) -> _Blocks | None:
        states = {kind: f"{name}.quant_state.bitsandbytes__{kind}" for kind in _TYPES}
        state = next((s for s in states.values() if s in self._files.tensors), None)
        if state is None:
            return None
        try:
            values = json.loads(self._content(state))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ConfigError(f"{state} does not hold a JSON object")
        fields = ConfigFields(values, {}, state)
        if list(fields.sequence("shape") or ()) != list(shape):
            raise ConfigError(
                f"{state} is of shape {values.get('shape')!r:.80}, config.json asks for "
                f"{list(shape)}"
            )
        is_nested = fields.value("nested_blocksize") is not None
        nested_size = fields.integer("nested_blocksize") if is_nested else None
        offset = fields.optional_number("nested_offset") or 0.0
        return _Blocks(state, fields.integer("blocksize"), nested_size, offset)

    def _content(self, name: str) -> bytes:
        content = bytearray(self._files.tensors[name].nbytes)
        self._files.read_into(name, memoryview(content))
        return bytes(content)


def _group_size(name: str, blocks: _Blocks, shape: Shape) -> int:
    """Blocks run on from row to row: the largest group that never crosses the end of one."""
    return checked_group(name, math.gcd(blocks.size, shape[1]), shape[1])


def _absmax(name: str, blocks: _Blocks, reader: TensorReader) -> Array:
    if blocks.nested_size is None:
        return reader.floats(f"{name}.absmax")
    absmax = reader.array(f"{name}.absmax")
    if absmax.dtype != np.uint8:
        raise ConfigError(f"{name}.absmax holds {absmax.dtype}; doubly quantized, it is uint8")
    outer = reader.floats(f"{name}.nested_absmax")
    levels = reader.floats(f"{name}.nested_quant_map")[absmax]
    of_block = np.arange(absmax.size) // blocks.nested_size
    return levels * outer[of_block] + np.float32(blocks.nested_offset)
