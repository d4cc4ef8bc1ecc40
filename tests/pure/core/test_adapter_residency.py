"""Adapters as a resource of the scheduler: who is loaded, who is evicted, who waits how long."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from itertools import accumulate
from random import Random
from types import MappingProxyType

import pytest
from scheduler_world import Setup, World

from quickstep.core.resources.adapter_residency import AdapterResidency, AdapterState, AdapterUse
from quickstep.types import Activity, Request, SamplingParams


def residency(max_loras: int, num_adapters: int, **options: float) -> AdapterResidency:
    found = AdapterResidency(max_loras, **options)  # type: ignore[arg-type]
    for number in range(num_adapters):
        found.register(f"a{number}", 10)
    return found


def order(
    one: AdapterResidency,
    adapter_id: str,
    *,
    now: float = 0.0,
    waited_s: float = 0.0,
    uses: Mapping[str, AdapterUse] = MappingProxyType({}),
    in_flight: tuple[str, ...] = (),
) -> bool:
    """Order a load, and let it end at once."""
    ordered = one.order_load(adapter_id, waited_s, now, uses, in_flight)
    if ordered:
        assert one.finish_load(adapter_id)
    one.check()
    return ordered


def test_an_adapter_that_was_used_more_stays() -> None:
    one = residency(2, 3)
    for adapter_id, num_uses in (("a0", 1), ("a1", 5)):
        for _ in range(num_uses):
            one.count_use(adapter_id, 0.0)
        assert order(one, adapter_id)
    one.count_use("a2", 1.0)
    assert order(one, "a2", now=1.0)
    assert [one.state(f"a{number}").value for number in range(3)] == [
        "absent",
        "resident",
        "resident",
    ]
    orders = one.take_orders()
    assert orders is not None
    assert (orders.loads, orders.evictions) == (("a0", "a1", "a2"), ("a0",))
    assert one.take_orders() is None


def test_old_uses_are_forgotten() -> None:
    one = residency(2, 3)
    for _ in range(50):
        one.count_use("a0", 0.0)
    assert order(one, "a0") and order(one, "a1")
    for _ in range(3):
        one.count_use("a1", 600.0)
    assert order(one, "a2", now=600.0)
    assert one.state("a0") is AdapterState.ABSENT


def test_what_is_used_pinned_or_in_flight_is_not_evicted() -> None:
    one = residency(3, 4)
    one.register("a0", 10, is_pinned=True)
    assert all(order(one, f"a{number}") for number in range(3))
    one.acquire("a1")
    uses = {"a1": AdapterUse.RUNNING}
    assert not order(one, "a3", uses=uses, in_flight=("a2",))
    assert order(one, "a3", uses=uses)
    assert one.state("a2") is AdapterState.ABSENT


def test_bytes_are_limited_as_well() -> None:
    one = AdapterResidency(8, max_bytes=100)
    for name, num_bytes in (("small", 30), ("middle", 60), ("large", 95)):
        one.register(name, num_bytes)
    assert order(one, "small") and order(one, "middle")
    assert order(one, "large")
    assert (one.num_resident, one.num_bytes, one.num_evictions) == (1, 95, 2)


def test_nothing_is_evicted_in_vain() -> None:
    one = AdapterResidency(8, max_bytes=100)
    for name, num_bytes in (("busy", 60), ("idle", 30), ("large", 95)):
        one.register(name, num_bytes)
    assert order(one, "busy") and order(one, "idle")
    one.acquire("busy")
    assert not order(one, "large", uses={"busy": AdapterUse.RUNNING})
    assert one.state("idle") is AdapterState.RESIDENT


def test_waiting_sequences_keep_their_adapter_until_another_waited_too_long() -> None:
    one = residency(1, 2)
    assert order(one, "a0")
    uses = {"a0": AdapterUse.WANTED}
    assert not order(one, "a1", waited_s=0.5, uses=uses)
    assert order(one, "a1", waited_s=1.5, uses=uses)
    assert one.take_changed() == ["a0"]


def test_a_busy_adapter_is_drained_and_used_again_if_the_other_has_left() -> None:
    one = residency(1, 2)
    assert order(one, "a0")
    one.acquire("a0")
    uses = {"a0": AdapterUse.RUNNING}
    assert not order(one, "a1", waited_s=1.5, uses=uses)
    assert one.state("a0") is AdapterState.DRAINING and not one.is_ready("a0")
    assert one.take_changed() == ["a0"]
    one.stop_draining()
    assert one.is_ready("a0") and one.take_changed() == ["a0"]
    assert not order(one, "a1", waited_s=1.5, uses=uses)
    one.release("a0")
    assert order(one, "a1", waited_s=1.6)


def test_a_retired_adapter_is_kept_for_its_sequences_and_then_freed() -> None:
    world = World(Setup(max_loras=1, num_blocks=40))
    world.add(adapter_request("first", "old"))
    world.plan()
    world.finish_load()
    world.plan()
    assert not world.scheduler.retire_adapter("old")
    while world.live:
        world.commit()
        world.plan()
    assert world.scheduler.retire_adapter("old")
    world.add(adapter_request("second", "new"))
    world.drain()
    world.verify()


def adapter_request(name: str, adapter_id: str, num_outputs: int = 4, priority: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
    return Request(name, (0, 1, 0), sampling, adapter_id=adapter_id, priority=priority)


def test_a_wait_for_an_adapter_is_a_time_of_its_own() -> None:
    world = World(Setup(max_loras=1))
    world.add(adapter_request("a", "poet"))
    world.plan()
    world.advance(0.5)
    world.finish_load()
    world.drain()
    world.verify()
    timings = world.received["a#0"].timings
    assert timings is not None
    assert (timings.adapter_s, timings.queue_s) == (0.5, 0.0)
    assert [one for one, _ in timings.activities][:2] == [Activity.QUEUE, Activity.ADAPTER]


def test_requests_of_resident_adapters_overtake_for_a_limited_time() -> None:
    """A stream of requests for the one resident adapter never ends, and `late` is served."""
    world = World(Setup(max_loras=1, max_num_seqs=4, num_blocks=64, max_waiting=64))
    world.add(adapter_request("first", "busy", 30))
    world.plan()
    world.finish_load()
    world.plan()
    world.add(adapter_request("late", "rare", 2))
    overtook = 0
    for number in range(3000):
        if number % 7 == 0:
            world.add(adapter_request(f"busy-{number}", "busy", 20))
        while world.plan() is not None:
            pass
        if world.in_flight:
            world.commit()
        world.finish_load()
        if world.received["late#0"].reason is not None:
            break
        overtook = sum(
            one.reason is not None for name, one in world.received.items() if name != "late#0"
        )
    assert world.received["late#0"].reason is not None, "it starved"
    assert overtook > 3, "requests of the resident adapter did not overtake"
    timings = world.received["late#0"].timings
    assert timings is not None and timings.adapter_s < 1.5
    world.drain()
    world.verify()


def world_with_resident(name: str, adapter_id: str, num_outputs: int) -> World:
    """A request runs with the one adapter that there is a place for."""
    world = World(Setup(max_loras=1, num_blocks=64))
    world.add(adapter_request(name, adapter_id, num_outputs))
    world.plan()
    world.finish_load()
    world.plan()
    return world


def test_no_one_is_stuck_when_a_drained_adapter_is_not_needed_any_more() -> None:
    world = world_with_resident("a", "busy", 12)
    world.add(adapter_request("b", "rare"))
    world.add(adapter_request("c", "busy"))
    world.advance(2.0)
    world.commit()
    world.plan()
    world.abort("b")
    world.drain()
    world.verify()


def draining_world() -> World:
    """`long` runs with `busy`, which drains for `rare`."""
    world = world_with_resident("long", "busy", 30)
    world.add(adapter_request("rare", "rare"))
    world.advance(2.0)
    world.commit()
    world.plan()
    return world


@pytest.mark.parametrize("is_loaded_again", [False, True])
def test_an_adapter_that_is_retired_while_it_drains_blocks_nothing(is_loaded_again: bool) -> None:
    world = draining_world()
    room = world.room
    assert room is not None and room.state("busy") is AdapterState.DRAINING
    world.add(adapter_request("late", "busy"))
    world.retire("busy")
    if is_loaded_again:
        world.add(adapter_request("again", "busy"))
    world.drain()
    world.verify()


def test_a_draining_ends_when_the_load_that_needs_it_has_gone() -> None:
    """Whatever becomes of the waiting sequence, the adapter is used again at once."""
    world = draining_world()
    room = world.room
    assert room is not None and not room.is_ready("busy")
    world.pause("rare")
    world.add(adapter_request("late", "busy"))
    world.commit()
    world.plan()
    assert room.is_ready("busy")
    world.resume("rare")
    world.drain()
    world.verify()


def test_a_request_takes_the_adapters_place_of_one_of_lower_priority() -> None:
    world = World(Setup(max_loras=1, num_blocks=64))
    world.add(adapter_request("low", "low", 30, priority=9))
    world.plan()
    world.finish_load()
    world.plan()
    world.add(adapter_request("high", "high", priority=-9))
    world.commit()
    world.plan()
    assert world.loading == ["high"] and world.scheduler.stats().num_preempted == 1
    world.finish_load()
    while world.received["high#0"].reason is None:
        world.plan()
        world.commit()
    assert world.received["low#0"].reason is None
    world.drain()
    world.verify()


def test_requests_of_equal_priority_do_not_take_the_place_from_each_other() -> None:
    world = world_with_resident("first", "one", 30)
    world.add(adapter_request("second", "two"))
    world.drain()
    world.verify()
    assert world.scheduler.stats().totals.num_preemptions == 0


def test_a_drained_adapter_stays_for_a_request_of_higher_priority() -> None:
    """The load that it drains for would be served after that request."""
    world = draining_world()
    world.add(adapter_request("urgent", "busy", priority=-9))
    world.commit()
    world.plan()
    assert "urgent#0" in {one.sequence_id for one in world.plans[-1].admitted}
    world.drain()
    world.verify()


@pytest.mark.parametrize("adapter_id", ["ab", "abcdef"])
def test_a_request_is_refused_if_its_adapter_has_no_room_next_to_pinned_ones(
    adapter_id: str,
) -> None:
    setup = Setup(max_loras=2, lora_bytes=8, pinned=frozenset({"pin"}), num_blocks=64)
    world = World(setup)
    assert world.add(adapter_request("p", "pin"))
    assert world.add(adapter_request("a", adapter_id)) == (len(adapter_id) <= 5)
    world.drain()
    world.verify()


def test_sequences_end_if_an_adapter_is_pinned_in_their_place() -> None:
    world = World(Setup(max_loras=2, lora_bytes=8, pinned=frozenset({"pin"}), num_blocks=64))
    world.add(adapter_request("first", "abcdef"))
    world.add(adapter_request("p", "pin"))
    world.drain()
    world.verify()
    assert "pinned" in world.received["first#0"].error
    assert world.received["p#0"].error == ""


def _zipf(num_adapters: int, skew: float) -> list[float]:
    return list(accumulate((rank + 1) ** -skew for rank in range(num_adapters)))


def _hits(num_adapters: int, max_loras: int, skew: float, seed: int = 1) -> tuple[float, float]:
    """The parts of arrivals that find their adapter in memory: ours, and that of an LRU cache."""
    rng, ends = Random(seed), _zipf(num_adapters, skew)
    one = residency(max_loras, num_adapters)
    lru: OrderedDict[str, None] = OrderedDict()
    count, hits, lru_hits = 6000, 0, 0
    for number in range(count):
        name, now = f"a{bisect_left(ends, rng.random() * ends[-1])}", number * 0.05
        one.count_use(name, now)
        if one.is_ready(name):
            hits += 1
        else:
            assert order(one, name, now=now)
        if name in lru:
            lru_hits += 1
            lru.move_to_end(name)
        else:
            lru[name] = None
            if len(lru) > max_loras:
                lru.popitem(last=False)
    return hits / count, lru_hits / count


@pytest.mark.parametrize("num_adapters", [17, 32, 64])
def test_hit_rates_have_no_cliff_and_beat_lru(num_adapters: int) -> None:
    """16 places. Just above it, an LRU cache that is used in turn hits nothing."""
    ours, lru = _hits(num_adapters, 16, 1.0)
    assert ours >= lru
    ours, _ = _hits(num_adapters, 16, 0.0)
    assert ours > 0.8 * 16 / num_adapters


def test_adapters_in_turn_still_hit() -> None:
    """17 adapters in turn for 16 places: an LRU cache would hit none."""
    one = residency(16, 17)
    hits = 0
    for number in range(1700):
        name = f"a{number % 17}"
        one.count_use(name, number * 0.05)
        if one.is_ready(name):
            hits += 1
        else:
            assert order(one, name, now=number * 0.05)
    assert hits > 0.5 * 1700
