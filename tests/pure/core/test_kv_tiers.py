"""KV blocks that are kept outside of the pool, and come back as cached prefixes."""

from __future__ import annotations

import pytest

from quickstep.config import KVTierConfig, SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import ChainRoot, KVBlockPool
from quickstep.core.resources.kv_tiers import Span, identities
from quickstep.core.scheduler import Scheduler
from quickstep.types import (
    CacheMiss,
    FinishReason,
    Request,
    RowOutput,
    SamplingParams,
    SequenceTimings,
    StepPlan,
    StepResult,
)
from quickstep.verify.stored_blocks import StoredBlocks

BLOCK = 4
PROMPT = tuple(range(10, 51))  # ten complete blocks
BLOCK_BYTES = 1000
STEP_S = 1.0  # so slow that every restore pays


class Driver:
    """A scheduler whose steps all sample the token 7; blocks have the tokens as content."""

    def __init__(self, num_blocks: int = 24, seconds: float = STEP_S, **tier: object) -> None:
        sizes: dict[str, object] = {"block_bytes": BLOCK_BYTES, "max_bytes": 10**6}
        sizes |= {"latency_s": 1e-6, **tier}
        config = SchedulerConfig(
            max_num_seqs=4,
            max_model_len=64,
            kv_tier=KVTierConfig(**sizes),  # type: ignore[arg-type]
        )
        self.pool = KVBlockPool(num_blocks, BLOCK)
        self.scheduler = Scheduler(config, self.pool, make_policy(config), LinearCostModel())
        assert self.scheduler.held.tiers is not None
        self.tiers = self.scheduler.held.tiers
        self.content: dict[int, object] = {}
        self.disk: StoredBlocks[object] = StoredBlocks(
            self.scheduler, self.content.get, self._write
        )
        self.timings: dict[str, SequenceTimings] = {}
        self.seconds = seconds
        self.now = 0.0

    def _write(self, block_id: int, content: object) -> None:
        self.content[block_id] = content

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        self.scheduler.check()
        return plan

    def commit(self, plan: StepPlan) -> None:
        outputs = tuple(RowOutput((7,) if row.emits else ()) for row in plan.rows)
        self.now += self.seconds
        result = StepResult(plan.step_id, outputs, self.seconds)
        for out in self.scheduler.commit(plan, result, self.now).outputs:
            if out.finish_reason is not None and out.timings is not None:
                self.timings[out.request_id] = out.timings
        self.scheduler.check()

    def step(self) -> bool:
        if (plan := self.plan()) is None:
            return False
        self.commit(plan)
        return True

    def run(self, *requests: Request) -> None:
        """Run requests to their end, with all that is ordered meanwhile."""
        for one_request in requests:
            self.scheduler.add(one_request, self.now)
        while self.step() or self.disk.restore_all(self.now):
            self.disk.save_all()


def request(name: str, prompt: tuple[int, ...] = PROMPT, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    return Request(name, prompt, sampling, **fields)  # type: ignore[arg-type]


def test_what_was_evicted_comes_back_as_a_hit() -> None:
    driver = Driver()
    driver.run(request("first"))
    assert driver.tiers.stats().num_blocks == 10
    driver.scheduler.reset_prefix_cache()
    driver.run(request("second"))
    times = driver.timings["second"]
    assert times.num_cached_tokens == times.num_restored_tokens == 40
    assert times.cache_miss is CacheMiss.LAST_BLOCK
    assert driver.pool.stats().num_used == 0
    driver.run(request("third"))
    assert driver.timings["third"].num_restored_tokens == 0, "the pool has it"


def test_blocks_are_on_their_way_until_a_save_and_a_restore_have_ended() -> None:
    driver = Driver()
    held = driver.scheduler.held
    driver.scheduler.add(request("first"), driver.now)
    while driver.step():
        assert not held.is_moving_blocks
    save = driver.tiers.take_save()
    assert save is not None
    assert held.is_moving_blocks
    driver.tiers.saved(save, is_saved=True)
    assert not held.is_moving_blocks
    driver.scheduler.reset_prefix_cache()
    driver.scheduler.add(request("second"), driver.now)
    assert driver.plan() is None
    driver.scheduler.abort("second", driver.now)
    assert held.is_moving_blocks and driver.pool.stats().num_used
    driver.disk.restore_all(driver.now)
    assert not held.is_moving_blocks and not driver.pool.stats().num_used


def test_others_run_while_one_waits_for_its_blocks() -> None:
    driver = Driver()
    driver.run(request("first"))
    driver.scheduler.reset_prefix_cache()
    driver.scheduler.add(request("second"), driver.now)
    driver.scheduler.add(request("other", tuple(range(100, 110))), driver.now)
    while driver.step():
        pass
    assert list(driver.timings) == ["first", "other"]
    waited_s = driver.now - driver.timings["first"].finished_s
    driver.disk.restore_all(driver.now)
    driver.run()
    assert driver.timings["second"].restore_s == pytest.approx(waited_s)


def test_what_follows_a_hit_is_restored() -> None:
    driver = Driver()
    driver.run(request("long"))
    driver.scheduler.reset_prefix_cache()
    driver.tiers.stop_saving()
    spans = dict(driver.disk.spans)
    driver.disk.broken.update(spans)
    driver.run(request("short", PROMPT[:21]))
    assert driver.timings["short"].num_cached_tokens == 0
    assert driver.tiers.stats().num_lost == 10, "a span that cannot be read is forgotten"
    driver = Driver()
    driver.run(request("long"))
    driver.scheduler.reset_prefix_cache()
    driver.run(request("short", PROMPT[:21]))
    assert driver.timings["short"].num_restored_tokens == 20
    driver.run(request("again"))
    times = driver.timings["again"]
    assert (times.num_cached_tokens, times.num_restored_tokens) == (40, 20)


def test_nothing_is_restored_where_computing_is_faster() -> None:
    driver = Driver(seconds=1e-5, latency_s=2e-3)
    driver.run(request("first"))
    assert not driver.disk.spans, "nor saved"
    slow = Driver()
    slow.run(request("first"))
    slow.tiers.measured(10, 1e9)
    slow.scheduler.reset_prefix_cache()
    slow.run(request("again"))
    assert slow.tiers.stats().num_restored == 10, "a rate is a mean"
    for _ in range(100):
        slow.tiers.measured(10, 1e9)
    slow.scheduler.reset_prefix_cache()
    slow.run(request("last"))
    assert slow.timings["last"].num_restored_tokens == 0


def test_a_slow_hour_of_the_disk_does_not_end_restores_for_good() -> None:
    driver = Driver()
    driver.run(request("first"))
    for _ in range(100):
        driver.tiers.measured(10, 1e9)
    for number in range(400):
        driver.scheduler.reset_prefix_cache()
        driver.run(request(f"{number}"))
        if driver.tiers.stats().num_restored:
            break
    assert 0 < number < 399


def test_blocks_are_saved_when_their_steps_are_over() -> None:
    """A sequence that is aborted leaves blocks to which a step in flight still writes."""
    driver = Driver()
    driver.scheduler.add(request("r"), 0.0)
    plan = driver.plan()
    assert plan is not None
    driver.scheduler.abort("r", 0.0)
    assert driver.tiers.take_save() is None
    driver.commit(plan)
    order = driver.tiers.take_save()
    assert order is not None and len(order.block_ids) == 10


def test_blocks_are_restored_into_when_no_step_writes_to_them() -> None:
    driver = Driver(num_blocks=16)
    driver.scheduler.max_in_flight = 2
    driver.run(request("first"))
    driver.scheduler.reset_prefix_cache()
    driver.scheduler.add(request("aborted", tuple(range(100, 160))), driver.now)
    plan = driver.plan()
    assert plan is not None
    driver.scheduler.abort("aborted", driver.now)
    driver.scheduler.add(request("second"), driver.now)
    assert driver.plan() is None
    assert not driver.tiers.take_restores(), "the step in flight still writes to its blocks"
    driver.commit(plan)
    assert driver.disk.restore_all(driver.now) == 1


def test_a_copy_of_blocks_that_were_evicted_meanwhile_is_not_kept() -> None:
    driver = Driver(num_blocks=16)
    driver.scheduler.add(request("first"), 0.0)
    while driver.step():
        pass
    order = driver.tiers.take_save()
    assert order is not None and driver.tiers.confirm(order)
    driver.scheduler.add(request("other", tuple(range(100, 150))), driver.now)
    driver.step()
    assert not driver.tiers.confirm(order)
    driver.tiers.saved(order, False)
    assert driver.tiers.stats().num_blocks == 0


def test_a_failed_step_leaves_nothing_to_save() -> None:
    driver = Driver()
    driver.scheduler.add(request("r"), 0.0)
    plan = driver.plan()
    assert plan is not None
    driver.scheduler.fail(plan, "it failed", 1.0)
    assert driver.disk.save_all() == 0


@pytest.mark.parametrize("fields", [{"cache_salt": "b"}, {"adapter": "x", "adapter_id": "x1"}])
def test_what_others_computed_is_not_found(fields: dict[str, str]) -> None:
    driver = Driver()
    driver.run(request("first", cache_salt="a"), request("without"))
    driver.scheduler.reset_prefix_cache()
    driver.run(request("second", **fields))
    assert driver.timings["second"].num_cached_tokens == 0
    driver.run(request("third", cache_salt="a"))
    assert driver.timings["third"].num_restored_tokens == 40


def test_identities_differ_by_adapter_salt_and_every_token_before() -> None:
    roots = [ChainRoot(), ChainRoot("a"), ChainRoot(cache_salt="a"), ChainRoot("a", "a")]
    chains = [[PROMPT[:4], PROMPT[4:8]], [PROMPT[1:5], PROMPT[4:8]], [PROMPT[4:8]]]
    found = [list(identities(root, chain))[-1] for root in roots for chain in chains]
    assert len(set(found)) == len(roots) * len(chains)
    assert {len(identity) for identity in found} == {32}


def test_what_was_used_least_recently_makes_room() -> None:
    driver = Driver(max_bytes=21 * BLOCK_BYTES)
    prompts = [tuple(range(start, start + 41)) for start in (100, 200, 300)]
    driver.run(request("0", prompts[0]))
    driver.run(request("1", prompts[1]))
    driver.run(request("0 again", prompts[0]))
    driver.run(request("2", prompts[2]))
    driver.scheduler.reset_prefix_cache()
    for index in range(3):
        driver.run(request(f"{index} last", prompts[index]))
    restored = [driver.timings[f"{index} last"].num_restored_tokens for index in range(2)]
    assert restored == [40, 0]
    assert driver.tiers.stats().num_bytes <= 21 * BLOCK_BYTES


def test_what_an_earlier_process_left_is_restored() -> None:
    first, second = Driver(), Driver()
    first.run(request("first"))
    blocks = next(iter(first.disk.spans.values()))
    span = Span(next(iter(first.disk.spans)), 0, tuple(block.digest for block, _ in blocks))
    assert second.tiers.add_spans([span]) == []
    assert second.tiers.add_spans([Span("copy", 0, span.digests)]) == ["copy"]
    second.disk.spans = first.disk.spans
    second.run(request("second"))
    assert second.timings["second"].num_restored_tokens == 40


def test_a_reader_saves_and_removes_nothing() -> None:
    first = Driver()
    first.run(request("first"))
    spans = [
        Span(name, 0, tuple(block.digest for block, _ in blocks))
        for name, blocks in first.disk.spans.items()
    ]
    reader = Driver(max_bytes=1, may_save=False)
    assert reader.tiers.add_spans(spans) == []
    reader.disk.spans = first.disk.spans
    reader.run(request("second"), request("other", tuple(range(100, 141))))
    assert reader.timings["second"].num_restored_tokens == 40
    assert reader.disk.spans == first.disk.spans


def test_all_sequences_of_a_request_wait_for_one_restore() -> None:
    driver = Driver(num_blocks=40)
    driver.run(request("first"))
    driver.scheduler.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, n=3)
    driver.run(Request("three", PROMPT, sampling))
    assert len(driver.disk.restored) == 1
    assert driver.timings["three"].num_cached_tokens == 40


def test_requests_with_one_prefix_wait_for_one_restore() -> None:
    driver = Driver(num_blocks=60)
    driver.run(request("first", PROMPT[:29]))
    driver.scheduler.reset_prefix_cache()
    prompts = [(*PROMPT[:29], *range(start, start + 9)) for start in (100, 200, 300)]
    driver.run(*(request(f"{index}", prompt) for index, prompt in enumerate(prompts)))
    assert len(driver.disk.restored) == 1
    assert driver.tiers.stats().num_restored == 7
    cached = [driver.timings[f"{index}"].num_cached_tokens for index in range(3)]
    assert cached == [28, 28, 28]
    assert all(driver.timings[f"{index}"].cache_miss for index in range(3))


def test_a_request_that_is_aborted_while_it_waits_leaves_its_blocks() -> None:
    driver = Driver()
    driver.run(request("first"))
    driver.scheduler.reset_prefix_cache()
    driver.scheduler.add(request("second"), driver.now)
    assert driver.plan() is None
    (output,) = driver.scheduler.abort("second", driver.now)
    assert output.finish_reason is FinishReason.ABORTED
    driver.disk.restore_all(driver.now)
    driver.scheduler.check()
    assert driver.pool.stats().num_used == 0 and driver.pool.stats().num_cached == 10


def test_a_preempted_sequence_comes_back_with_its_outputs() -> None:
    """Its blocks were saved when it left the batch."""
    driver = Driver(num_blocks=24)
    low = Request("low", PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    driver.scheduler.add(low, 0.0)
    for _ in range(9):
        driver.step()
    driver.scheduler.pause("low", driver.now)
    driver.run(request("other", tuple(range(100, 160))))
    driver.scheduler.resume("low", driver.now)
    driver.run()
    times = driver.timings["low"]
    assert times.num_preemptions == 1
    assert times.num_output_tokens == 20
