"""Sampling on a GPU equals NumPy's to the bit, waits for nothing, and can be captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from op_checks.device_sampling import CHECKS, rows_of_every_kind
from quickstep.ops.triton.sampling.sample import sample as sample_on_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_a_gpu(check) -> None:
    check("cuda")


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_waiting")
def test_sampling_does_not_wait_for_the_gpu() -> None:
    logits, _, records = rows_of_every_kind(5000, 1, "cuda")
    there = logits.pin_memory().to("cuda", non_blocking=True)
    assert sample_on_device(there, records).shape == (len(logits),)
