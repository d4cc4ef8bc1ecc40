"""The reference ops: near float64, and the bits of a token depend on that token alone."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from op_checks.agreement import agreement
from op_checks.cases import DTYPES, OPS, cases
from op_checks.invariance import mismatches, same_bits, torch_threads
from quickstep.errors import ConfigError
from quickstep.ops.reference import reference_ops


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_reference_is_close_to_float64(op, dtype):
    with torch_threads(1):
        results = [agreement(reference_ops(), case) for case in cases([op], (dtype,))]
    assert results
    assert [result for result in results if not result.ok] == []


# Attention has most of the cases and the slowest: every eighth in a test.
@pytest.mark.parametrize(
    ("op", "first", "stride"),
    [(op, 0, 1) for op in OPS if op != "paged_attention"]
    + [("paged_attention", first, 8) for first in range(8)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_a_token_do_not_depend_on_the_batch_or_the_threads(op, first, stride, dtype):
    ops = reference_ops()
    chosen = islice(cases([op], (dtype,)), first, None, stride)
    found = {case.name: mismatches(ops, case) for case in chosen}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert all(name.split("-")[1] == str(dtype).removeprefix("torch.") for name in found)


@pytest.mark.parametrize("num_inputs", [128, 129, 4864])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_linear_is_the_correctly_rounded_product(dtype, num_inputs):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, num_inputs, generator=generator).to(dtype)
    weight = torch.randn(50, num_inputs, generator=generator).to(dtype)
    ops = reference_ops()
    y = ops.linear(x, ops.pack_linear(weight, None))
    exact = x.double() @ weight.double().t()
    unit = torch.finfo(dtype).eps / 2
    assert ((y.double() - exact).abs() <= exact.abs() * unit + 1e-3 * unit * num_inputs).all()


@pytest.mark.parametrize("num_inputs", [2048, 8192])
def test_large_linear_keeps_its_bits_with_any_thread_count(num_inputs):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(16, num_inputs, generator=generator)
    weight = torch.randn(160, num_inputs, generator=generator)
    ops = reference_ops()
    packed = ops.pack_linear(weight, None)
    with torch_threads(1):
        expected = ops.linear(x, packed)
    for count in (2, 4):
        with torch_threads(count):
            assert same_bits(ops.linear(x, packed), expected)
            assert same_bits(ops.linear(x[9:10], packed), expected[9:10])


def test_packing_keeps_the_callers_weight_as_it_was():
    weight = torch.randn(8, 300, generator=torch.Generator().manual_seed(5))
    before = weight.clone()
    packed = reference_ops().pack_linear(weight, torch.zeros(8))
    assert torch.equal(weight, before)
    assert packed.nbytes == weight.nbytes + 32


def test_a_nan_token_stays_nan_and_alone():
    ops = reference_ops()
    packed = ops.pack_linear(torch.ones(5, 40), None)
    x = torch.ones(3, 40)
    x[1, 17] = torch.nan
    y = ops.linear(x, packed)
    assert y[1].isnan().all()
    assert (y[[0, 2]] == 40.0).all()


def test_an_unknown_activation_is_refused_by_name():
    with pytest.raises(ConfigError, match="relu"):
        reference_ops().gated_activation(torch.ones(1, 4), "relu")
