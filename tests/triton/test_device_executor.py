"""Two steps in flight on a device that keeps the sampled tokens: the same tokens as one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from graph_double import Reexecution

from quickstep.config import SchedulerConfig
from quickstep.core.block_pool import KVBlockPool
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.scheduler import Scheduler
from quickstep.errors import EngineError
from quickstep.model.decoder import Decoder
from quickstep.runtime.capture import GraphOptions
from quickstep.runtime.cuda_graphs import GraphSteps
from quickstep.runtime.device_executor import DeviceExecutor
from quickstep.runtime.executor import LocalExecutor
from quickstep.runtime.kv_cache import allocate_kv
from quickstep.runtime.runner import ModelRunner
from quickstep.types import (
    Admission,
    FinishReason,
    Phase,
    Request,
    SamplingParams,
    StepPlan,
    StepRow,
)

pytestmark = pytest.mark.usefixtures("products_in_order")

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE, NUM_SLOTS = 16, 4, 2
# the second one is sampled on the host: its steps wait for all before them
SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=4),
    SamplingParams(temperature=0.9, max_tokens=2),
    SamplingParams(temperature=0.0, max_tokens=3, min_tokens=1, stop_token_ids=(3,)),
)

Tokens = dict[str, list[int]]


def runner_of(model: Decoder, backend: Reexecution | None) -> ModelRunner:
    num_blocks = NUM_BLOCKS + (backend is not None)
    kv = allocate_kv(model.kv_shape, num_blocks, BLOCK_SIZE, CPU)
    graphs = None if backend is None else GraphOptions(backend, NUM_SLOTS)
    return ModelRunner(model, kv, BLOCK_SIZE, NUM_SLOTS, lambda: 0.0, graphs=graphs)


def serve(
    executor: LocalExecutor | DeviceExecutor,
    depth: int,
    each_step: Callable[[StepPlan], None] = lambda _: None,
) -> tuple[Tokens, dict[str, FinishReason]]:
    """The tokens of every request, and how it ended."""
    config = SchedulerConfig(
        max_num_seqs=NUM_SLOTS, max_num_batched_tokens=8, max_model_len=64, pipeline_depth=depth
    )
    pool = KVBlockPool(NUM_BLOCKS, BLOCK_SIZE, True)
    scheduler = Scheduler(config, pool, make_policy(config), LinearCostModel())
    for index, sampling in enumerate(SAMPLING):
        prompt = (5, 9, 2, index)[: 2 + index]
        scheduler.add(Request(f"r{index}", prompt, sampling, seed=index), 0.0)
    tokens: Tokens = {}
    ends: dict[str, FinishReason] = {}
    in_flight: deque = deque()
    while scheduler.has_work():
        while (plan := scheduler.plan(0.0)) is not None:
            each_step(plan)
            in_flight.append((plan, executor.submit(plan)))
        plan, ticket = in_flight.popleft()
        try:
            outputs = scheduler.commit(plan, ticket.result(), 0.0).outputs
        except EngineError as error:
            executor.reset()
            outputs = ()
            for failed in (plan, *(later for later, _ in in_flight)):
                outputs += scheduler.fail(failed, str(error), 0.0)
            in_flight.clear()
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason
    executor.close()
    return tokens, ends


@pytest.fixture
def expected(model: Decoder, products_in_order: None) -> Tokens:
    return serve(LocalExecutor(runner_of(model, None)), 1)[0]


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


def test_steps_run_while_graphs_are_not_captured_and_after_a_capture_failed(
    model: Decoder, expected: Tokens
) -> None:
    class Failing(Reexecution):
        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("not permitted while a stream is captured")

    assert serve(DeviceExecutor(runner_of(model, Failing())).start(), 2)[0] == expected


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


def test_no_second_counts_for_two_steps_in_flight(model: Decoder) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    kv = allocate_kv(model.kv_shape, NUM_BLOCKS + 1, BLOCK_SIZE, CPU)
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
