"""Two steps in flight on a device that keeps the sampled tokens: the same tokens as one by one."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

pytest.importorskip("triton")

from device_runs import (
    BLOCK_SIZE,
    CPU,
    NUM_BLOCKS,
    NUM_SLOTS,
    SAMPLING,
    InFlight,
    Tokens,
    runner_of,
    serve,
)
from graph_double import Reexecution

from op_checks.sampling_cases import samplings
from quickstep.errors import EngineError
from quickstep.model.decoder import Decoder
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.executors.device import DeviceExecutor
from quickstep.runtime.executors.local import LocalExecutor
from quickstep.runtime.runner import ModelRunner
from quickstep.runtime.steps.graphs import GraphSteps, row_buckets
from quickstep.runtime.steps.step_model import GraphOptions
from quickstep.types import (
    Admission,
    FinishReason,
    Phase,
    SamplingParams,
    StepPlan,
    StepRow,
)

pytestmark = pytest.mark.usefixtures("products_in_order")


@pytest.fixture
def expected(model: Decoder, products_in_order: None) -> Tokens:
    return serve(LocalExecutor(runner_of(model, None)), 1)[0]


@pytest.fixture(scope="module")
def in_flight(model: Decoder) -> InFlight:
    return InFlight(model)


def test_steps_in_flight_give_the_tokens_of_steps_one_by_one(
    model: Decoder, expected: Tokens
) -> None:
    backend = Reexecution()
    runner = runner_of(model, backend)
    while runner.capture_next():
        pass
    tokens, ends = serve(DeviceExecutor(runner).start(), 2)
    assert tokens == expected
    assert backend.replays > 2
    assert set(ends.values()) == {FinishReason.MAX_TOKENS}


# what stays after a token, and what ends a sequence between two steps in flight
sampled = st.builds(
    replace,
    samplings,
    max_tokens=st.integers(1, 7),
    min_tokens=st.integers(0, 1),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    stop_token_ids=st.sampled_from([(), (1, 4, 9, 16, 25), tuple(range(0, 32, 3))]),
)


def check(
    model: Decoder,
    in_flight: InFlight,
    requests: Sequence[SamplingParams],
    num_blocks: int,
    aborted: Mapping[int, str],
) -> dict[str, FinishReason]:
    on_host = model.with_ops(replace(model.ops, samples_on_device=False))
    expected, expected_ends = serve(LocalExecutor(runner_of(on_host, None)), 1, requests)
    tokens, ends = in_flight.serve(requests, num_blocks, aborted)
    for name, reason in ends.items():
        found = tokens.get(name, [])
        if reason is FinishReason.ABORTED:
            assert found == expected[name][: len(found)]
        else:
            assert (found, reason) == (expected[name], expected_ends[name])
    return ends


@settings(max_examples=3)
@given(
    st.lists(sampled, min_size=2, max_size=4),
    st.sampled_from([3, NUM_BLOCKS]),
    st.dictionaries(st.integers(1, 8), st.sampled_from(["r0", "r1"]), max_size=2),
)
def test_sampled_rows_in_flight_have_the_tokens_and_logprobs_of_steps_one_by_one(
    model: Decoder,
    in_flight: InFlight,
    requests: list[SamplingParams],
    num_blocks: int,
    aborted: dict[int, str],
) -> None:
    check(model, in_flight, requests, num_blocks, aborted)


def test_rows_that_end_or_leave_while_a_step_is_in_flight_change_no_other_row(
    model: Decoder, in_flight: InFlight
) -> None:
    requests = [
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, max_tokens=5, logprobs=1),
        SamplingParams(presence_penalty=1.5, top_p=0.9, max_tokens=5, min_tokens=2),
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=6, stop_token_ids=tuple(range(20))),
        SamplingParams(temperature=1.9, frequency_penalty=0.9, max_tokens=6),
    ]
    ends = check(model, in_flight, requests, 3, {11: "r3"})
    assert set(ends.values()) == {
        FinishReason.ABORTED,
        FinishReason.MAX_TOKENS,
        FinishReason.STOP_TOKEN,
    }
    admitted = [one for plan, _ in in_flight.steps for one in plan.admitted]
    assert any(len(one.token_ids) > one.prompt_len for one in admitted), "one was preempted"
    assert all(was_launched for _, was_launched in in_flight.steps)


def test_rows_that_read_their_tokens_on_the_host_wait_for_the_steps_before(
    model: Decoder, in_flight: InFlight
) -> None:
    check(model, in_flight, SAMPLING, NUM_BLOCKS, {})
    found = {was_launched for _, was_launched in in_flight.steps}
    assert found == {False, True}


def test_steps_run_while_graphs_are_not_captured_and_after_a_capture_failed(
    model: Decoder, expected: Tokens
) -> None:
    class Failing(Reexecution):
        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("not permitted while a stream is captured")

    assert serve(DeviceExecutor(runner_of(model, Failing())).start(), 2)[0] == expected


def test_all_that_is_wanted_can_be_captured_before_the_first_step(
    model: Decoder, expected: Tokens
) -> None:
    permitted = threading.Event()

    class Waiting(Reexecution):
        def capture(self, run: Callable[[], object]) -> Callable[[], None]:
            assert permitted.wait(60.0)
            return super().capture(run)

    backend = Waiting()
    executor = DeviceExecutor(runner_of(model, backend)).start()
    assert not executor.wait_until_captured(0.05)
    permitted.set()
    assert executor.wait_until_captured(60.0)
    num_buckets = len(row_buckets(NUM_SLOTS))
    assert executor.num_captured == num_buckets
    assert backend.captured == 2 * num_buckets, "steps, and the sampling of their rows"
    assert serve(executor, 2)[0] == expected
    assert executor.wait_until_captured(), "a closed executor captures nothing"
    assert backend.captured == 2 * num_buckets, "no step wanted another one"


def test_a_capture_and_the_results_of_a_step_take_turns(model: Decoder) -> None:
    runner = runner_of(model, Reexecution())
    executor = DeviceExecutor(runner)
    held: list[bool] = []
    capture_next = runner.capture_next

    def noted() -> bool:
        held.append(executor._running.locked())
        return capture_next()

    runner.capture_next = noted
    executor.start()
    assert executor.wait_until_captured(60.0)
    executor.close()
    assert held and all(held)


@pytest.mark.parametrize(
    "error", [RuntimeError("the device fell off"), torch.OutOfMemoryError("16 GiB")]
)
def test_a_failing_step_ends_its_sequences_and_the_next_ones_run(
    model: Decoder, expected: Tokens, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    prepare, num_prepared = GraphSteps.prepare, 0

    def failing(self: GraphSteps, rows: object, slots: object) -> None:
        nonlocal num_prepared
        num_prepared += 1
        if num_prepared == 2:
            raise error
        prepare(self, rows, slots)

    monkeypatch.setattr(GraphSteps, "prepare", failing)
    tokens, ends = serve(DeviceExecutor(runner_of(model, Reexecution())).start(), 2)
    failed = {name for name, reason in ends.items() if reason is FinishReason.ERROR}
    assert failed and len(ends) == len(SAMPLING)
    for name in set(ends) - failed:
        assert tokens[name] == expected[name]


def test_plans_after_close_are_refused(model: Decoder) -> None:
    executor = DeviceExecutor(runner_of(model, Reexecution())).start()
    executor.close()
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        executor.submit(StepPlan(0, ()))


def test_a_closed_executor_keeps_neither_model_nor_cache(model: Decoder) -> None:
    executor = DeviceExecutor(runner_of(model, Reexecution())).start()
    runner = weakref.ref(executor._runner)
    assert executor.wait_until_captured(60.0)
    executor.close()
    gc.collect()
    assert runner() is None


def test_no_second_counts_for_two_steps_in_flight(model: Decoder) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    kv = allocate_kv(model.kv_layout, NUM_BLOCKS + 1, BLOCK_SIZE, CPU)
    graphs = GraphOptions(Reexecution(), NUM_SLOTS)
    runner = ModelRunner(model, kv, BLOCK_SIZE, NUM_SLOTS, clock, graphs=graphs)
    executor = DeviceExecutor(runner).start()
    prompt = (5, 9, 2)
    admission = Admission(0, "r#0", prompt, len(prompt), SAMPLING[0], 0)
    prefill = StepRow(0, 0, len(prompt), prompt, (0, 1), Phase.PREFILL, True, 0)
    plans = [StepPlan(0, (prefill,), (admission,))]
    for index in range(1, 4):
        row = StepRow(0, len(prompt) + index - 1, 1, (), (), Phase.DECODE, True, index)
        plans.append(StepPlan(index, (row,)))
    tickets = [executor.submit(plan) for plan in plans]
    seconds = [ticket.result().seconds for ticket in tickets]
    executor.close()
    assert min(seconds) > 0.0
    assert sum(seconds) <= now
