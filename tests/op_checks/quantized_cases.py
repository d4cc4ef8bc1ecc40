"""Inputs of the quantized ops: every form of a `QuantizedWeight`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from op_checks.case_inputs import CaseInputs, label
from quickstep.ops.tensors import to_float8
from quickstep.ops.weights import SUB_BLOCK_INPUTS, QuantizedWeight

__all__ = [
    "Inputs",
    "float8_weight",
    "quantized_linear_inputs",
    "quantized_rows_inputs",
    "quantized_weight",
    "sub_block_weight",
]


class Inputs(NamedTuple):
    """A `Case` but for its op."""

    name: str
    tokens: tuple[Tensor, ...]
    fixed: tuple[object, ...]


# (T, C, N, group size, has bias): quantized values with sub-block scales
_SUB_BLOCK_SHAPES = (
    (1, 256, 330, 128, False),
    (3, 192, 33, 64, True),
    (5, 896, 70, 128, False),
    (12, 96, 65, 32, True),
    (13, 2304, 130, 128, True),
    (70, 2304, 66, 128, True),
    (100, 640, 150, 128, False),
    (0, 64, 32, 32, False),
)

# (T, C, N, group size, has bias): numbers of e4m3, one scale per output, and one per block
_FLOAT8_SHAPES = (
    (1, 96, 70, 96, False),
    (5, 256, 66, 128, True),
    (19, 77, 33, 77, True),
    (37, 896, 150, 896, False),
    (70, 2304, 130, 128, True),
    (0, 64, 32, 64, False),
)

# (T, C, N, bits, group size, has zeros, has bias): one row, tile, panel and block edges, odd sizes
_QUANTIZED_SHAPES = (
    (1, 32, 32, 8, 32, False, False),
    (3, 77, 33, 8, 77, True, True),
    (37, 896, 150, 8, 896, False, True),
    (6, 4864, 65, 8, 4864, False, False),
    (5, 512, 70, 8, 16, False, True),
    (7, 640, 64, 8, 320, True, False),
    (100, 128, 257, 8, 128, False, False),
    (1, 256, 330, 4, 32, False, False),
    (1, 1024, 640, 8, 1024, False, False),
    (2, 92, 140, 4, 92, True, True),
    (19, 384, 100, 4, 128, True, False),
    (13, 1152, 130, 4, 48, False, True),
    (98, 256, 65, 4, 64, True, True),
    (1, 2304, 330, 8, 128, False, False),
    (5, 2112, 200, 8, 64, True, False),
    (13, 2304, 130, 8, 128, False, True),
    (33, 1056, 70, 4, 32, False, False),
    (40, 1152, 130, 4, 32, True, True),
    (1, 2304, 330, 6, 16, False, False),
    (5, 512, 70, 6, 16, False, True),
    (33, 1056, 70, 6, 32, False, False),
    (2, 77, 33, 6, 77, False, True),
    (0, 64, 32, 4, 32, False, False),
)


# (T, C, N, bits, group size, has bias): minimums in place of zeros
_MINIMUM_SHAPES = (
    (1, 576, 200, 4, 32, False),
    (3, 96, 70, 4, 48, True),
    (7, 2304, 64, 4, 64, True),
    (2, 92, 65, 4, 92, True),
    (40, 256, 130, 4, 32, False),
    (1, 256, 330, 8, 32, True),
    (34, 640, 65, 8, 32, False),
    (5, 96, 40, 8, 96, False),
    (2, 256, 330, 6, 32, True),
    (34, 640, 65, 6, 32, False),
)


def quantized_weight(
    source: CaseInputs, shape: tuple[int, int], bits: int, group: int, *, zeros: bool
) -> QuantizedWeight:
    outputs, inputs = shape
    quants = source.integers(0, 2**bits, outputs, inputs).to(torch.uint8)
    groups = (outputs, inputs // group)
    # half of the cases have scales that f16 holds, the others do not
    fine = 2.0**-18 if inputs % 128 else 2.0**-26
    size = inputs**-0.5 / 2 ** (bits - 2)
    scales = (source.integers(1, 400, *groups).float() / 400 * size / fine).round() * fine
    offsets = source.integers(0, 2**bits, *groups).float() if zeros else None
    if offsets is not None and inputs % 3 == 0:
        offsets += 0.3
    return QuantizedWeight(quants, scales, offsets, bits, group)


def quantized_linear_inputs(dtype: torch.dtype) -> Iterator[Inputs]:
    """Tokens (x,), fixed (weight, bias)."""
    for num_tokens, width, outputs, bits, group, zeros, has_bias in _QUANTIZED_SHAPES:
        name = label("quantized_linear", dtype, num_tokens, width, outputs, bits, group, zeros)
        source = CaseInputs(name, dtype)
        weight = quantized_weight(source, (outputs, width), bits, group, zeros=zeros)
        bias = source.normal(outputs) if has_bias else None
        x = source.normal(num_tokens, width)
        x[num_tokens // 2 :, 7] *= 60.0  # as language models have them
        yield Inputs(name, (x,), (weight, bias))
    for num_tokens, width, outputs, bits, group, has_bias in _MINIMUM_SHAPES:
        name = label("quantized_linear", dtype, num_tokens, width, outputs, "minimums", bits, group)
        source = CaseInputs(name, dtype)
        weight = minimum_weight(source, (outputs, width), bits, group)
        bias = source.normal(outputs) if has_bias else None
        yield Inputs(name, (source.normal(num_tokens, width),), (weight, bias))
    for num_tokens, width, outputs, group, has_bias in _SUB_BLOCK_SHAPES:
        name = label("quantized_linear", dtype, num_tokens, width, outputs, "multiplied", group)
        source = CaseInputs(name, dtype)
        weight = sub_block_weight(source, (outputs, width), group)
        bias = source.normal(outputs) if has_bias else None
        yield Inputs(name, (source.normal(num_tokens, width),), (weight, bias))
    for num_tokens, width, outputs, group, has_bias in _FLOAT8_SHAPES:
        name = label("quantized_linear", dtype, num_tokens, width, outputs, "float8", group)
        source = CaseInputs(name, dtype)
        float8 = float8_weight(source, (outputs, width), group)
        bias = source.normal(outputs) if has_bias else None
        x = source.normal(num_tokens, width)
        x[num_tokens // 2 :, 7] *= 60.0
        yield Inputs(name, (x,), (float8, bias))
    yield from _extreme_quants(dtype)


def minimum_weight(
    source: CaseInputs, shape: tuple[int, int], bits: int, group: int
) -> QuantizedWeight:
    """Groups about 0 that have minimums in place of zeros."""
    weight = quantized_weight(source, shape, bits, group, zeros=False)
    middles = source.integers(2 ** (bits - 2), 2 ** (bits - 1), *weight.scales.shape).float()
    minimums = weight.scales * -middles
    return replace(weight, zeros=minimums, has_minimums=True)


def sub_block_weight(source: CaseInputs, shape: tuple[int, int], group: int) -> QuantizedWeight:
    weight = quantized_weight(source, shape, 4, group, zeros=False)
    held = source.integers(0, 16, shape[0], shape[1] // SUB_BLOCK_INPUTS)
    return replace(weight, sub_scales=(2 * held - 15).to(torch.int8))


def float8_weight(source: CaseInputs, shape: tuple[int, int], group: int) -> QuantizedWeight:
    """Numbers of e4m3 of all sizes, normal and below, with scales."""
    outputs, inputs = shape
    sizes = torch.exp2(source.integers(-9, 9, outputs, inputs).float())
    values = to_float8(torch.randn(shape, generator=source.generator) * sizes)
    scales = torch.rand(outputs, inputs // group, generator=source.generator) / 448
    return QuantizedWeight(values.view(torch.uint8), scales, None, 8, group, is_float8=True)


def _extreme_quants(dtype: torch.dtype) -> Iterator[Inputs]:
    """The largest sums there are, where 16-bit steps would saturate; tiny and no activations."""
    x = torch.full((4, 2048), 3.0)
    x[1] = -3.0
    x[2] = 1e-33 if dtype != torch.float16 else 0.0
    x[3] = 0.0
    for bits, group in ((8, 2048), (8, 128), (4, 2048), (4, 64)):
        for quant in (0, 2**bits - 1):
            name = label("quantized_linear", dtype, "extreme", bits, group, quant)
            quants = torch.full((66, 2048), quant, dtype=torch.uint8)
            scales = torch.full((66, 2048 // group), 2.0**-12)
            weight = QuantizedWeight(quants, scales, None, bits, group)
            yield Inputs(name, (x.to(dtype),), (weight, None))


def quantized_rows_inputs(dtype: torch.dtype) -> Iterator[Inputs]:
    """Tokens (token_ids,), fixed (weight, dtype)."""
    for num_tokens, width, rows, bits, group, zeros, _ in _QUANTIZED_SHAPES[1:]:
        name = label("quantized_rows", dtype, num_tokens, width, rows, bits, group)
        source = CaseInputs(name, dtype)
        weight = quantized_weight(source, (rows, width), bits, group, zeros=zeros)
        token_ids = source.permutation(rows)[:num_tokens]
        yield Inputs(name, (token_ids,), (weight, dtype))
    for num_tokens, width, rows, group, _ in _SUB_BLOCK_SHAPES[:-1]:
        name = label("quantized_rows", dtype, num_tokens, width, rows, "multiplied", group)
        source = CaseInputs(name, dtype)
        weight = sub_block_weight(source, (rows, width), group)
        yield Inputs(name, (source.permutation(rows)[:num_tokens],), (weight, dtype))
    for num_tokens, width, rows, group, _ in _FLOAT8_SHAPES[1:]:
        name = label("quantized_rows", dtype, num_tokens, width, rows, "float8", group)
        source = CaseInputs(name, dtype)
        weight = float8_weight(source, (rows, width), group)
        yield Inputs(name, (source.permutation(rows)[:num_tokens],), (weight, dtype))
