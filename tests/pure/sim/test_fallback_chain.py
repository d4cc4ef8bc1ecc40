"""Fallback chains in the simulator: the server's decisions on a virtual clock."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace
from simulated_runs import COSTS, ask

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.fallback import OtherModel, Route, ShorterOutput, Upstream
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.sim.engine import SimulatedEngine, VirtualClock
from quickstep.sim.fallback import FallbackRun, UpstreamTimes
from quickstep.sim.outcome import Arrival, Ending, Simulation
from quickstep.sim.simulate import simulate
from quickstep.types import FinishReason

UPSTREAM = Upstream("https://api.example.com/v1", "far")
NO_CHAIN = Route("large", (OtherModel("large"),))  # leads nowhere: its model has refused


def scheduler_of(max_waiting: int | None, max_model_len: int = 512) -> Scheduler:
    config = SchedulerConfig(2, 512, max_model_len, max_waiting=max_waiting)
    return Scheduler(config, KVBlockPool(256, 16), make_policy(config), LinearCostModel(COSTS))


def arrivals_of(
    count: int, every_s: float = 0.02, ttft_deadline_s: float | None = None
) -> list[Arrival]:
    rng = random.Random(count)
    arrivals = []
    for number in range(count):
        request = ask(f"r{number}", rng.randrange(4, 90), rng.randrange(1, 30))
        request = replace(request, ttft_deadline_s=ttft_deadline_s)
        arrivals.append(Arrival(every_s * number, request))
    return arrivals


def run(
    arrivals: list[Arrival],
    *steps: object,
    max_waiting: int | None = 2,
    small_waiting: int | None = None,
    max_model_len: int = 512,
) -> Simulation:
    clock = VirtualClock()
    route = Route("large", tuple(steps)) if steps else NO_CHAIN  # type: ignore[arg-type]
    engines = {
        "large": SimulatedEngine(
            clock, scheduler_of(max_waiting, max_model_len), LinearCostModel(COSTS)
        ),
        "small": SimulatedEngine(clock, scheduler_of(small_waiting), LinearCostModel(COSTS)),
    }
    return FallbackRun(arrivals, clock, engines, route, UpstreamTimes(0.25, 0.01)).run()


def ends(outcome: Simulation) -> dict[str, Ending]:
    """By request; each has one."""
    found = {ending.request_id: ending for ending in outcome.endings}
    assert len(found) == len(outcome.endings)
    assert not found.keys() & dict(outcome.refused).keys()
    return found


def test_without_refusals_a_chain_changes_nothing() -> None:
    arrivals = arrivals_of(40, every_s=0.3)
    expected = simulate(arrivals, scheduler_of(None), LinearCostModel(COSTS), step_by_step=True)
    chained = run(arrivals, OtherModel("small"), UPSTREAM, max_waiting=None)
    assert chained.fallbacks == {}
    times = {ending.request_id: ending.timings.finished_s for ending in expected.endings}
    found = {name: ending.timings.finished_s for name, ending in ends(chained).items()}
    assert found == pytest.approx(times)


def test_a_full_queue_leads_to_the_other_model_and_then_to_the_upstream() -> None:
    arrivals = arrivals_of(60)
    refused = run(arrivals)
    assert refused.refused
    served = run(arrivals, OtherModel("small"), UPSTREAM, small_waiting=2)
    assert not served.refused
    assert len(ends(served)) == 60
    assert served.fallbacks is not None
    assert set(served.fallbacks) == {
        ("model=small", "overload"),
        ("upstream=api.example.com/far", "overload"),
    }
    num_far = served.fallbacks["upstream=api.example.com/far", "overload"]
    far = [ending for ending in served.endings if not ending.timings.device_s]
    assert len(far) == num_far > 0
    for ending in far:
        timings = ending.timings
        assert timings.first_token_s == pytest.approx(timings.arrival_s + 0.25)
        answer_s = 0.25 + 0.01 * (timings.num_output_tokens - 1)
        assert timings.finished_s == pytest.approx(timings.arrival_s + answer_s)


def test_the_end_of_a_chain_refuses() -> None:
    outcome = run(arrivals_of(60), OtherModel("small"), small_waiting=2)
    assert outcome.fallbacks is not None
    assert outcome.fallbacks["refuse=503", "overload"] == len(outcome.refused) > 0
    assert len(ends(outcome)) + len(outcome.refused) == 60


def test_one_that_is_shed_in_the_queue_gets_the_next_step_with_its_own_arrival() -> None:
    arrivals = arrivals_of(60, every_s=0.05, ttft_deadline_s=0.6)
    outcome = run(arrivals, OtherModel("small"), max_waiting=None)
    assert outcome.fallbacks is not None
    assert outcome.fallbacks["model=small", "deadline"] > 0
    times = {arrival.request.request_id: arrival.at_s for arrival in arrivals}
    for name, ending in ends(outcome).items():
        assert ending.timings.arrival_s == pytest.approx(times[name])


def test_a_prompt_that_is_too_long_gets_what_has_room_for_it() -> None:
    arrivals = [Arrival(0.0, ask("long", 300, 4)), Arrival(0.0, ask("short", 20, 4))]
    outcome = run(arrivals, ShorterOutput(2), OtherModel("small"), max_model_len=128)
    assert len(ends(outcome)) == 2
    assert outcome.fallbacks == {("max_tokens=2", "memory"): 1, ("model=small", "memory"): 1}


def test_a_client_cancels_what_an_upstream_answers() -> None:
    arrivals = [replace(arrival, cancel_after_s=0.1) for arrival in arrivals_of(30, every_s=0.0)]
    outcome = run(arrivals, UPSTREAM)
    reasons = Counter(ending.reason for ending in ends(outcome).values())
    assert reasons[FinishReason.ABORTED] > 20
    assert len(outcome.endings) == 30
