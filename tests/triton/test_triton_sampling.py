"""Sampling by the Triton kernels, interpreted on the CPU, equals NumPy's to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from op_checks.device_sampling import CHECKS


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
