"""Prefill and decode on different engines: nothing is lost, blocks are counted at both ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

import pytest

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.router import FewestRequests
from quickstep.sim.engine import SimulatedEngine, VirtualClock
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival, Simulation
from quickstep.sim.replicas.handovers import KVLink
from quickstep.sim.replicas.replica import NewEngine, ReplicaOptions, ReplicaSpec, Role
from quickstep.sim.replicas.run import ReplicaRun
from quickstep.sim.simulate import simulate
from quickstep.types import FinishReason, Request, SamplingParams

BLOCK_SIZE = 4
LINK = KVLink(bytes_per_s=1e9, latency_s=1e-4, kv_bytes_per_token=100_000)
COSTS = Coefficients(step_s=2e-3, token_s=1e-4, row_s=5e-5, kv_token_s=1e-6)


def costs() -> LinearCostModel:
    return LinearCostModel(COSTS)


def scheduler(num_blocks: int, max_num_seqs: int) -> GroupedScheduler:
    pool = KVBlockPool(num_blocks, BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=32,
        max_model_len=num_blocks * BLOCK_SIZE,
        policy=PolicyName.MIXED,
    )
    return GroupedScheduler(config, pool, make_policy(config), costs())


def new_engine(num_blocks: int, max_num_seqs: int) -> NewEngine:
    def new(clock: VirtualClock) -> SimulatedEngine:
        return SimulatedEngine(clock, scheduler(num_blocks, max_num_seqs), costs())

    return new


def request(name: str, num_inputs: int, num_outputs: int, first: int = 1) -> Request:
    tokens = tuple(range(first, first + num_inputs))
    return Request(name, tokens, SamplingParams(max_tokens=num_outputs, ignore_eos=True))


def run(
    arrivals: Iterable[Arrival],
    num_blocks: int = 40,
    max_num_seqs: int = 4,
    counts: tuple[int, int] = (1, 1),
    link: KVLink = LINK,
    check: Callable[[ReplicaRun], None] | None = None,
    new_prefill: NewEngine | None = None,
) -> ReplicaRun:
    new = new_engine(num_blocks, max_num_seqs)
    prefill, decode = ReplicaSpec(new_prefill or new, Role.PREFILL), ReplicaSpec(new, Role.DECODE)
    return ReplicaRun(
        arrivals,
        [prefill] * counts[0] + [decode] * counts[1],
        FewestRequests(),
        Random(0),
        options=ReplicaOptions(link_s=0.0),
        kv_link=link,
        check=check,
    )


def check(of: ReplicaRun) -> None:
    """Every block has the references of the sequences and transfers that hold it, and every live
    sequence is at one place.
    """
    handovers = of.handovers
    assert handovers is not None
    places: Counter[str] = Counter()
    for end in (*handovers.prefill, *handovers.decode):
        planner = end.replica.engine.scheduler
        resident = [sequence.residency.blocks for sequence in planner._batch]
        end.pool.check([*resident, *end.tables.values()])
        places.update(
            sequence.sequence_id if end in handovers.prefill else sequence.request.request_id
            for sequence in (*planner._batch, *planner._waiting)
        )
    for end in handovers.decode:
        assert end.num_live >= len(end.replica.engine.scheduler._requests)
    places.update(handover.name for handover in handovers.waiting)
    on_the_way = {one.name for one in handovers.live.values() if one.target and not one.has_arrived}
    assert on_the_way <= {name for end in handovers.prefill for name in end.tables}
    cancelled = {one.name for one in handovers.live.values() if one.is_cancelled}
    places.update(on_the_way - cancelled)
    assert places == Counter(
        f"{name}#{index}"
        for name, live in of.live.items()
        for index in range(live.arrival.request.sampling.n)
        if index not in live.ends
    )


def test_a_request_is_prefilled_then_decoded_elsewhere() -> None:
    outcome = run([Arrival(0.0, request("a", 10, 5))], check=check).run()
    (ending,) = outcome.endings
    timings = ending.timings
    assert (ending.request_id, ending.reason) == ("a", FinishReason.MAX_TOKENS)
    assert (timings.num_prompt_tokens, timings.num_output_tokens) == (10, 5)
    prefill, first, *decodes = outcome.records
    assert (prefill.num_prefill_tokens, prefill.num_decode_rows) == (10, 0)
    assert timings.first_token_s == prefill.committed_at_s
    # two full blocks were handed over: the other two tokens and the first output are computed
    assert first.num_prefill_tokens == 3
    assert [decode.num_decode_rows for decode in decodes] == [1, 1, 1]
    assert outcome.handovers is not None
    assert outcome.handovers.num_bytes == 8 * LINK.kv_bytes_per_token
    assert outcome.handovers.mean_s == pytest.approx(1e-4 + 8e5 / 1e9)
    handover_s = first.planned_at_s - prefill.committed_at_s
    assert handover_s == pytest.approx(outcome.handovers.mean_s)


def test_a_single_output_needs_no_decode_engine_and_a_cached_prefix_is_not_sent_again() -> None:
    arrivals = [
        Arrival(0.0, request("one", 12, 1)),
        Arrival(1.0, request("first", 12, 3)),
        Arrival(2.0, request("again", 12, 3)),
    ]
    outcome = run(arrivals, check=check).run()
    assert [ending.request_id for ending in outcome.endings] == ["one", "first", "again"]
    assert outcome.handovers is not None
    assert outcome.handovers.count == 2
    assert outcome.handovers.num_bytes == 12 * LINK.kv_bytes_per_token
    assert outcome.endings[2].timings.num_cached_tokens == 8


def test_a_slow_link_delays_the_second_token_only() -> None:
    arrivals = [Arrival(0.0, request(str(n), 16, 4, 100 * n)) for n in range(3)]
    fast = run(arrivals).run()
    slow = run(arrivals, link=KVLink(1e6, 0.0, 100_000)).run()
    assert [ending.timings.first_token_s for ending in slow.endings] == pytest.approx(
        [ending.timings.first_token_s for ending in fast.endings]
    )
    # 1.6 MB each through one link of 1 MB/s, one after the other
    assert slow.finished_s > 3 * 1.6 > fast.finished_s


def test_a_prompt_waits_at_its_prefill_engine_until_a_decode_engine_has_room() -> None:
    arrivals = [Arrival(0.0, request(str(n), 20, 40, 100 * n)) for n in range(8)]
    outcome = run(arrivals, num_blocks=24, check=check).run()
    assert len(outcome.endings) == 8
    assert all(ending.timings.num_output_tokens == 40 for ending in outcome.endings)
    assert outcome.handovers is not None
    assert outcome.handovers.mean_s > 0.01


def test_prompts_that_no_decode_engine_holds_are_refused() -> None:
    large = new_engine(40, 2)
    arrivals = [Arrival(0.0, request("long", 30, 4)), Arrival(0.0, request("short", 8, 4))]
    outcome = run(arrivals, 4, 2, check=check, new_prefill=large).run()
    assert [name for name, _ in outcome.refused] == ["long"]
    assert [ending.request_id for ending in outcome.endings] == ["short"]


def random_arrivals(rng: Random) -> list[Arrival]:
    arrivals = []
    for number in range(rng.randint(1, 24)):
        shared = tuple(range(1, 1 + rng.choice((0, 4, 9))))
        new = tuple(range(1000 * (number + 1), 1000 * (number + 1) + rng.randint(1, 30)))
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 30), ignore_eos=True, n=rng.choice((1, 1, 1, 2))
        )
        one = Request(str(number), shared + new, sampling, priority=rng.randint(0, 2))
        cancel_after_s = rng.uniform(0.0, 0.2) if rng.random() < 0.25 else None
        arrivals.append(Arrival(rng.uniform(0.0, 0.3), one, cancel_after_s))
    return arrivals


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 300, 50)])
def test_every_sequence_ends_once_and_no_block_is_lost(seeds: range) -> None:
    for seed in seeds:
        rng = Random(seed)
        arrivals = random_arrivals(rng)
        link = KVLink(10 ** rng.uniform(6, 10), rng.choice((0.0, 1e-3)), 10_000)
        counts = rng.randint(1, 3), rng.randint(1, 3)
        num_blocks, max_num_seqs = rng.randint(20, 60), rng.randint(2, 5)
        one = run(arrivals, num_blocks, max_num_seqs, counts, link, check)
        outcome = one.run()
        ended = Counter((each.request_id, each.index) for each in outcome.endings)
        refused = {name for name, _ in outcome.refused}
        expected = {
            (arrival.request.request_id, index)
            for arrival in arrivals
            for index in range(arrival.request.sampling.n)
            if arrival.request.request_id not in refused
        }
        assert ended == Counter(expected), seed
        handovers = one.handovers
        assert handovers is not None
        assert not (one.live or handovers.live or handovers.waiting or handovers.prefilling), seed
        assert not any(view.num_live for view in one.views), seed
        for end in (*handovers.prefill, *handovers.decode):
            assert end.num_live == 0, seed
            assert not end.replica.held, seed
            end.pool.check([])
            assert end.pool.num_free == num_blocks, seed


def test_one_engine_of_each_phase_computes_what_one_engine_does() -> None:
    """Apart from the tokens that are computed again in the last block of a prompt."""
    rng = Random(5)
    arrivals = [
        Arrival(0.1 * n, request(str(n), rng.randint(5, 30), rng.randint(2, 20), 1000 * n))
        for n in range(20)
    ]
    mixed: Simulation = simulate(arrivals, scheduler(60, 4), costs())
    apart = run(arrivals, 60).run()

    def tokens(of: Simulation) -> tuple[int, int]:
        return (
            sum(record.num_prefill_tokens for record in of.records),
            sum(record.num_decode_tokens for record in of.records),
        )

    again = sum(len(arrival.request.prompt_token_ids) % BLOCK_SIZE for arrival in arrivals)
    prefill, decode = tokens(mixed)
    # the row of the first output is prefill at the decode engine
    assert tokens(apart) == (prefill + again + 20, decode - 20)
