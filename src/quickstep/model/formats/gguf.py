"""GGUF files as quantized checkpoints: matrices in ggml's blocks, rows in ggml's order.

The layouts are those of ggml-quants.h; blocks become quantized values exactly, in the native
kernels as they are loaded (`csrc/stored_rows.cpp`), elsewhere by `formats.gguf_blocks`. Types of up
to 16 values in even steps become 4-bit quantized values, those of 5 and 6 bits and of e2m1 (MXFP4,
NVFP4) 6-bit ones, those of 8 bits and with other uneven steps (IQ2, IQ3_XXS, IQ4) 8-bit ones. The
native kernels hold those in uneven steps in 4 bits, since they have 16 values at most. `w =
scale * q + low` becomes `scale * (q - zero)` with zero = -low / scale; a group whose scale is 0
holds `low` everywhere, which is quantized value 0 at scale `low` and zero -1.

For `llama` and others, llama.cpp stores queries and keys for rotation in pairs of neighbours; here
a head's halves are rotated, so readers restore the order of rows (`gguf_paired_heads`).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from quickstep.model.checkpoint.gguf_spec import gguf_has_paired_heads
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.tensor_schema import Shape, Shapes
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.formats.gguf_kinds import BLOCK_KINDS
from quickstep.model.formats.storage import PairedHeads, checked_group, module_of
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.weights import StoredRows


class GgufStorage:
    """A `.gguf` file whose tensors go by the architecture's names."""

    name = "gguf"

    def __init__(self, files: TensorFiles) -> None:
        self._files = files

    def parts(self, name: str, shape: Shape) -> Shapes | None:
        """The one tensor, where it is in blocks, and the factor of its scales, if it has one."""
        stored = self._files.tensors.get(name)
        if stored is None or stored.dtype not in BLOCK_KINDS:
            return None
        factor = self._files.tensors.get(_factor_of(name))
        if factor is None:
            return {name: shape}
        return {name: shape, factor.name: factor.shape if factor.shape == () else (1,)}

    def form(self, name: str, shape: Shape) -> MatrixFormat:
        """The form of the tensor's block type."""
        kind = BLOCK_KINDS[self._files.tensors[name].dtype]
        group_size = checked_group(name, kind.group_size, shape[-1])
        group = None if group_size == shape[-1] else group_size
        has_factor = _factor_of(name) in self._files.tensors
        return MatrixFormat(
            kind.bits,
            group,
            kind.has_zeros,
            kind.wide_scales or has_factor,
            has_minimums=kind.has_minimums,
            has_super_scales=kind.has_super_scales and not has_factor,
            has_levels=kind.has_levels,
        )

    def rows(self, name: str, shape: Shape, reader: TensorReader) -> StoredRows:
        """The blocks, each tensor's of its own type."""
        rows = reader.rows(name, shape[0])
        factor = _factor_of(name)
        if factor not in self._files.tensors:
            return rows
        return replace(rows, factor=float(reader.floats(factor).reshape(())))

    def has_no_effect(self, name: str) -> bool:
        """Whether it is a table of rotary frequencies: the spec has them."""
        return name.startswith("rope_f")


def _factor_of(name: str) -> str:
    """The tensor of one number that the scales of a matrix are multiplied by (NVFP4)."""
    return f"{module_of(name)}.scale"


def gguf_paired_heads(config: Mapping[str, object], spec: ModelSpec) -> PairedHeads | None:
    """Which weights and biases, q's and k's, have the rows of each head in pairs."""
    if not gguf_has_paired_heads(config):
        return None

    def head_size(name: str) -> int:
        paired = ".self_attn.q_proj." in name or ".self_attn.k_proj." in name
        return spec.head_size if paired else 0

    return head_size
