"""`python -m benchmarks.policies`: one mixed workload under every scheduling policy, simulated.

Three tenants (one sends half of all requests), two classes, 10 % of the prompts with 2,000 tokens,
at about the rate that the machine can serve (`--rate`). The engine's own scheduler runs on a
virtual clock; the step times are assumed, in the order of a 0.5B model on two cores, so the table
is the same on every machine. It also times the scheduler itself: microseconds per row with 256
running and 1,000 waiting sequences.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from random import Random

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.sim.engine import ClockExecutor, VirtualClock
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival, Simulation
from quickstep.sim.simulate import simulate
from quickstep.types import Request, RequestClass, SamplingParams

# Assumed seconds per step, token, row, KV token and pair; about those of a 0.5B model on two cores.
_COSTS = Coefficients(0.030, 0.004, 0.001, 2e-7, 2e-7, score_s=0.0)
_TTFT_TARGET_S = 10.0
_TPOT_TARGET_S = 0.4
_TENANTS = ("large", "large", "small", "other")


def workload(rng: Random, rate: float, seconds: float) -> list[Arrival]:
    """Poisson arrivals of three tenants."""
    arrivals, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        number = len(arrivals)
        is_long, is_batch = rng.random() < 0.1, rng.random() < 0.3
        request = Request(
            f"r{number}",
            tuple(rng.randrange(1000) for _ in range(2000 if is_long else rng.randint(20, 200))),
            SamplingParams(max_tokens=rng.randint(10, 120), ignore_eos=True),
            priority=0,
            tenant=rng.choice(_TENANTS),
            request_class=RequestClass.BATCH if is_batch else RequestClass.INTERACTIVE,
            timeout_s=None if is_batch else 60.0,
            ttft_deadline_s=None if is_batch else _TTFT_TARGET_S,
        )
        arrivals.append(Arrival(at_s, request))
    return arrivals


def run(policy: PolicyName, arrivals: list[Arrival]) -> Simulation:
    """Simulate a policy."""
    config = SchedulerConfig(64, 2048, 4096, policy=policy)
    pool = KVBlockPool(2048, 16)
    scheduler = GroupedScheduler(config, pool, make_policy(config), LinearCostModel(_COSTS))
    return simulate(arrivals, scheduler, LinearCostModel(_COSTS))


def row(policy: PolicyName, arrivals: list[Arrival], seconds: float) -> str:
    """One line of the table: interactive requests, then all."""
    outcome = run(policy, arrivals)
    requests = {arrival.request.request_id: arrival.request for arrival in arrivals}
    classes = Counter(request.request_class for request in requests.values())
    num_interactive = classes[RequestClass.INTERACTIVE]
    ttfts, tpots, received = [], [], Counter[str]()
    num_good = num_tokens = 0
    for ending in outcome.endings:
        request, timings = requests[ending.request_id], ending.timings
        if timings.finished_s <= seconds:
            num_tokens += timings.num_output_tokens
            received[request.tenant] += timings.device_s  # type: ignore[assignment]
        if request.request_class is RequestClass.BATCH:
            continue
        first_s = timings.first_token_s
        if first_s is None:  # it was shed
            continue
        ttft_s = first_s - timings.arrival_s
        ttfts.append(ttft_s)
        if timings.num_output_tokens > 1:
            tpot_s = (timings.finished_s - first_s) / (timings.num_output_tokens - 1)
            tpots.append(tpot_s)
            num_good += ttft_s <= _TTFT_TARGET_S and tpot_s <= _TPOT_TARGET_S
    shares = list(received.values())
    jain = sum(shares) ** 2 / (len(shares) * sum(value**2 for value in shares))
    cells = (
        *(f"{_quantile(ttfts, q):.1f}" for q in (50, 99)),
        *(f"{1e3 * _quantile(tpots, q):.0f}" for q in (50, 99)),
        f"{100 * num_good / num_interactive:.0f} %",
        f"{jain:.2f}",
        f"{num_tokens / seconds:.0f}",
        str(sum(ending.timings.num_preemptions for ending in outcome.endings)),
    )
    return f"| `{policy.value}` | " + " | ".join(cells) + " |"


def _quantile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def scheduler_us(policy: PolicyName, num_running: int = 256, num_waiting: int = 1000) -> float:
    """Microseconds of `plan` and `commit` per row, median over steps."""
    config = SchedulerConfig(num_running, num_running, 4096, policy=policy)
    pool = KVBlockPool(num_running * 40, 16, prefix_caching=False)
    scheduler = GroupedScheduler(config, pool, make_policy(config), LinearCostModel(_COSTS))
    for number in range(num_running + num_waiting):
        sampling = SamplingParams(max_tokens=500, ignore_eos=True)
        request = Request(f"r{number}", (1, 2, 3), sampling, tenant=_TENANTS[number % 4])
        scheduler.add(request, 0.0)
    executor = ClockExecutor(VirtualClock(), LinearCostModel(_COSTS))
    times, now = [], 0.0
    for _ in range(120):
        started_s = time.perf_counter()
        plan = scheduler.plan(now)
        planned_s = time.perf_counter()
        assert plan is not None, "the scheduler has work"
        result = executor.submit(plan).result()
        resumed_s = time.perf_counter()
        now += result.seconds
        scheduler.commit(plan, result, now)
        ended_s = time.perf_counter()
        times.append(((planned_s - started_s) + (ended_s - resumed_s)) / len(plan.rows))
    return 1e6 * statistics.median(times[20:])


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies")
    parser.add_argument("--seconds", type=float, default=300.0, help="of arrivals, simulated")
    parser.add_argument("--rate", type=float, default=0.6, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    arrivals = workload(Random(args.seed), args.rate, args.seconds)
    print(f"{len(arrivals)} requests in {args.seconds:g} s, seed {args.seed}\n")
    print("Interactive requests: time to the first token in s and per output token in ms, of those")
    print(
        f"that got one; how many of all kept {_TTFT_TARGET_S:g} s and {_TPOT_TARGET_S * 1e3:g} ms."
    )
    print("All requests: Jain's index of device seconds, output tokens per second, preemptions.\n")
    print("| policy | TTFT p50 | p99 | TPOT p50 | p99 | goodput | Jain | tokens/s | preempted |")
    print("|---|---|---|---|---|---|---|---|---|")
    for policy in PolicyName:
        print(row(policy, arrivals, args.seconds), flush=True)
    print("\nScheduler, 256 running and 1,000 waiting:")
    for policy in (PolicyName.MIXED, PolicyName.PRIORITY, PolicyName.DEADLINE, PolicyName.FAIR):
        print(f"  {policy.value}: {scheduler_us(policy):.1f} us per row", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
