"""The ops on a GPU: near to float64, and the same bits in every batch."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest
import torch

from op_checks.agreement import agreement
from op_checks.cases import OPS, AttentionCase, Case, bind, cases
from op_checks.invariance import mismatches, same_bits, same_without_adapters
from quickstep.ops.reference import reference_ops
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.table import LoRAPart, QuantizedWeight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

KERNELS = ("reference", "triton")
AnyCase = TypeVar("AnyCase", Case, AttentionCase)


def on_gpu(case: AnyCase) -> AnyCase:
    """The case with every tensor on the GPU."""

    def moved(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(moved(one) for one in value)
        if isinstance(value, LoRAPart):
            return msgspec.structs.replace(value, a=moved(value.a), b=moved(value.b))
        if isinstance(value, QuantizedWeight):
            parts = msgspec.structs.asdict(value)
            return QuantizedWeight(**{name: moved(part) for name, part in parts.items()})
        return value.cuda() if isinstance(value, torch.Tensor) else value

    fields = {name: moved(value) for name, value in msgspec.structs.asdict(case).items()}
    return msgspec.structs.replace(case, **fields)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("op", OPS)
def test_results_on_a_gpu_are_near_float64(op: str, kernels: str) -> None:
    ops = resolve_ops(torch.device("cuda"), kernels)
    wrong = [agreement(ops, on_gpu(case)) for case in cases([op])]
    assert [one for one in wrong if not one.ok] == []


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("op", OPS)
def test_a_token_on_a_gpu_has_the_same_bits_in_every_batch(op: str, kernels: str) -> None:
    ops = resolve_ops(torch.device("cuda"), kernels)
    found = {case.name: mismatches(ops, on_gpu(case)) for case in cases([op])}
    assert {name: one for name, one in found.items() if one} == {}


def test_adapters_of_other_tokens_change_no_bit_of_experts_on_a_gpu() -> None:
    ops = resolve_ops(torch.device("cuda"), "triton")
    for case in cases(["experts_lora"]):
        assert isinstance(case, Case)
        assert same_without_adapters(ops, on_gpu(case)), case.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_routing_on_a_gpu_has_the_bits_of_the_reference_on_a_cpu(dtype: torch.dtype) -> None:
    ops = resolve_ops(torch.device("cuda"), "triton")
    for case in cases(["route"], (dtype,)):
        assert isinstance(case, Case)
        expected = bind(reference_ops(), case)(*case.tokens)
        found = bind(ops, case)(*(one.cuda() for one in case.tokens))
        for one, other in zip(found, expected, strict=True):
            assert same_bits(one.cpu(), other), case.name
