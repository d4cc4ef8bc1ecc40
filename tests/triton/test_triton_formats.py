"""Quantized checkpoints in the kernels' layout: the products of what each format holds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


from published_formats import EXACT, ROUNDED_AGAIN
from quantized_checkpoint import opened, write_quantized

from quickstep.ops.reference import reference_ops
from quickstep.ops.triton.backend import load_triton
from quickstep.ops.weights import QuantizedWeight

CASES = EXACT | ROUNDED_AGAIN
CHOSEN = (
    "awq-g32",
    "awq-all",
    "gptq4-g32",
    "gptq8-g64",
    "gptq-act-order",
    "packed4-asymmetric",
    "packed8-channel",
    "w8a8",
    "float8-channel",
    "fp8-block",
    "bnb-int8",
    "nf4",
    "modelopt-nvfp4",
)


@pytest.mark.parametrize("case", CHOSEN)
def test_products_of_a_format_are_those_of_the_reference(case: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, *CASES[case])
    weight = opened(tmp_path)[1].linear(("model.layers.0.self_attn.o_proj.weight",))
    assert isinstance(weight, QuantizedWeight)
    ops, reference = load_triton(torch.device("cpu")), reference_ops()
    assert ops is not None
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    found = ops.linear(x, ops.pack_quantized(weight, None))
    expected = reference.linear(x, reference.pack_quantized(weight, None))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_values_of_6_bits_are_planned_in_the_bytes_that_they_take(tmp_path: Path) -> None:
    write_quantized(tmp_path, *CASES["modelopt-nvfp4"])
    (weights, source), ops = opened(tmp_path), load_triton(torch.device("cpu"))
    assert ops is not None
    held = 0
    for name, shape in weights.shapes.items():
        if "_proj.weight" in name:
            weight = source.linear((name,))
            assert isinstance(weight, QuantizedWeight) and weight.bits == 6
            held += ops.pack_quantized(weight, None).nbytes
        else:
            held += 4 * math.prod(shape)
    assert held == weights.held_bytes(4, natively=False)
