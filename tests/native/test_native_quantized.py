"""Low-bit kernels at their edges: exact integers on every level, in every tile, and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from quickstep.errors import EngineError
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import OpTable
from quickstep.ops.weights import QuantizedWeight

LEVELS = native_status().levels


def native(level: str | None = None, num_threads: int = 2) -> OpTable:
    ops = load_native(num_threads, level)
    assert ops is not None
    return ops


TABLES = [native(level) for level in LEVELS]


def integers(seed: int, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@given(
    st.integers(0, 2**32),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([*range(1, 15), 33, 97, 131]),
    st.sampled_from([1, 2, 3, 4, 5, 7, 15, 64, 65, 255, 511, 513, 1030]),
    st.sampled_from([1, 15, 63, 64, 65, 130, 200, 321]),
)
def test_sums_over_one_group_are_exact_integers_on_every_level(
    seed: int, bits: int, num_tokens: int, inputs: int, outputs: int
) -> None:
    x = integers(seed, -127, 128, num_tokens, inputs)
    x[:, 0] = 127  # so that a token's quantized values are its numbers, and its scale is 1
    quants = integers(seed + 1, 0, 2**bits, outputs, inputs)
    weight = QuantizedWeight(quants.to(torch.uint8), torch.ones(outputs, 1), None, bits, inputs)
    expected = (x @ (quants - 2 ** (bits - 1)).t()).float()
    for ops in TABLES:
        packed = ops.pack_quantized(weight, None)
        assert torch.equal(ops.linear(x.float(), packed), expected)


@given(
    st.integers(0, 2**32),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([*range(1, 15), 33, 97, 131]),
    st.sampled_from([(32, 16), (64, 32), (576, 48), (1024, 128), (1536, 768), (2304, 32)]),
    st.sampled_from([1, 64, 65, 200, 321]),
    st.booleans(),
)
def test_sums_over_groups_are_exact_where_their_scales_are_powers_of_two(
    seed: int,
    bits: int,
    num_tokens: int,
    sizes: tuple[int, int],
    outputs: int,
    has_minimums: bool,
) -> None:
    inputs, group = sizes
    x = integers(seed, -7, 8, num_tokens, inputs)
    x[:, ::group] = -127
    quants = integers(seed + 1, 0, 2**bits, outputs, inputs)
    scales = 2.0 ** integers(seed + 2, -2, 3, outputs, inputs // group)
    zeros = integers(seed + 3, 0, 2**bits, outputs, inputs // group).float()
    if has_minimums or bits == 6:  # which have no zeros
        has_minimums, zeros = True, -scales * zeros
    weight = QuantizedWeight(
        quants.to(torch.uint8), scales, zeros, bits, group, has_minimums=has_minimums
    )
    exact = x.double() @ weight.dequantized().double().t()
    assert exact.abs().max() < 2**22  # quarters of it fit float32
    for ops in TABLES:
        packed = ops.pack_quantized(weight, None)
        assert torch.equal(ops.linear(x.float(), packed).double(), exact)


def multiplied(seed: int, outputs: int, inputs: int, group: int) -> QuantizedWeight:
    """Quantized values with sub-block scales, every value of both among them."""
    scales = 2.0 ** integers(seed + 2, -2, 3, outputs, inputs // group)
    quants = integers(seed, 0, 16, outputs, inputs).to(torch.uint8)
    sub_scales = 2 * integers(seed + 1, 0, 16, outputs, inputs // 16) - 15
    return QuantizedWeight(quants, scales, None, 4, group, sub_scales.to(torch.int8))


@given(
    st.integers(0, 2**32),
    st.sampled_from([*range(1, 20), 33, 97, 131]),
    st.sampled_from([(64, 32), (128, 64), (1024, 128), (2304, 128), (576, 96)]),
    st.sampled_from([1, 64, 65, 200, 321]),
)
def test_sub_scales_unpack_to_a_weight_of_8_bits(
    seed: int, num_tokens: int, sizes: tuple[int, int], outputs: int
) -> None:
    inputs, group = sizes
    weight = multiplied(seed, outputs, inputs, group)
    x = integers(seed, -127, 128, num_tokens, inputs).float()
    for ops in TABLES:
        packed, opened = (
            ops.pack_quantized(weight, None),
            ops.pack_quantized(weight.unpacked(), None),
        )
        assert torch.equal(ops.linear(x, packed), ops.linear(x, opened))
        rows = ops.embedding(torch.arange(outputs), packed, torch.float32)
        assert torch.equal(rows, weight.dequantized())


def test_sub_scales_that_no_kernel_has_are_refused() -> None:
    weight = multiplied(0, 8, 128, 64)
    for odd in (
        replace(weight, bits=8),
        replace(weight, zeros=torch.zeros(8, 2)),
        replace(weight, scales=torch.ones(8, 1), group_size=128),
        replace(weight, scales=torch.ones(8, 8), group_size=16),
    ):
        with pytest.raises(EngineError, match="packing"):
            native().pack_quantized(odd, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activations_of_any_dtype_and_stride_are_taken(dtype: torch.dtype) -> None:
    weight = QuantizedWeight(
        integers(0, 0, 16, 70, 96).to(torch.uint8), torch.full((70, 3), 0.01), None, 4, 32
    )
    wide = torch.randn(9, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = wide[:, 40:136]
    ops, reference = native(), reference_ops()
    got = ops.linear(x, ops.pack_quantized(weight, None))
    assert got.dtype == dtype
    expected = reference.linear(x, reference.pack_quantized(weight, None))
    assert torch.allclose(got.float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_a_token_with_nan_or_inf_is_nan_and_no_other() -> None:
    weight = QuantizedWeight(
        integers(0, 0, 256, 70, 64).to(torch.uint8), torch.ones(70, 1), None, 8, 64
    )
    x = torch.ones(5, 64)
    x[1, 3], x[3, 60] = torch.nan, -torch.inf
    for ops in (*TABLES, reference_ops()):
        y = ops.linear(x, ops.pack_quantized(weight, None))
        assert y.isnan().all(1).tolist() == [False, True, False, True, False]
        assert torch.equal(y[0], y[4])


def test_an_unknown_token_is_refused() -> None:
    ops = native()
    plain = ops.pack_linear(torch.randn(10, 8), None)
    quantized = ops.pack_quantized(ops.quantize(torch.randn(10, 16), 8, None, False), None)
    for weight in (plain, quantized):
        for token in (-1, 10):
            with pytest.raises(EngineError):
                ops.embedding(torch.tensor([3, token]), weight, torch.float32)


def test_a_group_that_no_kernel_has_is_refused() -> None:
    for inputs, group in ((24, 8), (70_000, 70_000)):
        quants = torch.zeros(2, inputs, dtype=torch.uint8)
        weight = QuantizedWeight(quants, torch.ones(2, inputs // group), None, 8, group)
        with pytest.raises(EngineError, match=f"groups of {group}"):
            native().pack_quantized(weight, None)


@pytest.mark.parametrize(
    ("bits", "group", "has_sub_scales"),
    [
        (8, 128, False),
        (8, 2304, False),
        (6, 16, False),
        (6, 32, False),
        (4, 32, False),
        (4, 128, False),
        (4, 128, True),
        (4, 2304, False),
    ],
)
def test_a_row_has_the_same_bits_in_every_batch_and_with_every_number_of_threads(
    bits: int, group: int, has_sub_scales: bool
) -> None:
    inputs, outputs = 2304, 201
    quants = integers(1, 0, 2**bits, outputs, inputs).to(torch.uint8)
    scales = torch.rand(outputs, inputs // group, generator=torch.Generator().manual_seed(2))
    found = multiplied(4, outputs, inputs, group).sub_scales if has_sub_scales else None
    weight = QuantizedWeight(quants, scales, None, bits, group, found)
    x = torch.randn(101, inputs, generator=torch.Generator().manual_seed(3)).bfloat16()
    for level in LEVELS:
        packed_one = (one := native(level, 1)).pack_quantized(weight, None)
        packed_two = (two := native(level, 2)).pack_quantized(weight, None)
        alone = torch.cat([one.linear(row[None], packed_one) for row in x])
        for num_tokens in (*range(2, 15), 33, 96, 97, 101):
            assert torch.equal(two.linear(x[:num_tokens], packed_two), alone[:num_tokens])
