"""ISA levels compared: integer products have one result, whatever computes them."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from msgspec.structs import replace

from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import OpTable
from quickstep.ops.weights import QuantizedWeight

# All but the last have fused multiply-adds, which the float part of a low-bit product is made of.
FUSED = native_status().levels[:-1] if native_status().isa != "neon" else native_status().levels

# sub-block scales are in groups of 4 bits, 32 inputs at a time
FORMS = [
    *product((4, 8), (None, 16, 48, 64, 128), ("", "zeros")),
    *product((6,), (None, 16, 32, 48, 128), ("", "minimums")),
    *product((4,), (64, 128), ("sub_scales",)),
]


def table(level: str) -> OpTable:
    ops = load_native(2, level)
    assert ops is not None
    return ops


@pytest.mark.parametrize(("bits", "group", "more"), FORMS)
def test_low_bit_products_have_the_same_bits_on_every_level_and_in_every_batch(
    bits: int, group: int | None, more: str
) -> None:
    generator = torch.Generator().manual_seed(bits)
    inputs = 1100 if group is None else 1152
    groups = 1 if group is None else inputs // group
    shape = (150, groups)
    quantized = QuantizedWeight(
        torch.randint(0, 2**bits, (150, inputs), generator=generator).to(torch.uint8),
        torch.rand(shape, generator=generator),
        torch.rand(shape, generator=generator) * 2**bits if more in ("zeros", "minimums") else None,
        bits,
        inputs // groups,
        has_minimums=more == "minimums",
    )
    if more == "sub_scales":
        held = torch.randint(0, 16, (150, inputs // 16), generator=generator)
        quantized = replace(quantized, sub_scales=(2 * held - 15).to(torch.int8))
    bias = torch.randn(150, generator=generator)
    x = torch.randn(131, inputs, generator=generator)
    expected = None
    for level in FUSED:
        ops = table(level)
        packed = ops.pack_quantized(quantized, bias)
        whole = ops.linear(x, packed)
        expected = whole if expected is None else expected
        assert torch.equal(whole, expected), level
        for count in (1, 7, 8, 17, 40, 64, 65, 80, 96, 113, 128, 129):
            assert torch.equal(ops.linear(x[-count:].contiguous(), packed), whole[-count:]), level


def tile_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """TDPBF16PS by Intel's description, for steps of 32 inputs: x [R, K], weight [N, K]."""

    def flushed(values: torch.Tensor) -> torch.Tensor:
        return torch.where(values.abs() < 2.0**-126, values * 0, values)

    x, weight = flushed(x.float()), flushed(weight.float())
    total = torch.zeros(len(x), len(weight))
    for step in range(0, x.shape[1], 32):
        chains = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(step, step + 32):
            # A product is exact in float64, and so is its sum with a float32 of a like exponent.
            product = x[:, k, None].double() * weight[:, k].double()
            chains[k % 2] = flushed((product + chains[k % 2].double()).float())
        total = flushed(total + flushed(chains[0] + chains[1]))
    return total


@pytest.mark.parametrize("level", [level for level in FUSED if level == "avx512_amx"])
@pytest.mark.parametrize("inputs", [320, 2112])
@pytest.mark.parametrize("scale", [1.0, 2.0**-64, 2.0**-66])
def test_bf16_products_on_tiles_have_the_bits_of_their_description(
    level: str, scale: float, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn(40, inputs, generator=generator) * scale).bfloat16()
    weight = (torch.randn(70, inputs, generator=generator) * scale).bfloat16()
    x[3, 5], x[4, 40], weight[6, 7] = torch.inf, torch.nan, 2.0**-130
    ops = table(level)
    got = ops.linear(x, ops.pack_linear(weight, None))
    expected = tile_products(x, weight).bfloat16()
    assert torch.equal(got.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(got[finite], expected[finite])
    alone = torch.cat([ops.linear(row[None], ops.pack_linear(weight, None)) for row in x])
    assert torch.equal(got[finite], alone[finite])
