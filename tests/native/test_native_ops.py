"""Every native op under every ISA level that the machine has: near float64, and exact.

The cases and both checks are those of the reference (`op_checks.cases`, `op_checks.agreement`,
`op_checks.invariance`); what is added here is levels and thread counts.
"""

from __future__ import annotations

import pytest
import torch

from op_checks.agreement import agreement, agreement_of_each
from op_checks.cases import DTYPES, OPS, AttentionCase, Case, bind, cases
from op_checks.invariance import mismatches, mismatches_of_each, same_bits
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import OpTable

LEVELS = native_status().levels


def levels_of(dtype: torch.dtype) -> tuple[str, ...]:
    """All with bf16, of which they have products of their own; the best one with others."""
    return tuple(LEVELS) if dtype == torch.bfloat16 else (LEVELS[0],)


def table(level: str, num_threads: int) -> OpTable:
    ops = load_native(num_threads, level)
    assert ops is not None, native_status().reason
    return ops


def run(ops: OpTable, case: Case | AttentionCase) -> tuple[torch.Tensor, ...]:
    if isinstance(case, AttentionCase):
        return (ops.paged_attention(*case.arguments),)
    return bind(ops, case)(*case.tokens)


def test_the_library_is_built_and_has_a_level() -> None:
    status = native_status()
    assert status.available, status.reason
    assert status.isa == LEVELS[0]
    assert LEVELS[-1] in ("portable", "neon")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_as_near_float64_as_the_reference(dtype: torch.dtype, op: str) -> None:
    levels = levels_of(dtype)
    tables = [table(level, 2) for level in levels]
    checked = [
        (level, found)
        for case in cases([op], (dtype,))
        for level, found in zip(levels, agreement_of_each(tables, case), strict=True)
    ]
    assert checked
    assert [one for one in checked if not one[1].ok] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("level", LEVELS[1:])
def test_wide_and_half_weights_are_products_of_every_level(level: str, dtype: torch.dtype) -> None:
    ops = table(level, 2)
    for case in cases(["linear"], (dtype,)):
        assert agreement(ops, case).ok, case.name
        assert not mismatches(ops, case), case.name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_every_batch(dtype: torch.dtype, op: str) -> None:
    levels = levels_of(dtype)
    tables = [table(level, 2) for level in levels]
    found = {
        (level, case.name): where
        for case in cases([op], (dtype,))
        for level, where in zip(levels, mismatches_of_each(tables, case), strict=True)
    }
    assert found
    assert {name: where for name, where in found.items() if where} == {}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("level", LEVELS)
def test_one_two_and_three_threads_give_the_same_bits(level: str, op: str) -> None:
    one, two, three = (table(level, num_threads) for num_threads in (1, 2, 3))
    for case in cases([op]):
        expected = run(one, case)
        for ops in (two, three):
            for got, want in zip(run(ops, case), expected, strict=True):
                assert same_bits(got, want), (case.name, level)
