"""Requests run to their end with an executor over a tiny model, and what they sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from graph_double import Reexecution

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.errors import EngineError
from quickstep.model.decoder import Decoder
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.executors.device import DeviceExecutor
from quickstep.runtime.executors.local import LocalExecutor
from quickstep.runtime.runner import HeldStep, LaunchedStep, ModelRunner
from quickstep.runtime.steps.step_model import GraphOptions
from quickstep.types import (
    FinishReason,
    Request,
    SamplingParams,
    SequenceOutput,
    StepPlan,
    TokenLogprobs,
)

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE, NUM_SLOTS = 16, 4, 2


# the second one reads its tokens on the host: its steps wait for all before them
SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=4),
    SamplingParams(temperature=0.9, max_tokens=2, dry_multiplier=1.0, dry_sequence_breakers=()),
    SamplingParams(temperature=0.0, max_tokens=3, min_tokens=1, stop_token_ids=(3,)),
)


Tokens = dict[str, list[tuple[int, TokenLogprobs | None]]]


def runner_of(
    model: Decoder, backend: Reexecution | None, max_prompt_tokens: int = 0
) -> ModelRunner:
    num_blocks = NUM_BLOCKS + (backend is not None)
    kv = allocate_kv(model.kv_layout, num_blocks, BLOCK_SIZE, CPU)
    graphs = None
    if backend is not None:
        graphs = GraphOptions(backend, NUM_SLOTS, max_prompt_tokens=max_prompt_tokens)
    runner = ModelRunner(model, kv, BLOCK_SIZE, NUM_SLOTS, lambda: 0.0, graphs=graphs)
    runner.record_sampling()  # as the executor does, which may not be idle first
    return runner


def serve(
    executor: LocalExecutor | DeviceExecutor,
    depth: int,
    samplings: Sequence[SamplingParams] = SAMPLING,
    num_blocks: int = NUM_BLOCKS,
    aborted: Mapping[int, str] = MappingProxyType({}),
) -> tuple[Tokens, dict[str, FinishReason]]:
    """The tokens of every request with their log-probabilities, and how it ended. `aborted` are
    requests to abort after so many steps were submitted.
    """
    config = SchedulerConfig(
        max_num_seqs=NUM_SLOTS, max_num_batched_tokens=8, max_model_len=64, pipeline_depth=depth
    )
    pool = KVBlockPool(num_blocks, BLOCK_SIZE, True)
    scheduler = Scheduler(config, pool, make_policy(config), LinearCostModel())
    for index, sampling in enumerate(samplings):
        prompt = (5, 9, 2, index)[: 2 + index]
        scheduler.add(Request(f"r{index}", prompt, sampling, seed=index), 0.0)
    tokens: Tokens = {}
    ends: dict[str, FinishReason] = {}
    in_flight: deque = deque()
    num_submitted = 0
    while scheduler.has_work():
        outputs: tuple[SequenceOutput, ...] = ()
        while (plan := scheduler.plan(0.0)) is not None:
            in_flight.append((plan, executor.submit(plan)))
            num_submitted += 1
            if num_submitted in aborted:
                outputs += scheduler.abort(aborted[num_submitted], 0.0)
        plan, ticket = in_flight.popleft()
        try:
            outputs += scheduler.commit(plan, ticket.result(), 0.0).outputs
        except EngineError as error:
            executor.reset()
            for failed in (plan, *(later for later, _ in in_flight)):
                outputs += scheduler.fail(failed, str(error), 0.0)
            in_flight.clear()
        for output in outputs:
            logprobs = output.logprobs or (None,) * len(output.token_ids)
            found = zip(output.token_ids, logprobs, strict=True)
            tokens.setdefault(output.request_id, []).extend(found)
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason
    executor.close()
    return tokens, ends


class InFlight:
    """A runner with captured steps that serves one example after the other. `steps` are the plans
    of the newest one, and whether they were launched before the tokens before them were known.
    """

    def __init__(self, model: Decoder) -> None:
        self.runner = runner_of(model, Reexecution(), max_prompt_tokens=8)
        while self.runner.capture_next():
            pass
        self.steps: list[tuple[StepPlan, bool]] = []
        launch = self.runner.launch

        def noted(plan: StepPlan) -> LaunchedStep | HeldStep:
            step = launch(plan)
            self.steps.append((plan, isinstance(step, LaunchedStep)))
            return step

        self.runner.launch = noted

    def serve(self, *args: Any) -> tuple[Tokens, dict[str, FinishReason]]:
        self.steps.clear()
        found = serve(DeviceExecutor(self.runner).start(), 2, *args)
        self.runner.run(StepPlan(0, (), released=tuple(range(NUM_SLOTS))))
        return found
