"""Prefill and decode on different engines: nothing is lost, blocks are counted at both ends, and
the server's rules decide which requests are divided.
"""

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
        max_model_len=num_blocks * BLOCK_SIZE // 2,
        policy=PolicyName.MIXED,
        transfers_kv=True,
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


def busy(num: int = 1, num_outputs: int = 60) -> list[Arrival]:
    """Requests that idle decode engines compute completely, which keeps them busy."""
    return [Arrival(0.0, request(f"busy{n}", 3, num_outputs, 9000 + 10 * n)) for n in range(num)]


def check(of: ReplicaRun) -> None:
    """Every block has the references of the sequences and transfers that hold it, and every live
    sequence is at one place.
    """
    handovers = of.handovers
    assert handovers is not None
    places: Counter[str] = Counter()
    for replica in of.replicas:
        planner = replica.engine.scheduler
        planner.check()
        places.update(sequence.sequence_id for sequence in (*planner._batch, *planner._waiting))
    ways = list(of.on_the_way())
    assert places == Counter(
        f"{name}#{index}"
        for name, live in of.live.items()
        for index in range(live.arrival.request.sampling.n)
        if index not in live.ends and name not in ways
    )


def test_an_idle_decode_engine_computes_the_prompt_itself() -> None:
    outcome = run([Arrival(0.0, request("a", 30, 5))], check=check).run()
    (ending,) = outcome.endings
    assert (ending.request_id, ending.reason) == ("a", FinishReason.MAX_TOKENS)
    assert outcome.handovers is not None
    assert (outcome.handovers.count, outcome.handovers.num_bytes) == (0, 0)
    assert outcome.handovers.prefill_busy == 0.0


def test_a_prompt_is_computed_elsewhere_if_streams_would_wait_for_it() -> None:
    arrivals = [*busy(), Arrival(0.05, request("a", 30, 5))]
    outcome = run(arrivals, check=check).run()
    timings = {ending.request_id: ending.timings for ending in outcome.endings}["a"]
    assert (timings.num_prompt_tokens, timings.num_output_tokens) == (30, 5)
    assert timings.num_resumed_tokens == 0  # for the client it is one sequence
    assert outcome.handovers is not None
    assert (outcome.handovers.count, outcome.handovers.num_refused) == (1, 0)
    # seven full blocks were sent: the other two tokens and the first output are computed there
    assert outcome.handovers.num_bytes == 28 * LINK.kv_bytes_per_token
    assert outcome.handovers.mean_s == pytest.approx(1e-4 + 28e5 / 1e9)
    prompts = [record.num_prefill_tokens for record in outcome.records if record.num_prefill_tokens]
    assert prompts == [3, 30, 3]
    total_s = timings.finished_s - timings.arrival_s
    assert timings.queue_s + timings.prefill_s + timings.decode_s == pytest.approx(total_s)


def test_a_prefix_that_is_cached_at_the_decode_engine_is_not_sent_again() -> None:
    arrivals = [
        *busy(num_outputs=150),
        Arrival(0.05, request("first", 29, 3)),
        Arrival(0.15, request("longer", 61, 3)),
    ]
    outcome = run(arrivals, num_blocks=100, check=check).run()
    assert outcome.handovers is not None
    assert outcome.handovers.count == 2
    assert outcome.handovers.num_bytes == (28 + 60 - 28) * LINK.kv_bytes_per_token


def test_a_slow_link_keeps_requests_undivided() -> None:
    arrivals = [*busy(), Arrival(0.05, request("a", 30, 4))]
    slow = run(arrivals, link=KVLink(1e6, 0.0, 100_000)).run()
    assert slow.handovers is not None
    assert slow.handovers.count == 0


def test_blocks_that_do_not_fit_are_computed_again() -> None:
    arrivals = [*busy(3, 30)]
    arrivals += [Arrival(0.05 + 0.001 * n, request(str(n), 30, 10, 100 * n)) for n in range(6)]
    outcome = run(arrivals, num_blocks=24, check=check).run()
    assert len(outcome.endings) == 9
    assert outcome.handovers is not None
    assert outcome.handovers.num_refused
    assert all(ending.timings.num_output_tokens in (10, 30) for ending in outcome.endings)


def test_prompts_that_no_decode_engine_holds_are_refused() -> None:
    large = new_engine(80, 2)
    arrivals = [*busy(1, 5), Arrival(0.005, request("long", 30, 4))]
    arrivals.append(Arrival(0.005, request("short", 8, 4)))
    outcome = run(arrivals, 8, 2, check=check, new_prefill=large).run()
    assert [name for name, _ in outcome.refused] == ["long"]
    assert {ending.request_id for ending in outcome.endings} == {"busy0", "short"}


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


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 150, 50)])
def test_every_sequence_ends_once_and_no_block_is_lost(seeds: range) -> None:
    num_handovers = 0
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
        num_handovers += handovers.stats(1.0).count
        assert not (one.live or handovers.prefilling or handovers.prefill_timings), seed
        assert not any(view.num_live for view in one.views), seed
        for replica in one.replicas:
            assert not replica.held, seed
            pool = replica.engine.scheduler._pool
            pool.check([])
            assert pool.num_free == num_blocks, seed
    assert num_handovers > len(seeds)


def test_engines_of_both_phases_compute_what_one_engine_does() -> None:
    """Apart from the tokens that are computed again in the last block of a prompt."""
    rng = Random(5)
    arrivals = busy(num_outputs=60)
    arrivals += [
        Arrival(0.02 * n, request(str(n), rng.randint(15, 30), rng.randint(2, 9), 1000 * n))
        for n in range(1, 20)
    ]
    mixed = simulate(arrivals, scheduler(200, 8), costs())
    apart = run(arrivals, 200, 8).run()
    assert apart.handovers is not None
    num_divided = apart.handovers.count
    assert num_divided > 5 and not apart.handovers.num_refused

    def tokens(of: Simulation) -> tuple[int, int]:
        return (
            sum(record.num_prefill_tokens for record in of.records),
            sum(record.num_decode_tokens for record in of.records),
        )

    (prefill, decode), (prefill_apart, decode_apart) = tokens(mixed), tokens(apart)
    # the row of a divided request's first output is prefill at the decode engine
    assert decode_apart == decode - num_divided
    again = prefill_apart - prefill - num_divided
    assert 0 < again < BLOCK_SIZE * num_divided
