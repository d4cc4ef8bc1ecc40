"""Weights as ops get and keep them: in an implementation's layout, quantized, or still in files.

Plain values; `ops.table` has the ops that make and read them. Letters as there: N output features,
C input features.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from quickstep.ops.tensors import HostTensor

SUB_BLOCK_INPUTS = 16  # of a `QuantizedWeight`, those that share a sub-block scale
SUPER_BLOCK_INPUTS = 256  # of ggml's K types, those that share the scale of their scales
REQUANTIZED_GROUPS = (32, 16)  # inputs, of rows whose groups are scattered: the first that fits


class LinearWeight(msgspec.Struct, frozen=True):
    """A weight in the layout of the implementation that made it (`OpTable.pack_linear`, or
    `OpTable.pack_quantized`).

    Only that implementation reads `data` and `bias`, which is None where `data` contains the bias.
    `num_outputs` N, `num_inputs` C; `nbytes` counts `data` and `bias`.
    """

    data: object
    bias: Tensor | None
    num_outputs: int
    num_inputs: int
    nbytes: int


class PackedForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an implementation has packed a weight [N, C], which decides the bytes of its parts.

    Attributes:
        bits: 4, 6 or 8 of quantized values, whatever holds them; 0 for numbers of `dtype`, by the
            implementation's number.
        group_size: Inputs that share a scale; C for one scale per output.
        has_super_scales: Whether scales of groups are bytes, multiplied by those of super-blocks.
        has_levels: Whether quantized values are held in 4 bits, as their numbers among `levels`.
        levels: 16 quantized values; 0 without.
        part_bytes: Of weights, scales, zeros and bias, of those that there are; of a stack those
            of all its matrices.
        checksum: Of all bytes, without a sign, in 64 bits; of a stack 0.
        stacked: The matrices of a stack, one below another, each with a form of its own; empty for
            one matrix. A stack itself has `n` and `k` only.
    """

    bits: int
    dtype: int
    n: int
    k: int
    group_size: int
    has_bias: int
    has_zeros: int
    half_scales: int
    has_sub_scales: int
    has_minimums: int
    has_super_scales: int
    has_levels: int
    levels: tuple[int, ...]
    part_bytes: tuple[int, ...]
    checksum: int
    stacked: tuple[PackedForm, ...] = ()


class HeadWeight(msgspec.Struct, frozen=True):
    """A matrix [N, C] of each of H heads in the layout of the implementation that made it
    (`LatentOps.pack_heads`), the only reader of `data`. `num_outputs` N, `num_inputs` C.
    """

    data: object
    num_heads: int
    num_outputs: int
    num_inputs: int
    nbytes: int


class QuantizedWeight(msgspec.Struct, frozen=True):
    """The quantized values of a weight [N, C], whichever file format or rounding they come from:

        weight[n, c] = (quants[n, c] - zeros[n, c // group_size]) * scales[n, c // group_size]

    and times `sub_scales[n, c // 16]` where it has those: a group's scale is then multiplied, for
    each of its parts of 16 inputs, by an odd integer. The product of a quantized value and its
    sub-block scale still fits 8 bits, so that a kernel may hold 4 bits and multiply 8, in groups of
    `group_size`.

    With `has_minimums`, `zeros` are minimums, and

        weight[n, c] = quants[n, c] * scales[n, c // group_size] + zeros[n, c // group_size]

    With `is_float8`, `quants` are the bytes of e4m3 numbers, which are multiplied by `scales` only,
    and activations are quantized to e4m3.

    Attributes:
        quants: The quantized values, [N, C] uint8, below 2**bits (one per byte here;
            implementations pack).
        scales: [N, C / group_size] float32.
        zeros: [N, C / group_size] float32, any value; None for 2**(bits - 1) (symmetric).
            Minimums with `has_minimums`.
        bits: 4, 6 or 8; 6 without zeros, though with minimums.
        group_size: Inputs that share a scale: a multiple of 16, or C for one scale per output.
        sub_scales: [N, C / 16] int8, odd, from -15 to 15; None for 1. Of 4 bits without zeros, in
            groups of a multiple of 32, more than one.
        is_float8: Whether they are numbers in e4m3: of 8 bits, without zeros.
        has_minimums: Whether groups have minimums in place of zeros.
    """

    quants: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    sub_scales: Tensor | None = None
    is_float8: bool = False
    has_minimums: bool = False

    def dequantized(self) -> Tensor:
        """The weight [N, C] in float32."""
        if self.is_float8:
            grouped = self.float8_values().float().reshape(*self.scales.shape, self.group_size)
            return (grouped * self.scales.unsqueeze(2)).reshape(self.quants.shape)
        zeros = float(2 ** (self.bits - 1)) if self.zeros is None else self.zeros.unsqueeze(2)
        grouped = self.quants.reshape(*self.scales.shape, self.group_size).float()
        if self.has_minimums:
            return (grouped * self.scales.unsqueeze(2) + zeros).reshape(self.quants.shape)
        steps = grouped - zeros
        if self.sub_scales is not None:
            spread = self.sub_scales.repeat_interleave(SUB_BLOCK_INPUTS, 1)
            steps = steps * spread.reshape(steps.shape)
        return (steps * self.scales.unsqueeze(2)).reshape(self.quants.shape)

    def float8_values(self) -> Tensor:
        """The quantized values [N, C] of `is_float8`, as float8_e4m3fn."""
        import torch

        return self.quants.view(torch.float8_e4m3fn)

    def unpacked(self) -> QuantizedWeight:
        """The same weight [N, C] without sub-block scales: in 8 bits, if it has any."""
        if self.sub_scales is None:
            return self
        spread = self.sub_scales.repeat_interleave(SUB_BLOCK_INPUTS, 1)
        steps = (self.quants.short() - 8) * spread
        return QuantizedWeight((steps + 128).byte(), self.scales, None, 8, self.group_size)

    def with_zeros(self) -> QuantizedWeight:
        """The same weight [N, C] with zeros in place of minimums, up to their rounding."""
        import torch

        if not self.has_minimums or self.zeros is None:
            return self
        flat = self.scales == 0  # a group of one value: its minimum
        scales = torch.where(flat, self.zeros, self.scales)
        zeros = torch.where(flat, -1.0, -self.zeros / torch.where(flat, 1.0, self.scales))
        quants = self.quants.masked_fill(flat.repeat_interleave(self.group_size, 1), 0)
        return QuantizedWeight(quants, scales, zeros, self.bits, self.group_size)

    def rows(self, index: slice | Tensor) -> QuantizedWeight:
        """The outputs [n, C] at `index`."""
        parts = (self.zeros, self.sub_scales)
        zeros, sub_scales = (None if part is None else part[index] for part in parts)
        return QuantizedWeight(
            self.quants[index],
            self.scales[index],
            zeros,
            self.bits,
            self.group_size,
            sub_scales,
            self.is_float8,
            self.has_minimums,
        )


class StoredRows(msgspec.Struct, frozen=True):
    """`num_rows` rows of a tensor in a file, whose first byte is at `offset`.

    Kinds whose scales are in other tensors have `scales`; their quantized values are signed bytes
    (`I8`, `I4`), bytes in words of 4 (`U8`), half bytes in words of 8 (`U4`), half bytes that name
    one of 16 `levels` (`LEVELS` of 6 bits; `LEVELS_HIGH` of 8 bits, where the high half is first),
    which the native kernels hold as such, or numbers (`E4M3`).

    Attributes:
        kind: How they are stored; None for as the matrix.
        head_size: Of heads whose rows the file has in the order 0, head_size / 2, 1, ...; 0 for
            rows that are in order.
        first_row: The first of them in the tensor.
        layout: `rows`; `columns` where the tensor is [inputs, rows], of words or numbers; `awq`
            where words hold 8 rows.
        stored_rows: Of the tensor, in layouts other than `rows`.
        scales: [num_rows, G] float32.
        zeros: The same shape; None for 2**(bits - 1).
        order: [C] int32, the group of each input; None for groups in a row. Rows whose groups are
            scattered are rounded again, to 8 bits.
        levels: [16] uint8, quantized values of the kind's bits.
        factor: Of a type of ggml's blocks: all its scales are multiplied by it.
    """

    file: Path
    offset: int
    num_rows: int
    kind: str | None = None
    head_size: int = 0
    first_row: int = 0
    layout: str = "rows"
    stored_rows: int = 0
    scales: HostTensor | None = None
    zeros: HostTensor | None = None
    order: HostTensor | None = None
    levels: HostTensor | None = None
    factor: float = 1.0


class Rounding(msgspec.Struct, frozen=True):
    """Quantized values to be made of a stored matrix, as `OpTable.quantize` makes them.

    `report_error` is called with the norm of what rounding changed over that of the weights, both
    over every `sample_step`-th row.
    """

    bits: int
    group_size: int | None
    has_zeros: bool
    has_sub_scales: bool
    sample_step: int
    report_error: Callable[[float], None]


class StoredMatrix(msgspec.Struct, frozen=True):
    """A weight [N, C] that is still in files, for `OpTable.load_linear`.

    Attributes:
        kind: How: `F32`, `BF16`, `F16`, the name of a ggml block type, or a kind whose scales are
            in other tensors. Floating point is what all parts are converted to.
        parts: N rows, one part below another. Of quantized values, each may be of another kind.
        num_inputs: C.
        rounding: How to quantize it; None for a matrix that is not changed or is quantized
            already.
    """

    kind: str
    parts: tuple[StoredRows, ...]
    num_inputs: int
    rounding: Rounding | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether it is held in quantized values: those of the files, or rounded ones."""
        return self.rounding is not None or self.kind not in ("F32", "BF16", "F16")
