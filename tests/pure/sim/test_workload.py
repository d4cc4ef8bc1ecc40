"""Simulated clients: arrivals with their rates, shared prefixes, sessions, closed loops, and that
requests are conserved.
"""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from msgspec.structs import replace

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.sim.arrivals import diurnal, gamma, poisson, ramp
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival, Simulation
from quickstep.sim.simulate import simulate
from quickstep.sim.summary import Percentiles, Targets, summarize
from quickstep.sim.workload import WORKLOADS, Clients, Lengths, PrefixLevel, Tenant, Workload
from quickstep.types import FinishReason, Request, SamplingParams

COSTS = Coefficients(step_s=0.005, token_s=2e-5, row_s=0.0, kv_token_s=0.0, pair_s=0.0)
NUM_BLOCKS = 4000
SMALL = Workload(Lengths(20), Lengths(5))


def run(
    workload: Workload,
    times: list[float],
    num_requests: int = 10_000,
    closed_loop: bool = False,
    seed: int = 1,
    policy: PolicyName = PolicyName.MIXED,
) -> Simulation:
    config = SchedulerConfig(max_num_seqs=64, max_model_len=8192, policy=policy)
    scheduler = GroupedScheduler(
        config, KVBlockPool(NUM_BLOCKS, 16), make_policy(config), LinearCostModel(COSTS)
    )
    clients = Clients(workload, random.Random(seed), num_requests, 8192, closed_loop)
    outcome = simulate(clients.opening(times), scheduler, LinearCostModel(COSTS), clients.follow)
    scheduler.check()
    assert not scheduler.has_work()
    return outcome


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_poisson_and_gamma_arrivals_have_their_rate_and_burstiness() -> None:
    rng = random.Random(0)
    for burstiness, variation in ((1.0, 1.0), (0.25, 2.0), (4.0, 0.5)):
        between = gaps(gamma(rng, 10.0, 20_000, burstiness))
        mean = statistics.fmean(between)
        assert mean == pytest.approx(0.1, rel=0.05)
        assert statistics.pstdev(between) / mean == pytest.approx(variation, rel=0.05)
    assert poisson(random.Random(3), 2.0, 5) == poisson(random.Random(3), 2.0, 5)


def test_the_rate_of_ramps_and_days_changes() -> None:
    rising = ramp(random.Random(0), 0.0, 100.0, 100.0)
    assert len(rising) == pytest.approx(5000, rel=0.05)
    assert sum(at_s < 50 for at_s in rising) == pytest.approx(1250, rel=0.1)
    day = diurnal(random.Random(0), 10.0, 20.0, 100.0, 1000.0)
    assert len(day) == pytest.approx(10_000, rel=0.05)
    quarters = [sum(int(at_s % 100 // 25) == quarter for at_s in day) for quarter in range(4)]
    assert min(quarters[:2]) > 3 * max(quarters[2:])


def test_requests_of_one_document_share_its_prefix() -> None:
    workload = replace(SMALL, prefixes=(PrefixLevel(1, 64), PrefixLevel(3, 128)))
    arrivals = Clients(workload, random.Random(0), 100, 8192).opening(range(100))
    prompts = [arrival.request.prompt_token_ids for arrival in arrivals]
    assert {len(prompt) for prompt in prompts} == {64 + 128 + 20}
    assert len({prompt[:64] for prompt in prompts}) == 1
    assert len({prompt[:192] for prompt in prompts}) == 3
    assert len({prompt[192:] for prompt in prompts}) == 100
    outcome = run(workload, [0.5 * place for place in range(100)])
    cached = [ending.timings.num_cached_tokens for ending in outcome.endings]
    assert sum(count == 192 for count in cached) == 97
    assert min(cached) == 0


def test_a_turn_of_a_session_follows_the_answer_and_has_the_session_as_its_prefix() -> None:
    workload = replace(SMALL, mean_turns=3.0, think_s=2.0)
    outcome = run(workload, [float(place) for place in range(200)])
    assert len(outcome.endings) == pytest.approx(600, rel=0.15)
    lengths = sorted({ending.timings.num_prompt_tokens for ending in outcome.endings})
    assert lengths[:3] == [20, 45, 70]
    second = [one for one in outcome.endings if one.timings.num_prompt_tokens == 45]
    assert all(one.timings.num_cached_tokens == 16 for one in second)  # 24 tokens are computed


def test_a_closed_loop_keeps_as_many_requests_as_clients() -> None:
    outcome = run(SMALL, [0.0] * 4, num_requests=100, closed_loop=True)
    assert len(outcome.endings) == 100
    assert max(record.num_running for record in outcome.records) == 4
    waiting = replace(SMALL, think_s=1.0)
    idle = run(waiting, [0.0] * 4, num_requests=100, closed_loop=True)
    assert idle.finished_s > 5 * outcome.finished_s


def test_cancelled_requests_end_at_that_time_and_late_cancellations_do_nothing() -> None:
    request = Request("a", (1, 2, 3), SamplingParams(max_tokens=1000))
    config = SchedulerConfig(max_model_len=2048)
    scheduler = GroupedScheduler(
        config, KVBlockPool(200, 16), make_policy(config), LinearCostModel(COSTS)
    )
    arrivals = [
        Arrival(1.0, request, cancel_after_s=0.5),
        Arrival(1.0, replace(request, request_id="b", sampling=SamplingParams(max_tokens=2)), 99.0),
    ]
    outcome = simulate(arrivals, scheduler, LinearCostModel(COSTS))
    ended = {ending.request_id: ending for ending in outcome.endings}
    assert ended["a"].reason is FinishReason.ABORTED
    assert ended["a"].timings.finished_s == 1.5
    assert ended["b"].reason is FinishReason.MAX_TOKENS
    assert outcome.finished_s == 1.5


def test_tenants_have_their_part_of_the_requests() -> None:
    tenants = (Tenant("a", 3.0, priority=-1), Tenant("b", 1.0, weight=2.0))
    arrivals = Clients(replace(SMALL, tenants=tenants), random.Random(0), 4000, 8192).opening(
        range(4000)
    )
    counts = [sum(arrival.request.tenant == name for arrival in arrivals) for name in "ab"]
    assert counts[0] / counts[1] == pytest.approx(3, rel=0.1)
    assert {arrival.request.priority for arrival in arrivals if arrival.request.tenant == "a"} == {
        -1
    }


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_presets_conserve_requests_and_repeat_themselves(name: str) -> None:
    times = poisson(random.Random(5), 4.0, 5)
    first, second = (run(WORKLOADS[name], times, 8, seed=7) for _ in range(2))
    assert first == second
    assert 5 <= len(first.endings) <= 8
    assert not first.refused
    assert run(WORKLOADS[name], times, 8, seed=8) != first


def test_a_summary_counts_what_met_the_targets() -> None:
    outcome = run(SMALL, [0.1 * place for place in range(101)])
    summary = summarize(outcome, NUM_BLOCKS, Targets(ttft_s=1.0, tpot_s=1.0))
    assert (summary.num_requests, summary.attainment) == (101, 1.0)
    assert summary.requests_per_s == pytest.approx(10, rel=0.02)
    assert summary.output_tokens_per_s == pytest.approx(50, rel=0.02)
    assert summary.e2e_s.mean == pytest.approx(summary.ttft_s.mean + 4 * summary.tpot_s.mean)
    assert summary.tpot_s.p50 == pytest.approx(0.00502, rel=0.01)
    assert summarize(outcome, NUM_BLOCKS, Targets(tpot_s=1e-6)).attainment == 0.0
    assert Percentiles.of([3.0, 1.0, 2.0]) == Percentiles(2.0, 2.0, 2.8, 2.98)
