"""Sampling by the Triton kernels, interpreted on the CPU, equals NumPy's to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from op_checks.device_sampling import CHECKS
from quickstep.ops.triton.sampling.argmax import argmax_


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_interpreted(check) -> None:
    check("cpu")


def test_compiled_kernels_round_every_operation() -> None:
    """For an H100, which is not needed for it: quotients are IEEE's, products are not fused."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).parents[2] / "tools" / "compile_kernels.py"
    ran = subprocess.run(
        [sys.executable, str(script), "--only", "sampling", "--json"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len({one["kernel"] for one in found}) == 9
    assert not any(one["spilled_bytes"] for one in found)
    used = {instruction for one in found for instruction in one["fp64_instructions"]}
    assert "div.rn.f64" in used
    assert [one for one in used if "fma" in one or "approx" in one or "full" in one] == []


def test_the_argmax_is_the_lowest_of_the_largest_and_none_that_is_not_finite() -> None:
    vocab = 10_000  # several tiles, and a rest
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, vocab, generator=generator)
    logits[0, [9, 5000, 9999]] = 9.0
    logits[1, vocab - 1] = 9.0
    logits[2, 7], logits[3, 4500], logits[4] = torch.inf, torch.nan, -torch.inf
    slots = torch.tensor([3, 0, 6, 1, 2, 5, 4])
    last_tokens, out = torch.full((8,), -7), torch.full((7,), -7)
    found = argmax_(logits, slots, last_tokens, out)
    expected = [9, vocab - 1, -1, -1, -1, *logits[5:].argmax(1).tolist()]
    assert found.tolist() == expected
    is_finite = [place for place, one in enumerate(expected) if one >= 0]
    assert last_tokens[slots][is_finite].tolist() == [expected[place] for place in is_finite]
    assert last_tokens[7] == -7 and bool((last_tokens[:7] >= 0).all())
