"""Which replica gets a request: routers as a driver calls them, and what they remember."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from msgspec.structs import replace

from quickstep.core.admission import AdmissionState
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.resources.block_pool import ChainRoot, KVBlockPool
from quickstep.core.router import (
    ROUTERS,
    FewestRequests,
    PredictedFirst,
    PrefixAffinity,
    PrefixIndex,
    ReplicaState,
    ReplicaView,
    RoundRobin,
    RouteRequest,
    prompt_digests,
    route_request,
)
from quickstep.types import Request, SamplingParams

COSTS = LinearCostModel(Coefficients(step_s=0.01, token_s=0.001))


def full_request(first: int, num_tokens: int = 100, **fields) -> Request:
    sampling = SamplingParams(max_tokens=16)
    return Request("r", tuple(range(first, first + num_tokens)), sampling, **fields)


def request(first: int, num_tokens: int = 100, **fields) -> RouteRequest:
    return route_request(full_request(first, num_tokens, **fields), PredictedFirst())


def views(*loads: int | None) -> list[ReplicaView]:
    """Replicas with so many live requests, None for one that is down."""
    return [
        ReplicaView(state=ReplicaState.DOWN) if load is None else ReplicaView(num_live=load)
        for load in loads
    ]


def idle(num: int = 2, **fields) -> list[ReplicaView]:
    return [ReplicaView(costs=COSTS, **fields) for _ in range(num)]


def test_routers_choose_replicas_that_are_up() -> None:
    replicas = views(3, None, 1, 2)
    some, other = request(0), request(1000)
    robin = RoundRobin()
    assert [robin.choose(some, replicas, 0.0) for _ in range(4)] == [0, 2, 3, 0]
    assert FewestRequests().choose(some, replicas, 0.0) == 2
    prefix = PrefixAffinity()
    assert prefix.choose(some, replicas, 0.0) == 2
    assert prefix.choose(some, views(0, None, 4, 0), 0.0) == 2  # the same prefix, not far above
    assert prefix.choose(other, views(0, None, 4, 0), 0.0) == 0
    assert prefix.choose(some, views(0, None, 20, 0), 0.0) == 0
    assert prefix.choose(some, views(None, None, 1, 9), 0.0) == 2


@pytest.mark.parametrize("name", ROUTERS)
def test_a_draining_replica_gets_no_request(name: str) -> None:
    draining = ReplicaView(state=ReplicaState.DRAINING)
    router = ROUTERS[name]()
    assert {router.choose(request(n), [draining, *views(9)], 0.0) for n in range(20)} == {1}


def test_a_prefix_router_forgets_its_oldest_prefixes() -> None:
    prefix = PrefixAffinity(max_prefixes=6)
    assert prefix.choose(request(0), views(0, 1), 0.0) == 0
    assert prefix.choose(request(0), views(1, 0), 0.0) == 0
    prefix.choose(request(1000), views(1, 0), 0.0)
    assert prefix.choose(request(0), views(1, 0), 0.0) == 1


def test_a_request_goes_where_its_prompt_is_cached_unless_the_wait_is_longer() -> None:
    router = PredictedFirst()
    first = router.choose(request(0), idle(), 0.0)
    busy = idle()
    busy[first] = ReplicaView(costs=COSTS, num_live=5)
    assert router.choose(request(0), busy, 1.0) == first
    assert router.choose(request(1000), busy, 2.0) != first
    waiting = AdmissionState(num_waiting=3, num_free_slots=0, prompt_s=0.1, slot_s=0.1)
    busy[first] = ReplicaView(costs=COSTS, admission=waiting)
    assert router.choose(request(0), busy, 3.0) != first


def test_a_request_waits_for_the_prompts_that_were_sent_before() -> None:
    router = PredictedFirst()
    chosen = [router.choose(request(1000 * n), idle(3), 0.0) for n in range(6)]
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == [0, 1, 2]


def test_what_was_sent_since_the_last_report_has_its_slots() -> None:
    admission = AdmissionState(num_free_slots=2, prompt_s=0.1, slot_s=0.5)
    replicas = [
        ReplicaView(costs=COSTS, admission=admission, num_sent=2),
        ReplicaView(costs=COSTS, admission=admission, num_live=9),
    ]
    assert PredictedFirst().choose(request(0), replicas, 0.0) == 1


def test_a_silent_replica_and_one_that_would_load_the_adapter_are_later() -> None:
    router, some = PredictedFirst(), request(0, adapter_id="a")
    silent = [
        ReplicaView(costs=COSTS, reported_at_s=1.0),
        ReplicaView(costs=COSTS, reported_at_s=4.9, num_live=9),
    ]
    assert router.choose(some, silent, 5.0) == 1
    adapters = [
        ReplicaView(costs=COSTS, adapter_load_s=0.5),
        ReplicaView(costs=COSTS, adapter_load_s=0.5, num_live=9, adapters=frozenset({"a"})),
    ]
    assert router.choose(request(2000, adapter_id="a"), adapters, 9.0) == 1


def test_equal_replicas_share_requests_by_their_load_then_by_their_first_block() -> None:
    router = PredictedFirst()
    assert router.choose(request(0), [*idle(2, num_live=3), *idle(1, num_live=2)], 0.0) == 2
    chosen = {PredictedFirst().choose(request(1000 * n), idle(4), 0.0) for n in range(40)}
    assert chosen == {0, 1, 2, 3}


def test_a_cached_prompt_is_computed_again_if_decoding_there_is_slow() -> None:
    def chosen(num_live: int, max_tokens: int) -> bool:
        """Whether a request goes where its prompt is, next to so many live ones."""
        router = PredictedFirst()
        some = full_request(0)
        some = replace(some, sampling=replace(some.sampling, max_tokens=max_tokens))
        routed = route_request(some, router)
        first = router.choose(routed, idle(), 0.0)
        busy = idle()
        busy[first] = ReplicaView(costs=COSTS, num_live=num_live)
        return router.choose(routed, busy, 9.0) == first

    # the prompt takes 0.1 s, and each live request a millisecond of each step
    assert chosen(num_live=4, max_tokens=16)
    assert not chosen(num_live=8, max_tokens=16)
    assert chosen(num_live=60, max_tokens=1)
    assert not chosen(num_live=4, max_tokens=64)


@pytest.mark.parametrize("costs", [None, COSTS])
@pytest.mark.parametrize("name", ["predicted", "prefix"])
def test_requests_with_nothing_cached_are_shared(name: str, costs: LinearCostModel | None) -> None:
    """Also while nothing is reported of what was sent."""
    router, loads = ROUTERS[name](), [0] * 4
    for number in range(80):
        views = [ReplicaView(costs=costs, num_live=load) for load in loads]
        loads[router.choose(request(1000 * number), views, number / 1000)] += 1
    assert max(loads) <= 2 * min(loads)


def test_a_replica_that_has_started_again_has_nothing_cached() -> None:
    router = PredictedFirst()
    first = router.choose(request(0), idle(), 0.0)
    router.lost_cache(first)
    busy = idle()
    busy[first] = ReplicaView(costs=COSTS, num_live=1)
    assert router.choose(request(0), busy, 1.0) != first


def test_digests_are_those_of_the_block_pool() -> None:
    some = full_request(5, 100, adapter_id="adapter", cache_salt="salt")
    digests: list[bytes] = []
    root = ChainRoot("adapter", "salt")
    KVBlockPool(8, 16).extend_digests(digests, root, some.prompt_token_ids, 6)
    assert prompt_digests(some, 16) == tuple(digests)
    assert prompt_digests(full_request(5, 15), 16) == ()
    assert route_request(some, RoundRobin()).digests == ()


@pytest.mark.parametrize("seed", range(20))
def test_a_prefix_index_counts_as_a_set_of_chains_does(seed: int) -> None:
    rng, index = Random(seed), PrefixIndex()
    chains = [[bytes([chain, place]) for place in range(5)] for chain in range(4)]
    held: dict[int, set[bytes]] = {replica: set() for replica in range(3)}
    for _ in range(60):
        replica, chain = rng.randrange(3), rng.choice(chains)[: rng.randint(1, 5)]
        match rng.randrange(5):
            case 0:
                index.remove(replica, chain[-1:])
                held[replica].difference_update(chain[-1:])
            case 1:
                index.forget(replica)
                held[replica].clear()
            case _:
                index.add(replica, chain)
                held[replica].update(chain)
        for known in chains:
            counts = [
                next((n for n, digest in enumerate(known) if digest not in held[one]), 5)
                for one in range(3)
            ]
            assert index.num_blocks(known, range(3)) == counts


def test_a_prefix_index_keeps_the_beginnings_of_the_chains_used_last() -> None:
    index = PrefixIndex(max_digests=6)
    first, second = [b"a0", b"a1", b"a2"], [b"b0", b"b1", b"b2"]
    index.add(0, first)
    index.add(0, second)
    assert index.num_blocks(first, range(1)) == [3]  # which uses it
    index.add(0, [b"c0"])
    assert len(index) == 6
    assert (index.num_blocks(first, range(1)), index.num_blocks(second, range(1))) == ([3], [2])


def test_a_prefix_index_forgets_what_a_replica_cannot_hold() -> None:
    index = PrefixIndex()
    first, second = [b"a0", b"a1", b"a2"], [b"b0", b"b1", b"b2"]
    for replica, num_blocks in ((0, 4), (1, None)):
        index.add(replica, first, num_blocks)
        index.add(replica, second, num_blocks)
    assert index.num_blocks(first, range(2)) == [1, 3]
    assert index.num_blocks(second, range(2)) == [3, 3]
    index.add(0, first, 4)
    assert index.num_blocks(second, range(2)) == [1, 3]
    index.forget(0)
    index.add(0, second, 4)
    assert index.num_blocks(first, range(2)) == [0, 3]
    assert index.num_blocks(second, range(2)) == [3, 3]


@pytest.mark.parametrize("seed", range(3))
def test_of_many_replicas_the_holders_of_the_prompt_and_some_others_are_scored(seed: int) -> None:
    rng, router = Random(seed), PredictedFirst()
    costs = LinearCostModel(Coefficients(step_s=0.001, token_s=0.001))
    views = [ReplicaView(costs=costs)] * 500
    for place in rng.sample(range(500), 100):
        views[place] = replace(views[place], state=ReplicaState.DOWN)
    chosen = Counter[int]()
    for number in range(2000):
        digests = tuple(f"{number}-{block}".encode() for block in range(3))
        request = RouteRequest(num_prompt_tokens=50, digests=digests, block_size=16)
        place = router.choose(request, views, 0.001 * number)
        assert views[place].is_up
        chosen[place] += 1
        if number % 10 == 0:  # a prefix of 48 tokens is worth more than any choice
            assert router.choose(request, views, 0.001 * number + 1000.0) == place
    assert len(chosen) > 300  # none is left out
    router.lost_cache(place)
    assert place not in router.prefixes.holders_of_longest(digests, 9)


@pytest.mark.parametrize("name", ["predicted", "prefix"])
def test_a_restored_prefix_is_known_and_no_replica_is_busy_with_it(name: str) -> None:
    """A restore is a choice for a request of one token with the digests of all."""
    for first in range(0, 3200, 100):
        router = ROUTERS[name]()
        loads = [replace(view, num_live=live) for view, live in zip(idle(), (2, 0), strict=True)]
        restored = replace(request(first), num_prompt_tokens=1)
        assert router.choose(restored, loads, 0.0) == 1
        assert router.choose(request(first), idle(), 0.001) == 1
