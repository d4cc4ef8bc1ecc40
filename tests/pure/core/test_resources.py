"""Resources of other kinds, declared here: the scheduler treats them as slots, blocks and adapters.

That is what `core.resources.resource` promises: a new kind takes part in admission, preemption,
priorities and refusals without a line in `scheduler.py`. Random runs check that with the tokens of
every sequence, and a few tests each promise by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import pytest
from random_runs import random_run
from scheduler_world import Setup, World, ask, finish, policy_of

from quickstep.core.cost_model import LinearCostModel
from quickstep.core.queues import RunningBatch, WaitingQueue
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.resources.resource import Preempt, Resource
from quickstep.core.scheduler import Scheduler
from quickstep.core.sequence import Residency, Sequence
from quickstep.errors import RequestError
from quickstep.types import FinishReason, Request


class StateSlots(Resource):
    """The states of layers without a KV cache: one for each running sequence, fewer than slots."""

    def __init__(self, num_states: int) -> None:
        self._num_states = num_states
        self._holders: set[str] = set()
        self.most_held = 0

    def check_request(self, request: Request) -> None:
        if request.sampling.n > self._num_states:
            raise RequestError(f"n is {request.sampling.n}, there are {self._num_states} states")

    def fits(self, sequence: Sequence) -> bool:
        return len(self._holders) < self._num_states

    def fits_without(self, sequence: Sequence, leaving: SequenceOf[Sequence]) -> bool:
        return len(self._holders) - len(leaving) < self._num_states

    def admit(self, sequence: Sequence, residency: Residency, now: float) -> None:
        self._holders.add(sequence.sequence_id)
        self.most_held = max(self.most_held, len(self._holders))

    def release(self, sequence: Sequence) -> None:
        self._holders.remove(sequence.sequence_id)

    def check(self, running: Iterable[Sequence]) -> None:
        assert {sequence.sequence_id for sequence in running} == self._holders
        assert len(self._holders) <= self._num_states


class RemotePrompts(Resource):
    """Prompts whose KV comes from elsewhere: a sequence waits apart until its own is there, which
    is when `num_at_once` are allowed to arrive, in the order of service.
    """

    def __init__(self, num_at_once: int) -> None:
        self._num_at_once = num_at_once
        self._arrived: set[str] = set()
        self.order: list[str] = []
        self.lost_keys: set[str] = set()

    def key(self, request: Request) -> str:
        return f"prompt of {request.request_id}"

    def is_ready(self, key: str) -> bool:
        return key in self._arrived

    def prepare(
        self, waiting: WaitingQueue, batch: RunningBatch, now: float, preempt: Preempt
    ) -> None:
        for _ in range(self._num_at_once):
            first = waiting.first_parked(self._is_on_its_way)
            if first is None:
                return
            self._arrived.add(first.parked_key)
            self.order.append(first.request.request_id)
            waiting.sort_again(first.parked_key, now)

    def _is_on_its_way(self, key: str) -> bool:
        return key.startswith("prompt of ") and key not in self.lost_keys

    def lost(self, waiting: WaitingQueue) -> list[tuple[Sequence, str]]:
        return [
            (sequence, "its prompt is lost")
            for key in waiting.parked_by_key
            if key in self.lost_keys
            for sequence in waiting.parked(key)
        ]


def opening(*resources: Resource) -> Callable[[Setup], Scheduler]:
    """Opens schedulers with more resources."""

    def open_one(setup: Setup) -> Scheduler:
        pool = KVBlockPool(setup.num_blocks, setup.block_size, setup.prefix_caching, setup.digest)
        return Scheduler(setup.config, pool, policy_of(setup), LinearCostModel(), resources)

    return open_one


@pytest.mark.parametrize("seed", range(40))
def test_random_runs_with_more_resources_give_the_same_tokens(seed: int) -> None:
    random_run(
        seed,
        lambda setup: opening(StateSlots(3), RemotePrompts(2))(setup),
        num_calls=80,
    )


def test_no_more_sequences_run_than_the_resource_allows() -> None:
    states = StateSlots(2)
    world = World(Setup(num_blocks=64, max_num_seqs=8), opening(states))
    for name in "abcde":
        world.add(ask(name, max_tokens=4))
    finish(world)
    assert states.most_held == 2


def test_a_resource_makes_way_for_a_higher_priority() -> None:
    world = World(Setup(num_blocks=64, max_num_seqs=8), opening(StateSlots(1)))
    world.add(ask("low", max_tokens=12, priority=5))
    world.plan()
    world.commit()
    world.add(ask("high", max_tokens=2, priority=-5))
    finish(world)
    ends = [(received.request.request_id, received.timings) for received in world.received.values()]
    finished_s = {name: timings.finished_s for name, timings in ends if timings is not None}
    assert finished_s["high"] < finished_s["low"]


def test_a_request_that_could_never_have_it_is_refused_and_changes_nothing() -> None:
    world = World(Setup(num_blocks=64, max_num_seqs=8), opening(StateSlots(1)))
    with pytest.raises(RequestError, match="there are 1 states"):
        world.scheduler.add(ask("many", n=2), 0.0)
    world.scheduler.check()
    assert not world.scheduler.has_work()


def test_what_is_not_ready_waits_apart_in_the_order_of_service() -> None:
    prompts = RemotePrompts(1)
    world = World(Setup(num_blocks=64, max_num_seqs=8), opening(prompts))
    world.add(ask("low", priority=5))
    world.add(ask("high", priority=-5))
    finish(world)
    assert prompts.order == ["high", "low"]


def test_what_can_never_come_ends_the_sequence() -> None:
    prompts = RemotePrompts(1)
    prompts.lost_keys.add("prompt of gone")
    world = World(Setup(num_blocks=64), opening(prompts))
    world.scheduler.add(ask("gone"), 0.0)
    assert world.scheduler.plan(0.0) is None
    assert world.scheduler.wakeup(0.0) == 0.0
    (output,) = world.scheduler.expire(0.0)
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "its prompt is lost")
    assert not world.scheduler.has_work()
