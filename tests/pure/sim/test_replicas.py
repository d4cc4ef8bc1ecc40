"""Replicas with a router and faults: every request ends exactly once, and any seed replays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random

import pytest

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.router import ROUTERS, FewestRequests, RoundRobin, Router
from quickstep.sim.engine import SimulatedEngine, VirtualClock
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival, Ending, Simulation
from quickstep.sim.replicas.faults import (
    CancelStorm,
    ClockJump,
    Crash,
    Fault,
    LinkFault,
    SlowDown,
    random_faults,
)
from quickstep.sim.replicas.replica import NewEngine, ReplicaOptions, ReplicaSpec
from quickstep.sim.replicas.run import ReplicaRun
from quickstep.sim.simulate import simulate
from quickstep.types import FinishReason, Request, SamplingParams

COSTS = Coefficients(step_s=0.002, token_s=0.0001, row_s=0.0002, kv_token_s=0.0, pair_s=0.0)
OPTIONS = ReplicaOptions(link_s=0.001, resend_s=0.05, detect_s=0.3)


def new_scheduler(policy: PolicyName = PolicyName.MIXED, num_blocks: int = 256) -> GroupedScheduler:
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512, policy=policy
    )
    pool = KVBlockPool(num_blocks, 16)
    return GroupedScheduler(config, pool, make_policy(config), LinearCostModel(COSTS))


def new_engine(clock: VirtualClock, **scheduler) -> SimulatedEngine:
    return SimulatedEngine(clock, new_scheduler(**scheduler), LinearCostModel(COSTS))


def specs(make_engine: NewEngine, count: int = 2) -> list[ReplicaSpec]:
    return [ReplicaSpec(make_engine)] * count


def request(name: str, prompt_len: int = 32, max_tokens: int = 16, **fields) -> Request:
    number = sum(map(ord, name))
    prompt = tuple((number + place) % 97 for place in range(prompt_len))
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=fields.pop("n", 1))
    return Request(name, prompt, sampling, **fields)


def run(
    arrivals: Iterable[Arrival],
    faults: Sequence[Fault] = (),
    num_replicas: int = 2,
    router: Router | None = None,
    seed: int = 0,
    **scheduler,
) -> Simulation:
    simulation = ReplicaRun(
        arrivals,
        specs(lambda clock: new_engine(clock, **scheduler), num_replicas),
        router or RoundRobin(),
        Random(seed),
        faults,
        OPTIONS,
        check=check,
    )
    return simulation.run()


def check(simulation: ReplicaRun) -> None:
    """Each live request is at the router, on its way, or at one replica; nothing else is held."""
    on_the_way = Counter(simulation.on_the_way())
    outcome = simulation.outcome
    ended = {ending.request_id for ending in outcome.endings} | {
        name for name, _ in outcome.refused
    }
    assert not ended & set(simulation.live)
    for replica in simulation.replicas:
        replica.engine.scheduler.check()
        assert replica.is_up or not replica.held
        assert bool(replica.held) <= replica.engine.scheduler.has_work()
    sent_to = Counter(live.replica for live in simulation.live.values())
    assert [view.num_live for view in simulation.views] == [
        sent_to[place] for place in range(len(simulation.replicas))
    ]
    for name, live in simulation.live.items():
        holders = [one for one in simulation.replicas if name in one.held]
        assert len(holders) <= 1
        if live.replica is None:
            assert not holders
        elif simulation.replicas[live.replica].generation == live.generation:
            assert holders == [simulation.replicas[live.replica]] or on_the_way[name]


def arrivals_of(rng: Random, count: int, until_s: float) -> list[Arrival]:
    return [
        Arrival(
            rng.uniform(0.0, until_s),
            request(
                f"r{number}",
                rng.randint(1, 120),
                rng.randint(1, 16),
                n=rng.choice((1, 1, 1, 3)),
                timeout_s=rng.choice((None, None, 0.2)),
                priority=rng.choice((0, 0, -1)),
            ),
            cancel_after_s=rng.choice((None, None, None, rng.uniform(0.0, 0.2))),
        )
        for number in range(count)
    ]


def ends_of(simulation: Simulation) -> Counter[tuple[str, int]]:
    return Counter((ending.request_id, ending.index) for ending in simulation.endings)


@pytest.mark.parametrize("block", range(8))
def test_every_request_ends_once_whatever_fails(block: int) -> None:
    """Conservation after every event, and liveness, for 100 seeds each."""
    for seed in range(100 * block, 100 * block + 100):
        rng = Random(seed)
        arrivals = arrivals_of(rng, rng.randint(1, 8), 0.5)
        num_replicas = rng.randint(1, 3)
        faults = random_faults(rng, num_replicas, 0.8, rng.randint(0, 6))
        router = ROUTERS[rng.choice(sorted(ROUTERS))]()
        policy = rng.choice((PolicyName.MIXED, PolicyName.FAIR, PolicyName.DEADLINE))
        result = run(arrivals, faults, num_replicas, router, seed, policy=policy, num_blocks=32)
        expected = Counter(
            (arrival.request.request_id, index)
            for arrival in arrivals
            for index in range(arrival.request.sampling.n)
        )
        assert ends_of(result) == expected, f"seed {seed}"
        assert not result.refused


@pytest.mark.parametrize("seed", range(5))
def test_any_seed_replays_exactly(seed: int) -> None:
    outcomes = []
    for _ in range(2):
        rng = Random(seed)
        arrivals = arrivals_of(rng, 30, 2.0)
        faults = random_faults(rng, 3, 3.0, 8)
        outcomes.append(run(arrivals, faults, 3, FewestRequests(), seed))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0].records) > 20


@pytest.mark.parametrize("seed", range(30))
def test_grouped_rows_give_what_listed_rows_give(seed: int) -> None:
    """Also if their requests are cancelled or expire while a step is in flight."""

    def outcome(step_by_step: bool) -> Simulation:
        rng = Random(seed)
        arrivals = arrivals_of(rng, 30, 1.0)
        faults = random_faults(rng, 2, 2.0, rng.randint(0, 6))
        policy = rng.choice((PolicyName.MIXED, PolicyName.DEADLINE, PolicyName.PREFILL_FIRST))

        def engine(clock: VirtualClock) -> SimulatedEngine:
            scheduler, costs = new_scheduler(policy, num_blocks=24), LinearCostModel(COSTS)
            return SimulatedEngine(clock, scheduler, costs, step_by_step=step_by_step)

        router = FewestRequests()
        return ReplicaRun(
            arrivals, specs(engine), router, rng, faults, OPTIONS, check=None if seed % 2 else check
        ).run()

    grouped, listed = outcome(step_by_step=False), outcome(step_by_step=True)
    assert grouped.records == listed.records
    assert grouped == listed


def test_one_replica_without_faults_is_the_simulation_of_one_engine() -> None:
    arrivals = [Arrival(0.01 * place, request(f"r{place}")) for place in range(40)]
    one = simulate(arrivals, new_scheduler(), LinearCostModel(COSTS))
    options = ReplicaOptions(link_s=0.0)
    replicas = ReplicaRun(
        arrivals, specs(new_engine, 1), RoundRobin(), Random(0), options=options
    ).run()
    assert [(end.request_id, end.timings.finished_s) for end in replicas.endings] == [
        (end.request_id, pytest.approx(end.timings.finished_s)) for end in one.endings
    ]
    assert len(replicas.records) == len(one.records)


def test_requests_of_a_crashed_replica_are_served_by_the_other_one() -> None:
    arrivals = [Arrival(0.0, request(f"r{place}", 32, 100)) for place in range(8)]
    result = run(arrivals, [Crash(0.1, replica=0, down_s=60.0)])
    assert (result.num_resent, len(result.endings)) == (4, 8)
    assert result.lost_s > 0.05
    assert result.finished_s < 5.0
    resent = [ending for ending in result.endings if (ending.timings.first_token_s or 0.0) > 0.4]
    assert len(resent) == 4  # after they were detected to be lost


def test_requests_wait_at_the_router_while_no_replica_is_up() -> None:
    faults = [Crash(0.1, 0, 5.0), Crash(0.1, 1, 7.0)]
    result = run([Arrival(1.0, request("late"))], faults)
    (ending,) = result.endings
    assert 5.1 < (ending.timings.first_token_s or 0.0) < 5.2
    assert ending.timings.queue_s == pytest.approx(4.1, abs=0.01)


def test_a_slow_replica_takes_longer_and_recovers() -> None:
    def seconds(faults: Sequence[Fault], at_s: float) -> float:
        (ending,) = run([Arrival(at_s, request("r", 1, 100))], faults, 1).endings
        return ending.timings.finished_s - at_s

    faults = [SlowDown(1.0, 0, for_s=5.0, factor=10.0)]
    assert seconds(faults, 1.5) == pytest.approx(10 * seconds((), 1.5), rel=0.02)
    assert seconds(faults, 7.0) == pytest.approx(seconds((), 7.0))


def test_late_and_lost_messages_arrive_once_and_in_order() -> None:
    arrivals = [Arrival(0.01 * place, request(f"r{place}", 8, 1)) for place in range(50)]
    late = run(arrivals[1:], [LinkFault(0.0, 0, 10.0, delay_s=1.0)], 1)
    assert min(ending.timings.finished_s for ending in late.endings) > 2.0
    lossy = run(arrivals, [LinkFault(0.0, 0, 10.0, loss=0.5)], 1)
    assert len(lossy.endings) == 50
    assert lossy.finished_s > 1.2 * run(arrivals, (), 1).finished_s
    names = [ending.request_id for ending in lossy.endings]
    assert names == sorted(names, key=lambda name: int(name[1:]))


def test_a_clock_that_jumps_ends_what_its_deadline_passes() -> None:
    arrivals = [Arrival(0.0, request("short", 8, 400, timeout_s=1.5)), Arrival(0.0, request("b"))]
    result = run(arrivals, [ClockJump(0.5, 0, seconds=2.0)], 1)
    reasons = {ending.request_id: ending.reason for ending in result.endings}
    assert reasons == {"short": FinishReason.DEADLINE, "b": FinishReason.MAX_TOKENS}


def test_a_storm_of_cancellations_frees_the_replicas() -> None:
    arrivals = [Arrival(0.0, request(f"r{place}", 64, 400)) for place in range(40)]
    later = Arrival(0.6, request("later"))
    result = run([*arrivals, later], [CancelStorm(0.5, part=1.0)])
    aborted = [one for one in result.endings if one.reason is FinishReason.ABORTED]
    assert len(aborted) == 40
    (ending,) = [one for one in result.endings if one.request_id == "later"]
    assert ending.timings.queue_s < 0.05


def test_what_no_replica_can_serve_is_refused() -> None:
    result = run([Arrival(0.0, request("long", 600))])
    ((name, problem),) = result.refused
    assert name == "long"
    assert "512" in problem


def test_clients_follow_up_after_their_answers() -> None:
    def follow(ending: Ending) -> list[Arrival]:
        turn = int(ending.request_id) + 1
        return [Arrival(ending.timings.finished_s + 1.0, request(str(turn)))] if turn < 5 else []

    simulation = ReplicaRun(
        [Arrival(0.0, request("0"))],
        specs(new_engine),
        FewestRequests(),
        Random(0),
        [Crash(2.0, 0, 1.0)],
        OPTIONS,
        follow=follow,
    )
    endings = simulation.run().endings
    assert [one.request_id for one in endings] == list("01234")


def test_steps_that_nothing_outside_depends_on_are_computed_in_one_go() -> None:
    arrivals = [Arrival(0.0, request("long", 8, 400)), Arrival(0.1, request("short", 8, 300))]
    events: list[float] = []
    simulation = ReplicaRun(
        arrivals,
        specs(new_engine),
        RoundRobin(),
        Random(0),
        check=lambda simulation: events.append(simulation.now),
    )
    assert len(simulation.run().records) > 600
    assert len(events) < 60
