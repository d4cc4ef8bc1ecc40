"""ggml's block types that are read, and the quantized values that they become."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class BlockKind(msgspec.Struct, frozen=True):
    """One block type: bits that hold a value, inputs per scale, whether groups have zeros."""

    bits: int
    group_size: int
    has_zeros: bool
    wide_scales: bool  # scales are products, which 16 bits need not hold
    has_minimums: bool = False  # in place of zeros
    has_super_scales: bool = False  # scales are bytes times a float16 of 256 inputs
    has_levels: bool = False  # values are 16 at most, which the native kernels look up


BLOCK_KINDS: Mapping[str, BlockKind] = MappingProxyType(
    {
        "Q4_0": BlockKind(4, 32, False, False),
        "Q4_1": BlockKind(4, 32, True, False, True),
        "Q5_0": BlockKind(6, 32, False, False),
        "Q5_1": BlockKind(6, 32, True, False, True),
        "Q8_0": BlockKind(8, 32, False, False),
        "Q4_K": BlockKind(4, 32, True, True, True, True),
        "Q5_K": BlockKind(6, 32, True, True, True, True),
        "Q6_K": BlockKind(6, 16, False, True, False, True),
        "Q2_K": BlockKind(4, 16, True, True, True, True),
        "Q3_K": BlockKind(4, 16, False, True, False, True),
        "IQ4_NL": BlockKind(8, 32, False, False, has_levels=True),
        "IQ4_XS": BlockKind(8, 32, False, True, False, True, True),
        "TQ1_0": BlockKind(4, 256, False, False),
        "TQ2_0": BlockKind(4, 256, False, False),
        "MXFP4": BlockKind(6, 32, False, True, has_levels=True),
        "IQ1_S": BlockKind(4, 32, True, True),
        "IQ1_M": BlockKind(4, 16, True, True),
        "IQ2_XXS": BlockKind(8, 32, False, True, has_levels=True),
        "IQ2_XS": BlockKind(8, 16, False, True, has_levels=True),
        "IQ2_S": BlockKind(8, 16, False, True, has_levels=True),
        "IQ3_XXS": BlockKind(8, 32, False, True, has_levels=True),
        "IQ3_S": BlockKind(4, 32, True, True),
        "NVFP4": BlockKind(6, 16, False, False, has_levels=True),
    }
)
