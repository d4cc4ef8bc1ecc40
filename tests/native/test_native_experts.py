"""Experts of one call have the bits of experts one by one; the choice is the reference's."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from op_checks.cases import DTYPES, Case, bind, cases
from op_checks.invariance import same_bits
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import OpTable

LEVELS = native_status().levels


def table(level: str) -> OpTable:
    ops = load_native(2, level)
    assert ops is not None, native_status().reason
    return ops


def results(ops: OpTable, case: Case) -> tuple[torch.Tensor, ...]:
    return bind(ops, case)(*case.tokens)


@pytest.mark.parametrize("op", ["experts", "experts_lora"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_have_the_bits_of_their_products(dtype: torch.dtype, op: str) -> None:
    for level in LEVELS if dtype == torch.bfloat16 else LEVELS[:1]:
        ops = table(level)
        one_by_one = replace(ops, experts=None, pack_experts=None)
        for case in cases([op], (dtype,)):
            (expected,) = results(one_by_one, case)
            assert same_bits(results(ops, case)[0], expected), (level, case.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_choice_of_experts_is_that_of_the_reference(dtype: torch.dtype) -> None:
    ops, reference = table(LEVELS[0]), reference_ops()
    for case in cases(["route"], (dtype,)):
        for one, expected in zip(results(ops, case), results(reference, case), strict=True):
            assert same_bits(one, expected), case.name


def test_the_rows_of_x_may_be_slices() -> None:
    ops = table(LEVELS[0])
    case = next(cases(["experts"], (torch.float32,)))
    x, *routing = case.tokens
    wide = torch.cat((x, torch.full_like(x, torch.nan)), 1)
    (expected,) = bind(ops, case)(x, *routing)
    (sliced,) = bind(ops, case)(wide[:, : x.shape[1]], *routing)
    assert same_bits(sliced, expected)
