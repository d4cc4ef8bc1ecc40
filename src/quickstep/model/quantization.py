"""What `--quantization` means, weight by weight: bits, groups, bytes. Standard library only.

int8 has one symmetric scale per output. int4 has groups of inputs; a matrix whose inputs no group
size divides stays at int8, and so do embeddings and the output projection. Norms, biases and the
routers of experts keep the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["SCHEMES", "MatrixFormat", "QuantizationScheme", "find_scheme"]

_PANEL = 64  # outputs that the kernels read together; a matrix is padded to whole panels
_STEP = 8  # inputs that they read together


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """How one matrix is held.

    Attributes:
        bits: Of a code.
        group_size: Inputs that share a scale, a divisor of the matrix's; None for all of them.
        has_zeros: Whether a group has a zero point beside its scale.
    """

    bits: int
    group_size: int | None = None
    has_zeros: bool = False

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Packed bytes of a matrix [N, C]."""
        outputs = -(-shape[0] // _PANEL) * _PANEL
        inputs = -(-shape[1] // _STEP) * _STEP
        codes = outputs * inputs * self.bits // 8
        if self.group_size is None:
            return codes + outputs * 4
        scales = outputs * (shape[1] // self.group_size)
        return codes + scales * 2 * (1 + self.has_zeros)


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """A value of `--quantization`."""

    name: str
    bits: int
    group_size: int | None = None
    has_zeros: bool = False

    def format_of(self, num_inputs: int, outer: bool) -> MatrixFormat:
        """The format of a matrix; `outer` marks embeddings and the output projection."""
        if self.group_size is None or outer:
            return MatrixFormat(8)
        size = self.group_size
        while num_inputs % size and size > _LEAST_GROUP:
            size //= 2
        if num_inputs % size:
            return MatrixFormat(8)
        return MatrixFormat(self.bits, size, self.has_zeros)


_LEAST_GROUP = 16

SCHEMES: Mapping[str, QuantizationScheme] = MappingProxyType(
    {
        "int8": QuantizationScheme("int8", 8),
        "int4": QuantizationScheme("int4", 4, 32),
    }
)


def find_scheme(name: str | None) -> QuantizationScheme | None:
    """The scheme of a name of `config.QUANTIZATIONS`; None for None."""
    return None if name is None else SCHEMES[name]
