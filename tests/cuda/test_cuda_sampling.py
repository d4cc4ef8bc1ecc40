"""Sampling on a GPU equals NumPy's to the bit, waits for nothing, and can be captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from op_checks.device_sampling import CHECKS
from op_checks.sampling_cases import EVERY_CHANGE, EVERY_FILTER, rows_of, state_of
from quickstep.ops.triton.sampling.sample import sample as sample_on_device
from quickstep.runtime.sampling.device_records import DeviceRecords
from quickstep.runtime.sampling.sampler import sample

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


def built(vocab: int, seed: int):
    """Logits on the host, states, and their records on the device."""
    kinds = [*EVERY_FILTER, *EVERY_CHANGE]
    logits = rows_of("normal", len(kinds), vocab, seed, 2.0)
    states = [state_of(one, vocab, seed + i, range(4)) for i, one in enumerate(kinds)]
    changes = [state.changes(None) if state.adjusts_logits else None for state in states]
    records = DeviceRecords(vocab, "cuda").build(states, changes, range(len(kinds)))
    return logits, states, records


@pytest.mark.usefixtures("no_waiting")
def test_sampling_does_not_wait_for_the_gpu() -> None:
    logits, _, records = built(5000, 1)
    there = logits.pin_memory().to("cuda", non_blocking=True)
    assert sample_on_device(there, records).shape == (len(logits),)


def test_a_captured_call_samples_other_logits_and_seeds() -> None:
    vocab = 5000
    logits, _, records = built(vocab, 1)
    there = logits.cuda()
    sample_on_device(there, records)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = sample_on_device(there, records)
    for seed in (1, 2):
        logits, states, others = built(vocab, seed)
        there.copy_(logits)
        records.rows.copy_(others.rows)
        graph.replay()
        assert token_ids.tolist() == [one.token_id for one in sample(logits, states)]
