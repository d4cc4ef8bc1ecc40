"""The building blocks of the reference: exact sums and elementary functions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quickstep.ops.reference.exact_math import (
    exp_nonpositive,
    normal_cdf,
    power_of_two,
    reciprocal_sqrt,
    round_rows,
    round_to_multiple,
    sigmoid,
    sum_bits,
    tanh,
)

FUNCTIONS = {
    "exp": (lambda x: exp_nonpositive(-x.abs()), lambda x: math.exp(-abs(x))),
    "sigmoid": (sigmoid, lambda x: 1.0 / (1.0 + math.exp(-x))),
    "tanh": (tanh, math.tanh),
    "normal_cdf": (normal_cdf, lambda x: 0.5 * math.erfc(-x / math.sqrt(2.0))),
    "reciprocal_sqrt": (lambda x: reciprocal_sqrt(x.abs()), lambda x: abs(x) ** -0.5),
}


def samples() -> torch.Tensor:
    spread = torch.linspace(-9.5, 9.5, 2003, dtype=torch.float64)
    return torch.cat((spread, spread * 1e-5, torch.tensor([1e-30, -1e-30]).double()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions_are_accurate_far_beyond_fp32(name):
    function, expected = FUNCTIONS[name]
    x = samples()
    want = torch.tensor([expected(value) for value in x.tolist()], dtype=torch.float64)
    assert ((function(x) - want).abs() <= want.abs() * 2e-12 + 1e-14).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions_do_not_depend_on_place(name):
    function, _ = FUNCTIONS[name]
    x = samples()
    whole = function(x)
    one_by_one = torch.cat([function(value) for value in x.split(1)])
    assert torch.equal(whole, one_by_one)
    assert torch.equal(function(x.repeat_interleave(2)[::2]), whole)


def test_exp_of_minus_infinity_is_negligible_and_nan_stays_nan():
    out = exp_nonpositive(torch.tensor([-torch.inf, torch.nan, 0.0, -0.0]).double())
    assert out[0] < 1e-300
    assert out[1].isnan()
    assert out[2:].tolist() == [1.0, 1.0]


def test_power_of_two_is_the_leading_bit():
    x = torch.tensor([0.0, 1.0, 1.99, 2.0, 3.0e-200, torch.inf]).double()
    assert power_of_two(x)[:4].tolist() == [0.0, 1.0, 1.0, 2.0]
    assert power_of_two(x)[5].item() == math.inf


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    exponent=st.integers(-100, 100),
)
def test_rounded_products_add_up_without_rounding(length, seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    bits = sum_bits(length)
    x, y = (
        round_rows(
            torch.randn(length, generator=generator).double() * 2.0**exponent * (i + 1.0), bits
        )
        for i in range(2)
    )
    exact = sum(
        (Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), y.tolist(), strict=True)),
        Fraction(0),
    )
    assert Fraction((x * y).sum().item()) == exact
    assert Fraction((x * y).flip(0).cumsum(0)[-1].item()) == exact


@pytest.mark.parametrize("length", [1, 2, 128, 256, 2048])
def test_sums_of_the_largest_digits_stay_exact(length):
    bits = sum_bits(length)
    top = torch.full((length,), 2.0**bits, dtype=torch.float64)
    assert (top * top).sum().item() <= 2.0**53
    assert length * (2**bits) ** 2 <= 2**53


def test_rounding_is_to_the_nearest_multiple():
    x = torch.tensor([0.26, -0.26, 0.74, 0.125, 0.0]).double()
    assert round_to_multiple(x, 0.25).tolist() == [0.25, -0.25, 0.75, 0.0, 0.0]
