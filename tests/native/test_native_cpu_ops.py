"""Attention over latents, residual streams: native ops of every ISA level, near float64, exact."""

from __future__ import annotations

import pytest
import torch

from op_checks.agreement import agreement, agreement_of_each
from op_checks.cases import CPU_OPS, DTYPES, cases
from op_checks.invariance import mismatches, mismatches_of_each
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import OpTable

LEVELS = native_status().levels


def tables(dtype: torch.dtype) -> dict[str, OpTable]:
    """Those of all levels with bf16, of which they have products of their own; of the best one
    with others.
    """
    found = {}
    for level in LEVELS if dtype == torch.bfloat16 else LEVELS[:1]:
        ops = load_native(2, level)
        assert ops is not None, native_status().reason
        found[level] = ops
    return found


@pytest.mark.parametrize("op", CPU_OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_as_near_float64_as_the_reference(dtype: torch.dtype, op: str) -> None:
    checked = [
        (level, found)
        for case in cases([op], (dtype,))
        for level, found in zip(
            tables(dtype), agreement_of_each(list(tables(dtype).values()), case), strict=True
        )
    ]
    assert checked
    assert [one for one in checked if not one[1].ok] == []


@pytest.mark.parametrize("op", CPU_OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_every_batch(dtype: torch.dtype, op: str) -> None:
    of_levels = tables(dtype)
    found = {
        (level, case.name): where
        for case in cases([op], (dtype,))
        for level, where in zip(
            of_levels, mismatches_of_each(list(of_levels.values()), case), strict=True
        )
    }
    assert found
    assert {key: where for key, where in found.items() if where} == {}


@pytest.mark.parametrize("op", CPU_OPS)
def test_the_reference_agrees_with_float64_and_with_itself(op: str) -> None:
    ops = reference_ops()
    for case in list(cases([op], (torch.bfloat16,)))[:3]:
        assert agreement(ops, case).ok, case.name
        assert not mismatches(ops, case), case.name
