"""Every native op under every ISA level that the machine has: near float64, and exact.

The cases and both checks are those of the reference (`op_checks.cases`, `op_checks.agreement`,
`op_checks.invariance`); what is added here is levels and thread counts.
"""

from __future__ import annotations

import pytest
import torch

from op_checks.agreement import agreement
from op_checks.cases import OPS, AttentionCase, Case, bind, cases
from op_checks.invariance import mismatches, same_bits
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import OpTable

LEVELS = native_status().levels


def dtypes_of(level: str) -> tuple[torch.dtype, ...]:
    """All on the best level; bf16 on the others, which differ in vectors and in its products."""
    best = (torch.float32, torch.bfloat16, torch.float16)
    return best if level == LEVELS[0] else (torch.bfloat16,)


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
@pytest.mark.parametrize("level", LEVELS)
def test_results_are_as_near_float64_as_the_reference(level: str, op: str) -> None:
    ops = table(level, 2)
    checked = [agreement(ops, case) for case in cases([op], dtypes_of(level))]
    assert [found for found in checked if not found.ok] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("level", LEVELS[1:])
def test_wide_and_half_weights_are_products_of_every_level(level: str, dtype: torch.dtype) -> None:
    ops = table(level, 2)
    for case in cases(["linear"], (dtype,)):
        assert agreement(ops, case).ok, case.name
        assert not mismatches(ops, case), case.name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_token_has_the_same_bits_in_every_batch(level: str, op: str) -> None:
    ops = table(level, 2)
    found = {case.name: mismatches(ops, case) for case in cases([op], dtypes_of(level))}
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
