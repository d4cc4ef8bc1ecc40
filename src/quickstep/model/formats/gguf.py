"""GGUF files as quantized checkpoints: matrices in ggml's blocks, rows in ggml's order.

The layouts are those of ggml-quants.h; blocks become quantized values exactly. Each decoding
function takes blocks [B, bytes] uint8 and returns quantized values [B, elements] uint8, scales and
zeros [B, groups] float32 (zeros None: 2**(bits - 1)). Types of 4 bits stay at 4, those of 5, 6 and
8 become 8-bit quantized values. `w = scale * q + low` becomes `scale * (q - zero)` with zero = -low
/ scale; a group whose scale is 0 holds `low` everywhere, which is quantized value 0 at scale `low`
and zero -1.

For architecture `llama`, llama.cpp stores queries and keys for rotation in pairs of neighbours;
here a head's halves are rotated, so `gguf_row_order` restores the original order of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec
import torch
from torch import Tensor

from quickstep.model.checkpoint.gguf_spec import GGUF_ARCHITECTURE
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.tensor_schema import Shape, Shapes
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.formats.quantized_reader import RowOrder
from quickstep.model.formats.storage import checked_group
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.weights import QuantizedWeight, StoredMatrix

Decoded = tuple[Tensor, Tensor, Tensor | None]


class BlockKind(msgspec.Struct, frozen=True):
    """One block type: bits of a quantized value, inputs per scale, whether groups have zeros."""

    bits: int
    group_size: int
    has_zeros: bool
    wide_scales: bool  # scales are products, which 16 bits need not hold
    decode: Callable[[Tensor], Decoded]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at`: [B, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(octets: Tensor) -> Tensor:
    """[B, n] -> [B, 2 n]: all low halves, then all high ones."""
    return torch.cat((octets & 15, octets >> 4), 1)


def _with_low(quants: Tensor, scales: Tensor, lows: Tensor) -> Decoded:
    """Quantized values of `scale * q + low`."""
    flat = scales == 0
    zeros = torch.where(flat, -1.0, -lows / torch.where(flat, 1.0, scales))
    scales = torch.where(flat, lows, scales)
    if bool(flat.any()):
        group_size = quants.shape[1] // scales.shape[1]
        quants = quants.masked_fill(flat.repeat_interleave(group_size, 1), 0)
    return quants, scales, zeros


def _q4_0(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Decoded:
    return _with_low(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(octets: Tensor) -> Tensor:
    """4 bytes [B, 4] -> [B, 32], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return ((octets.unsqueeze(2) >> shifts) & 1).flatten(1) << 4


def _q5_0(blocks: Tensor) -> Decoded:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return quants + (128 - 16), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Decoded:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _with_low(quants, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Decoded:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None


def _six_bit_pairs(octets: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes [B, 12] -> scales and minima [B, 8], 6 bits each."""
    first, second, third = octets[:, :4], octets[:, 4:8], octets[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scales.float(), minima.float()


def _k_groups(blocks: Tensor, quants: Tensor) -> Decoded:
    """Q4_K's and Q5_K's common head: d, dmin, 8 scales and 8 minima."""
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    return _with_low(quants, _half(blocks, 0) * scales, -_half(blocks, 2) * minima)


def _paired_nibbles(octets: Tensor) -> Tensor:
    """[B, 128] -> [B, 256]: of each 32 bytes the low halves, then the high ones."""
    runs = octets.view(-1, 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), 2).flatten(1)


def _q4_k(blocks: Tensor) -> Decoded:
    return _k_groups(blocks, _paired_nibbles(blocks[:, 16:].contiguous()))


def _q5_k(blocks: Tensor) -> Decoded:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4  # [B, 8, 32]
    return _k_groups(blocks, _paired_nibbles(blocks[:, 48:].contiguous()) | high.flatten(1))


def _q6_k(blocks: Tensor) -> Decoded:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), 2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (low | (high << 4)).flatten(1) + (128 - 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return quants, _half(blocks, 208) * scales, None


BLOCK_KINDS: Mapping[str, BlockKind] = MappingProxyType(
    {
        "Q4_0": BlockKind(4, 32, False, False, _q4_0),
        "Q4_1": BlockKind(4, 32, True, True, _q4_1),
        "Q5_0": BlockKind(8, 32, False, False, _q5_0),
        "Q5_1": BlockKind(8, 32, True, True, _q5_1),
        "Q8_0": BlockKind(8, 32, False, False, _q8_0),
        "Q4_K": BlockKind(4, 32, True, True, _q4_k),
        "Q5_K": BlockKind(8, 32, True, True, _q5_k),
        "Q6_K": BlockKind(8, 16, False, True, _q6_k),
    }
)


_LOADABLE = frozenset(("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))  # `OpTable.load_linear` reads these
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
        """The quantized values [N, C], decoded some blocks at a time."""
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
        """The blocks, still in the file, if all are of one type that can be loaded from there."""
        del shapes
        kinds = {self._files.tensors[name].dtype for name in names}
        return reader.stored_matrix(names) if len(kinds) == 1 and kinds <= _LOADABLE else None

    def has_no_effect(self, name: str) -> bool:
        """Whether it is a table of rotary frequencies: the spec has them."""
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
