"""What `--quantization` means, weight by weight: bits, groups, bytes. Standard library only.

A matrix has a symmetric scale per output and group of inputs; the kernels quantize activations per
token and the same groups. `int4` has groups of 128 whose parts of 16 inputs multiply the scale by
an odd number up to 15. `fp8` is e4m3 with a scale per output, and activations in e4m3 with a scale
per token. Where a scheme's group size does not divide a matrix's inputs, a half or a
quarter of it may; where none does, the matrix has 8 bits and one scale per output. Embeddings and
the output projection always have 8 bits, in groups of 64. Norms, biases and the routers of experts
keep the model's dtype. The measurements are in docs/design/0005.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from quickstep.ops.weights import SUB_BLOCK_INPUTS, SUPER_BLOCK_INPUTS

_PANEL = 64  # outputs that the kernels read together; a matrix is padded to whole panels
_STEPS = {4: 8, 6: 16, 8: 8}  # inputs that they read together, by the bits of quantized values


class MatrixFormat(msgspec.Struct, frozen=True):
    """How one matrix is held.

    Attributes:
        bits: Of a quantized value.
        group_size: Inputs per scale, a divisor of the matrix's inputs; None for all of them.
        has_zeros: Whether a group has a zero point in addition to its scale.
        wide_scales: Whether scales and zeros need more than 16 bits.
        has_sub_scales: Whether parts of 16 inputs have a sub-block scale of 4 bits each.
        is_float8: Whether quantized values are e4m3.
        has_minimums: Whether groups have minimums in place of zero points.
        has_super_scales: Whether scales and zeros are bytes, multiplied by float16 of 256 inputs.
        has_levels: Whether quantized values have at most 16 values, and are held in 4 bits by the
            native kernels.
        is_rounded_again: Whether the values of a checkpoint had to be rounded to this format.
    """

    bits: int
    group_size: int | None = None
    has_zeros: bool = False
    wide_scales: bool = False
    has_sub_scales: bool = False
    is_float8: bool = False
    has_minimums: bool = False
    has_super_scales: bool = False
    has_levels: bool = False
    is_rounded_again: bool = False

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Packed bytes of a matrix [N, C]."""
        if self.is_float8:
            groups = 1 if self.group_size is None else shape[1] // self.group_size
            return shape[0] * (shape[1] + 4 * groups)
        outputs = -(-shape[0] // _PANEL) * _PANEL
        held_bits = 4 if self.has_levels else self.bits
        inputs = -(-shape[1] // _STEPS[held_bits]) * _STEPS[held_bits]
        quants = outputs * inputs * held_bits // 8
        if self.group_size is None:
            return quants + outputs * 4 * (1 + self.has_zeros)
        scales = outputs * (shape[1] // self.group_size)
        if self.has_sub_scales:
            quants += outputs * shape[1] // SUB_BLOCK_INPUTS // 2
        if self.has_super_scales:
            scale_bytes = scales + outputs * (shape[1] // SUPER_BLOCK_INPUTS) * 2
        else:
            scale_bytes = scales * (4 if self.wide_scales else 2)
        return quants + scale_bytes * (1 + self.has_zeros)


class QuantizationScheme(msgspec.Struct, frozen=True):
    """A value of `--quantization`; `group_size` None for one scale per output."""

    name: str
    bits: int
    group_size: int | None
    has_sub_scales: bool = False
    is_float8: bool = False

    def format_of(self, num_inputs: int, outer: bool) -> MatrixFormat:
        """The format of a matrix; `outer` marks embeddings and the output projection."""
        size = _OUTER_GROUP if outer else self.group_size
        if size is None:
            return MatrixFormat(self.bits, is_float8=self.is_float8)
        while num_inputs % size and size > _LEAST_GROUP:
            size //= 2
        if num_inputs % size:
            return MatrixFormat(8)
        if outer or not self.has_sub_scales:
            return MatrixFormat(8 if outer else self.bits, size)
        return _int4_format(num_inputs, size)


def _int4_format(num_inputs: int, size: int) -> MatrixFormat:
    """4 bits with sub-block scales, or in groups of 16 if the inputs have no two groups of 32."""
    if size == num_inputs:
        size //= 2
    if size % _PIECE:
        return MatrixFormat(4, _LEAST_GROUP)
    return MatrixFormat(4, size, has_sub_scales=True)


_LEAST_GROUP = 16
_PIECE = 32  # inputs whose sub-block scales the kernels hold together
_OUTER_GROUP = 64

SCHEMES: Mapping[str, QuantizationScheme] = MappingProxyType(
    {
        "fp8": QuantizationScheme("fp8", 8, None, is_float8=True),
        "int8": QuantizationScheme("int8", 8, 128),
        "int8-g32": QuantizationScheme("int8-g32", 8, 32),
        "int4": QuantizationScheme("int4", 4, 128, has_sub_scales=True),
        "int4-g64": QuantizationScheme("int4-g64", 4, 64),
        "int4-g128": QuantizationScheme("int4-g128", 4, 128),
    }
)


def find_scheme(name: str | None) -> QuantizationScheme | None:
    """The scheme of a name of `config.QUANTIZATIONS`; None for None."""
    return None if name is None else SCHEMES[name]


def common_form(forms: Sequence[MatrixFormat], num_inputs: int) -> MatrixFormat:
    """The format that matrices of these formats are stacked in
    (`formats.quantized_reader.stack_matrices`).
    """
    group_size = math.gcd(*(form.group_size or num_inputs for form in forms))
    alike = len({(form.group_size, form.has_minimums) for form in forms}) == 1
    # minimums become zero points next to 6 or 8 bits about the middle, which 16 bits do not hold
    has_minimums = any(form.has_minimums for form in forms)
    loses_minimums = has_minimums and any(f.bits != 4 and not f.has_minimums for f in forms)
    has_zeros = any(form.has_zeros for form in forms)
    bits = max(form.bits for form in forms)
    if bits == 6 and has_zeros and (loses_minimums or not has_minimums):
        bits = 8  # there are no zero points of 6 bits
    return MatrixFormat(
        bits,
        None if group_size == num_inputs else group_size,
        has_zeros,
        loses_minimums or any(form.wide_scales for form in forms),
        is_float8=all(form.is_float8 for form in forms),
        has_minimums=has_minimums and not loses_minimums,
        has_super_scales=alike and all(form.has_super_scales for form in forms),
    )
