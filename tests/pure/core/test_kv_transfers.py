"""KV blocks on their way between the pools of two schedulers."""

from __future__ import annotations

from random import Random

import pytest

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import ChainRoot, KVBlockPool
from quickstep.core.resources.kv_transfers import KVTransfers, SendOrder
from quickstep.core.scheduler import Scheduler
from quickstep.types import (
    KVTarget,
    Request,
    Resumed,
    RowOutput,
    SamplingParams,
    StepPlan,
    StepResult,
)

BLOCK = 4
WHERE = KVTarget("127.0.0.1", 1, "t")
PROMPT = tuple(range(10, 29))  # four complete blocks


class Driver:
    """A scheduler whose steps all sample the token 7."""

    def __init__(
        self,
        num_blocks: int = 24,
        max_num_batched_tokens: int = 64,
        pipeline_depth: int = 1,
        prefix_caching: bool = True,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=32,
            pipeline_depth=pipeline_depth,
            transfers_kv=True,
        )
        self.pool = KVBlockPool(num_blocks, BLOCK, prefix_caching)
        self.scheduler = Scheduler(config, self.pool, make_policy(config), LinearCostModel())
        assert self.scheduler.held.transfers is not None
        self.transfers: KVTransfers = self.scheduler.held.transfers
        self.plans: list[StepPlan] = []
        self.ended: list[str] = []
        self.now = 0.0

    def end_receiving(self, request_id: str, now: float) -> None:
        self.scheduler.arrived(self.transfers.end_receiving(request_id), now)

    def step(self) -> bool:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        self.plans.append(plan)
        outputs = tuple(RowOutput((7,) if row.emits else ()) for row in plan.rows)
        self.now += 0.01
        outcome = self.scheduler.commit(plan, StepResult(plan.step_id, outputs, 0.01), self.now)
        self.ended += [out.request_id for out in outcome.outputs if out.finish_reason is not None]
        self.scheduler.check()
        return True

    def run(self) -> None:
        while self.step():
            pass


def request(name: str, num_outputs: int = 6, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
    return Request(name, PROMPT, sampling, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [5, 8, 64])
def test_prompt_blocks_are_ordered_once_and_in_order(chunk: int) -> None:
    driver = Driver(max_num_batched_tokens=chunk)
    driver.scheduler.add(request("r", handover=WHERE), 0.0)
    driver.run()
    orders = driver.transfers.take_orders()
    assert orders[0].request is not None and not orders[0].block_ids
    sent = [(order.first, len(order.block_ids), order.is_last) for order in orders[1:]]
    assert sum(count for _, count, _ in sent) == 4
    assert [first for first, _, _ in sent] == [
        sum(count for _, count, _ in sent[:i]) for i in range(len(sent))
    ]
    assert [is_last for _, _, is_last in sent] == [False] * (len(sent) - 1) + [True]
    tokens = [row.output_position for plan in driver.plans for row in plan.rows if row.emits]
    assert tokens == [0], "one token is computed here"
    driver.scheduler.abort("r", driver.now)
    assert driver.pool.stats().num_used == 4, "until they are sent"
    for order in orders:
        driver.transfers.sent(order)
    driver.scheduler.check()
    assert driver.pool.stats().num_used == 0
    assert not driver.transfers.take_orders()


def test_a_request_that_ends_before_its_prompt_ends_its_transfer() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.scheduler.add(request("r", handover=WHERE), 0.0)
    driver.step()
    driver.scheduler.abort("r", driver.now)
    offer, blocks, end = driver.transfers.take_orders()
    assert offer.request is not None and len(blocks.block_ids) == 2
    assert end.ends and not end.is_last and not end.block_ids
    for order in (offer, blocks, end):
        driver.transfers.sent(order)
    assert driver.pool.stats().num_used == 0


def test_a_row_of_before_a_preemption_sends_no_blocks() -> None:
    """The sequence has others by now, which no step has written yet."""
    driver = Driver(max_num_batched_tokens=8, pipeline_depth=2, prefix_caching=False)
    scheduler = driver.scheduler
    scheduler.add(request("r", handover=WHERE), 0.0)
    before = scheduler.plan(0.0)
    (sequence,) = scheduler._requests["r"]
    scheduler._preempt(sequence, 0.0)
    after = scheduler.plan(0.0)
    assert before is not None and after is not None
    assert before.rows[0].start == after.rows[0].start == 0
    for plan, num_blocks in ((before, 0), (after, 2)):
        scheduler.commit(plan, StepResult(plan.step_id, (RowOutput(()),), 0.01), 0.01)
        ordered = [order.block_ids for order in driver.transfers.take_orders()]
        assert sum(map(len, ordered)) == num_blocks


def continued(name: str = "r") -> Request:
    return request(name, resumed=(Resumed(0, (7,)),))


def test_a_request_waits_for_its_transfer_and_hits_what_came() -> None:
    driver = Driver()
    order = driver.transfers.begin_receiving("r", ChainRoot(), PROMPT)
    assert order is not None and (order.first, len(order.block_ids)) == (0, 4)
    assert driver.scheduler.held.is_moving_blocks
    driver.scheduler.add(continued(), 0.0)
    driver.scheduler.add(request("other", num_outputs=2), 0.0)
    driver.run()
    assert driver.ended == ["other"], "only the one with a transfer waits"
    driver.transfers.received("r", 3)
    driver.end_receiving("r", driver.now)
    assert not driver.scheduler.held.is_moving_blocks
    driver.plans.clear()
    driver.run()
    assert driver.ended == ["other", "r"]
    first = driver.plans[0].rows[0]
    # `other` has computed the same prompt meanwhile, so that all four blocks are hits
    assert first.start == 16
    assert driver.pool.stats().num_used == 0


@pytest.mark.parametrize("num_received", [0, 1, 3, 4])
def test_what_did_not_come_is_computed(num_received: int) -> None:
    driver = Driver()
    assert driver.transfers.begin_receiving("r", ChainRoot(), PROMPT) is not None
    driver.transfers.received("r", num_received)
    driver.scheduler.add(continued(), 0.0)
    assert not driver.step()
    driver.end_receiving("r", 0.0)
    driver.run()
    assert driver.plans[0].rows[0].start == BLOCK * num_received
    assert driver.ended == ["r"]
    assert driver.pool.stats().num_used == 0


def test_a_request_may_end_while_its_blocks_arrive() -> None:
    driver = Driver()
    assert driver.transfers.begin_receiving("r", ChainRoot(), PROMPT) is not None
    driver.scheduler.add(continued(), 0.0)
    driver.scheduler.abort("r", 0.0)
    driver.scheduler.check()
    assert driver.pool.stats().num_used == 4, "a thread may still write to them"
    driver.end_receiving("r", 0.0)
    assert driver.pool.stats().num_used == 0


def test_blocks_are_filled_when_no_step_in_flight_writes_to_them() -> None:
    """Those of a sequence that was aborted while its step ran."""
    driver = Driver(num_blocks=13)
    driver.scheduler.add(request("aborted"), 0.0)
    plan = driver.scheduler.plan(0.0)
    assert plan is not None
    driver.scheduler.abort("aborted", 0.0)
    order = driver.transfers.begin_receiving("r", ChainRoot("", "salt"), PROMPT)
    assert order is not None and set(order.block_ids) & set(plan.rows[0].new_block_ids)
    assert not driver.transfers.are_over(order.step_id)
    outputs = tuple(RowOutput((7,)) for _ in plan.rows)
    driver.scheduler.commit(plan, StepResult(plan.step_id, outputs, 0.01), 0.01)
    assert driver.transfers.are_over(order.step_id)
    driver.end_receiving("r", 0.01)


def test_transfers_leave_room_for_the_longest_sequence() -> None:
    driver = Driver(num_blocks=13)
    begin = driver.transfers.begin_receiving
    assert begin("a", ChainRoot(), PROMPT) is not None
    assert begin("a", ChainRoot(), PROMPT) is None, "there is one already"
    assert begin("b", ChainRoot(), tuple(range(40, 59))) is None, "8 blocks are kept"
    driver.end_receiving("a", 0.0)
    assert begin("b", ChainRoot(), tuple(range(40, 59))) is not None


def test_a_slow_receiver_does_not_take_the_pool() -> None:
    driver = Driver(num_blocks=10)
    for name in "abc":
        fields = {"handover": WHERE, "cache_salt": name}
        driver.scheduler.add(request(name, **fields), 0.0)
        driver.run()
        driver.scheduler.abort(name, driver.now)
    orders = driver.transfers.take_orders()
    held = sum(len(order.block_ids) for order in orders)
    assert held <= 5
    driver.scheduler.add(request("d", num_outputs=2), driver.now)
    driver.run()
    assert "d" in driver.ended
    for order in orders:
        driver.transfers.sent(order)
    driver.scheduler.check()
    assert driver.pool.stats().num_used == 0


@pytest.mark.parametrize("seed", range(40))
def test_random_lives_leave_nothing(seed: int) -> None:
    rng = Random(seed)
    driver = Driver(num_blocks=rng.randint(12, 30), max_num_batched_tokens=rng.choice((4, 9, 64)))
    unsent: list[SendOrder] = []
    receiving: dict[str, int] = {}  # blocks that have not come
    live: list[str] = []
    for number in range(120):
        match rng.randrange(7):
            case 0:
                name, salt = f"r{number}", rng.choice("xy")
                handover = rng.choice((None, WHERE))
                driver.scheduler.add(
                    request(name, rng.randint(1, 8), handover=handover, cache_salt=salt), driver.now
                )
                live.append(name)
            case 1:
                name, salt = f"r{number}", rng.choice("xy")
                order = driver.transfers.begin_receiving(name, ChainRoot("", salt), PROMPT)
                if order is not None:
                    receiving[name] = len(order.block_ids)
                if rng.random() < 0.8:
                    one = request(name, cache_salt=salt, resumed=(Resumed(0, (7,)),))
                    driver.scheduler.add(one, driver.now)
                    live.append(name)
            case 2 if receiving:
                name = rng.choice(sorted(receiving))
                count = rng.randint(0, receiving[name])
                driver.transfers.received(name, count)
                receiving[name] -= count
            case 3 if receiving:
                name = rng.choice(sorted(receiving))
                del receiving[name]
                driver.end_receiving(name, driver.now)
            case 4 if live:
                driver.scheduler.abort(rng.choice(live), driver.now)
            case 5:
                unsent += driver.transfers.take_orders()
                if unsent:
                    driver.transfers.sent(unsent.pop(rng.randrange(len(unsent))))
            case _:
                driver.step()
        driver.scheduler.check()
    for name in receiving:
        driver.end_receiving(name, driver.now)
    driver.run()
    for name in live:
        driver.scheduler.abort(name, driver.now)
    for order in (*unsent, *driver.transfers.take_orders()):
        driver.transfers.sent(order)
    driver.scheduler.check()
    assert driver.pool.stats().num_used == 0
    assert not driver.scheduler.has_work()
