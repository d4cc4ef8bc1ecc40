"""The ops on a GPU: near to float64, and the same bits in every batch."""

from __future__ import annotations

import pytest
import torch

from op_checks.agreement import agreement
from op_checks.cases import OPS, cases
from op_checks.invariance import mismatches
from quickstep.ops.resolve import resolve_ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

GPU = torch.device("cuda")
KERNELS = ("reference", "triton")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("op", OPS)
def test_results_on_a_gpu_are_near_float64(op: str, kernels: str) -> None:
    ops = resolve_ops(GPU, kernels)
    wrong = [agreement(ops, case, GPU) for case in cases([op])]
    assert [one for one in wrong if not one.ok] == []


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("op", OPS)
def test_a_token_on_a_gpu_has_the_same_bits_in_every_batch(op: str, kernels: str) -> None:
    ops = resolve_ops(GPU, kernels)
    found = {case.name: mismatches(ops, case, GPU) for case in cases([op])}
    assert {name: one for name, one in found.items() if one} == {}
