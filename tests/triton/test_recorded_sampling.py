"""Sampling as a part of recorded steps: the tokens of steps one by one, and little work a row."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton")

from device_runs import runner_of, serve
from graph_double import Reexecution

from quickstep.model.decoder import Decoder
from quickstep.ops.triton.sampling.records import NUM_FIELDS, Field
from quickstep.ops.triton.sampling.row_keys import row_keys_
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.executors.device import DeviceExecutor
from quickstep.runtime.executors.local import LocalExecutor
from quickstep.runtime.runner import LaunchedStep, ModelRunner
from quickstep.runtime.sampling.device_sampler import DeviceSampler
from quickstep.runtime.sampling.noise import row_keys
from quickstep.runtime.sampling.recorded_sampling import RecordedSampling
from quickstep.runtime.steps.graphs import GraphSteps
from quickstep.runtime.steps.inputs import StepSize
from quickstep.runtime.steps.step_model import GraphOptions
from quickstep.types import Admission, Phase, SamplingParams, StepPlan, StepRow

pytestmark = pytest.mark.usefixtures("products_in_order")

CPU = torch.device("cpu")
FILTERED = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, max_tokens=5)
PENALIZED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, max_tokens=6)


def test_keys_of_the_noise_are_those_of_the_definition() -> None:
    rng = random.Random(3)
    seeds = [0, 1, 2**63, 2**64 - 1, *[rng.randrange(2**64) for _ in range(96)]]
    positions = [0, 1, 2**20, 2**31, *[rng.randrange(2**17) for _ in range(96)]]
    rows = torch.full((100, NUM_FIELDS), 7, dtype=torch.int64)
    rows[:, Field.KEY_B] = torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64))
    rows[:, Field.KEY_C] = torch.tensor(positions)
    row_keys_(rows)
    found = rows.numpy().view(np.uint64)[:, [Field.KEY_B, Field.KEY_C]].tolist()
    assert found == [list(row_keys(*both)) for both in zip(seeds, positions, strict=True)]
    others = [field for field in Field if field not in (Field.KEY_B, Field.KEY_C)]
    assert (rows[:, others] == 7).all()


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each step of several was sampled."""
    found: list[str] = []
    recorded, op_by_op = RecordedSampling.sample, DeviceSampler.launch

    def sample(self: RecordedSampling, *args: object) -> torch.Tensor | None:
        tokens = recorded(self, *args)  # type: ignore[arg-type]
        found.append("not captured" if tokens is None else "recorded")
        return tokens

    def launch(self: DeviceSampler, *args: object) -> object:
        found.append("op by op")
        return op_by_op(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordedSampling, "sample", sample)
    monkeypatch.setattr(DeviceSampler, "launch", launch)
    return found


def tokens_in_flight(model: Decoder, requests: list[SamplingParams]) -> object:
    runner = runner_of(model, Reexecution(), max_prompt_tokens=8)
    while runner.capture_next():
        pass
    return serve(DeviceExecutor(runner).start(), 2, requests)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([FILTERED, PENALIZED], {"recorded"}),
        (
            [
                replace(PENALIZED, logprobs=2, presence_penalty=1.5),
                replace(FILTERED, temperature=0.0, logprobs=1, logprob_token_ids=(3, 5)),
                replace(FILTERED, typical_p=0.8, top_k=0),
                replace(PENALIZED, temperature=1.9),
            ],
            {"recorded"},
        ),
        (
            [FILTERED, replace(PENALIZED, logit_bias={4: 2.0}, max_tokens=2)],
            {"recorded", "op by op"},
        ),
        ([replace(PENALIZED, min_tokens=3, stop_token_ids=(1, 2, 3))], {"recorded", "op by op"}),
        ([replace(FILTERED, xtc_probability=0.5, xtc_threshold=0.05)], {"op by op"}),
    ],
    ids=["filters and penalties", "log-probabilities", "bias", "min_tokens", "xtc"],
)
def test_recorded_rows_have_the_tokens_of_steps_one_by_one(
    model: Decoder, used: list[str], requests: list[SamplingParams], expected: set[str]
) -> None:
    on_host = model.with_ops(replace(model.ops, samples_on_device=False))
    one_by_one = serve(LocalExecutor(runner_of(on_host, None)), 1, requests)
    assert tokens_in_flight(model, requests) == one_by_one
    assert set(used) == expected


def test_a_table_of_counts_that_grew_is_captured_again(model: Decoder, used: list[str]) -> None:
    runner = runner_of(model, Reexecution(), max_prompt_tokens=8)
    while runner.capture_next():
        pass
    assert runner._device_sampler is not None
    runner._device_sampler._records.reserve_counts(50)
    requests = [PENALIZED, FILTERED]
    on_host = model.with_ops(replace(model.ops, samples_on_device=False))
    expected = serve(LocalExecutor(runner_of(on_host, None)), 1, requests)
    assert serve(DeviceExecutor(runner).start(), 2, requests) == expected
    assert set(used) == {"not captured", "op by op"}
    assert runner.num_missed > 0
    while runner.capture_next():
        pass
    used.clear()
    runner.run(StepPlan(0, (), released=(0, 1)))
    assert serve(DeviceExecutor(runner).start(), 2, requests) == expected
    assert set(used) == {"recorded"}


class Nothing:
    """A `GraphBackend` whose graphs do nothing."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def free_bytes(self) -> int:
        return 1 << 40


@pytest.mark.parametrize("sampling", [FILTERED, PENALIZED], ids=["filters", "penalties"])
def test_a_step_makes_few_calls_of_python_for_a_row(
    model: Decoder, sampling: SamplingParams
) -> None:
    num_rows, prompt = 64, (5, 9)
    kv = allocate_kv(model.kv_layout, num_rows + 1, 16, CPU)
    graphs = GraphOptions(Nothing(), num_rows)
    runner = ModelRunner(model, kv, 16, num_rows, lambda: 0.0, graphs=graphs)
    runner.record_sampling()
    steps = runner._graph_steps
    assert isinstance(steps, GraphSteps)
    while runner.capture_next():
        pass
    assert StepSize(num_rows, num_rows, steps._widths[0]) in steps._graphs
    admitted = tuple(
        [Admission(slot, f"r{slot}#0", prompt, 2, sampling, slot) for slot in range(num_rows)]
    )
    runner.skip(StepPlan(0, (), admitted))

    def step(number: int) -> StepPlan:
        tokens, start = ((9,), 1) if number == 0 else ((), 1 + number)
        return StepPlan(
            number,
            tuple(
                [
                    StepRow(
                        slot,
                        start,
                        1,
                        tokens,
                        (slot,) if number == 0 else (),
                        Phase.DECODE,
                        True,
                        number,
                    )
                    for slot in range(num_rows)
                ]
            ),
        )

    def run(plan: StepPlan) -> None:
        launched = runner.launch(plan)
        assert isinstance(launched, LaunchedStep)
        runner.finish(launched, launched.samples.wait())

    run(step(0))
    plan, calls = step(1), 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run(plan)
    finally:
        sys.setprofile(None)
    assert calls / num_rows <= 60, f"{calls / num_rows:.1f} calls a row"
    print(f"{calls / num_rows:.1f} calls a row")
