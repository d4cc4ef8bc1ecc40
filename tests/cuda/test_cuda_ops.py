"""The ops on a GPU: near to float64, and the same bits in every batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from op_checks.agreement import agreement
from op_checks.cases import OPS, AttentionCase, Case, bind, cases
from op_checks.invariance import mismatches, same_bits, same_without_adapters
from op_checks.placement import moved
from quickstep.ops.reference import reference_ops
from quickstep.ops.resolve import resolve_ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

GPU = torch.device("cuda")
KERNELS = ("reference", "triton")
_NUM_PARTS = 8  # of an op's cases: most of the time is compiling, which processes do side by side


def _part(op: str, part: int) -> Iterator[Case | AttentionCase]:
    return islice(cases([op]), part, None, _NUM_PARTS)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("part", range(_NUM_PARTS))
@pytest.mark.parametrize("op", OPS)
def test_results_on_a_gpu_are_near_float64(op: str, part: int, kernels: str) -> None:
    ops = resolve_ops(GPU, kernels)
    wrong = [agreement(ops, case, GPU) for case in _part(op, part)]
    assert [one for one in wrong if not one.ok] == []


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("part", range(_NUM_PARTS))
@pytest.mark.parametrize("op", OPS)
def test_a_token_on_a_gpu_has_the_same_bits_in_every_batch(
    op: str, part: int, kernels: str
) -> None:
    ops = resolve_ops(GPU, kernels)
    found = {case.name: mismatches(ops, case, GPU) for case in _part(op, part)}
    assert {name: one for name, one in found.items() if one} == {}


def test_adapters_of_other_tokens_change_no_bit_of_experts_on_a_gpu() -> None:
    ops = resolve_ops(torch.device("cuda"), "triton")
    for case in cases(["experts_lora"]):
        assert isinstance(case, Case)
        assert same_without_adapters(ops, moved(case, GPU)), case.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_routing_on_a_gpu_has_the_bits_of_the_reference_on_a_cpu(dtype: torch.dtype) -> None:
    ops = resolve_ops(torch.device("cuda"), "triton")
    for case in cases(["route"], (dtype,)):
        assert isinstance(case, Case)
        expected = bind(reference_ops(), case)(*case.tokens)
        found = bind(ops, case)(*(token.cuda() for token in case.tokens))
        for one, other in zip(found, expected, strict=True):
            assert same_bits(one.cpu(), other), case.name
