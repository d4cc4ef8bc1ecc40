"""GGUF files as quantised checkpoints: matrices in ggml's blocks, rows in ggml's order.

For architecture `llama`, llama.cpp stores queries and keys for rotation in pairs of neighbours;
here a head's halves are rotated, so `gguf_row_order` takes the rows back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quickstep.model.checkpoint.gguf_spec import GGUF_ARCHITECTURE
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.formats.gguf_blocks import BLOCK_KINDS
from quickstep.model.formats.quantized_reader import RowOrder
from quickstep.model.formats.storage import Shape, Shapes, checked_group
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.table import QuantizedWeight, StoredMatrix

__all__ = ["GgufStorage", "gguf_row_order"]

_PLACED = frozenset(("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))  # `OpTable.load_linear` reads these
_ELEMENTS_AT_ONCE = 1 << 21  # bounds the scratch of decoding, near the caches' size


class GgufStorage:
    """A `.gguf` file whose tensors go by the architecture's names."""

    name = "gguf"

    def __init__(self, files: TensorFiles) -> None:
        self._files = files

    def parts(self, name: str, shape: Shape) -> Shapes | None:
        """The one tensor, where it is in blocks."""
        stored = self._files.tensors.get(name)
        return None if stored is None or stored.dtype not in BLOCK_KINDS else {name: shape}

    def form(self, name: str, shape: Shape) -> MatrixFormat:
        """The form of the tensor's block type."""
        kind = BLOCK_KINDS[self._files.tensors[name].dtype]
        group_size = checked_group(name, kind.group_size, shape[-1])
        group = None if group_size == shape[-1] else group_size
        return MatrixFormat(kind.bits, group, kind.has_zeros, kind.wide_scales)

    def read(self, name: str, shape: Shape, reader: TensorReader) -> QuantizedWeight:
        """The quantized values, from some of the blocks at a time."""
        kind = BLOCK_KINDS[self._files.tensors[name].dtype]
        raw = reader.raw(name)
        elements = shape[0] * shape[1] // raw.shape[0]
        groups = (raw.shape[0], elements // kind.group_size)
        quants = torch.empty((raw.shape[0], elements), dtype=torch.uint8, device=raw.device)
        scales = torch.empty(groups, device=raw.device)
        zeros = torch.empty(groups, device=raw.device) if kind.has_zeros else None
        step = max(1, _ELEMENTS_AT_ONCE // elements)
        for start in range(0, raw.shape[0], step):
            part = slice(start, start + step)
            quants[part], scales[part], lows = kind.decode(raw[part])
            if zeros is not None and lows is not None:
                zeros[part] = lows
        by_row = (shape[0], shape[1] // kind.group_size)
        return QuantizedWeight(
            quants.view(shape),
            scales.view(by_row),
            None if zeros is None else zeros.view(by_row),
            kind.bits,
            kind.group_size,
        )

    def stored(
        self, names: tuple[str, ...], shapes: Sequence[Shape], reader: TensorReader
    ) -> StoredMatrix | None:
        """The blocks where they stand, if they are of one type, and of one that is loaded so."""
        del shapes
        kinds = {self._files.tensors[name].dtype for name in names}
        return reader.placed(names) if len(kinds) == 1 and kinds <= _PLACED else None

    def is_void(self, name: str) -> bool:
        """Frequencies are part of the spec by now."""
        return name.startswith("rope_f")


def gguf_row_order(config: Mapping[str, object], spec: ModelSpec) -> RowOrder | None:
    """The rows of q and k, weights and biases, as the architecture has them."""
    if config.get(GGUF_ARCHITECTURE) != "llama":
        return None

    def order(name: str) -> Tensor | None:
        if ".self_attn.q_proj." in name:
            return _unpaired(spec.num_heads, spec.head_size)
        if ".self_attn.k_proj." in name:
            return _unpaired(spec.num_kv_heads, spec.head_size)
        return None

    return order


def _unpaired(heads: int, head_size: int) -> Tensor:
    """Rows 0 2 4 ... 1 3 5 ... of each head."""
    rows = torch.arange(heads * head_size).view(heads, head_size // 2, 2)
    return rows.transpose(1, 2).flatten()
