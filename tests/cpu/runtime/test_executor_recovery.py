"""Scheduler and executor through failing steps: who is hit ends with an error, the rest go on."""

from collections import deque

import pytest
from paged_hash_model import HEAD_SIZE, PagedHashModel

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.errors import EngineError
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.executors.local import LocalExecutor
from quickstep.runtime.runner import ModelRunner
from quickstep.types import FinishReason, Request, SamplingParams


class FailingModel(PagedHashModel):
    """Raises in the forward passes of the given numbers, after garbage went into its KV."""

    def __init__(self, failing=()):
        super().__init__()
        self.failing = set(failing)
        self.num_passes = 0

    def forward(self, batch, kv):
        self.num_passes += 1
        hidden = super().forward(batch, kv)
        if self.num_passes in self.failing:
            kv.keys[0].view(-1, HEAD_SIZE)[batch.layout.slot_mapping] = 1e9
            raise RuntimeError("the device fell off")
        return hidden


def requests():
    shared = tuple(range(1, 13))
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=(*shared[: 4 * (i % 4)], 20 + i, 3, i),
            sampling=SamplingParams(temperature=0.8, max_tokens=6 + i % 5, logprobs=1),
            seed=i,
        )
        for i in range(12)
    ]


def serve(model, depth):
    """Run all requests to their ends; {request id: (tokens, logprobs, finish reason)}."""
    config = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=5, max_model_len=64, pipeline_depth=depth
    )
    pool = KVBlockPool(24, 4, True)
    scheduler = Scheduler(config, pool, make_policy(config), LinearCostModel())
    kv = allocate_kv(model.kv_layout, 24, 4, model.device)
    executor = LocalExecutor(ModelRunner(model, kv, 4, 6, clock=lambda: 0.0))
    tokens, logprobs, ends = {}, {}, {}

    def take(outputs):
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            logprobs.setdefault(output.request_id, []).extend(output.logprobs)
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason

    for request in requests():
        scheduler.add(request, 0.0)
    in_flight = deque()
    while scheduler.has_work():
        while (plan := scheduler.plan(0.0)) is not None:
            in_flight.append((plan, executor.submit(plan)))
        plan, ticket = in_flight.popleft()
        try:
            take(scheduler.commit(plan, ticket.result(), 0.0).outputs)
        except EngineError as error:
            executor.reset()
            for failed in (plan, *(later for later, _ in in_flight)):
                take(scheduler.fail(failed, str(error), 0.0))
            in_flight.clear()
        scheduler.check()
    executor.close()
    assert pool.num_free == 24
    return {name: (tokens[name], logprobs[name], ends[name]) for name in tokens}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("failing", [{1}, {4}, {9, 10}, {7, 15, 23}])
def test_a_failed_step_ends_its_own_sequences_and_changes_no_bit_of_the_others(failing, depth):
    sound = serve(PagedHashModel(), 1)
    assert all(end is FinishReason.MAX_TOKENS for _, _, end in sound.values())
    hit = serve(FailingModel(failing), depth)
    assert set(hit) == set(sound)
    ended = [name for name, (_, _, end) in hit.items() if end is FinishReason.ERROR]
    assert 0 < len(ended) < len(sound)
    for name, (tokens, logprobs, _) in hit.items():
        expected_tokens, expected_logprobs, _ = sound[name]
        count = len(tokens) if name in ended else len(expected_tokens)
        assert tokens == expected_tokens[:count]
        assert logprobs == expected_logprobs[:count]
