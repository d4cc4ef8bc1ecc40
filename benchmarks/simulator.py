"""`python -m benchmarks.simulator`: how many requests per second the simulator advances.

Requests of 200 tokens in and 200 out (lognormal) arrive at 64 replicas in turn, each the engine's
own scheduler on a virtual clock. Replicas without a router are independent: they are simulated in
as many processes as there are cores, or `--jobs`. The time grows with the number of requests; the
last line has it for a million. `--num-prompts 1000000 --replicas 1` simulates one replica of a
million requests in its full length.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from functools import partial
from random import Random

import msgspec

from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.engine.machine import usable_cores
from quickstep.plan.processes import map_in_processes
from quickstep.sim.engine import quick_digest
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival
from quickstep.sim.simulate import simulate
from quickstep.sim.workload import Clients, Lengths, Workload

# Assumed seconds, in the order of an 8B model on an H100.
_COSTS = Coefficients(0.0065, 2e-5, 1e-6, 1e-9, 1e-9, score_s=0.0)
_WORKLOAD = Workload(Lengths(200, 0.5, 8, 2000), Lengths(200, 0.5, 8, 2000))
_NUM_REPLICAS = 64


class Simulated(msgspec.Struct, frozen=True):
    """What became of a replica, and the CPU seconds of its simulation."""

    num_ended: int
    num_steps: int
    cpu_s: float


def replica(num_requests: int, rate: float, seed: int) -> Simulated:
    """Simulate one."""
    start_s, rng = time.process_time(), Random(seed)
    clients = Clients(_WORKLOAD, rng, num_requests, 4096)
    at_s, times = 0.0, []
    for _ in range(num_requests):
        at_s += rng.expovariate(rate)
        times.append(at_s)
    arrivals: list[Arrival] = clients.opening(times)
    config = SchedulerConfig(256, 2048, 4096)
    pool = KVBlockPool(8192, 16, digest=quick_digest)
    scheduler = GroupedScheduler(config, pool, make_policy(config), LinearCostModel(_COSTS))
    outcome = simulate(arrivals, scheduler, LinearCostModel(_COSTS))
    return Simulated(len(outcome.endings), len(outcome.records), time.process_time() - start_s)


def main() -> None:
    """Print the speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=1920, help="on all replicas together")
    parser.add_argument("--rate", type=float, default=30.0, help="requests per second of a replica")
    parser.add_argument(
        "--replicas", type=int, default=_NUM_REPLICAS, help="simulate only so many of the 64"
    )
    parser.add_argument(
        "--jobs", type=int, default=usable_cores(), help="processes (default: one per core)"
    )
    args = parser.parse_args()
    start_s = time.perf_counter()
    work = partial(replica, args.num_prompts // _NUM_REPLICAS, args.rate)
    found = map_in_processes(work, range(args.replicas), args.jobs, partial(_show, args.replicas))
    seconds = time.perf_counter() - start_s
    num_ended = sum(each.num_ended for each in found)
    num_steps = sum(each.num_steps for each in found)
    cpu_s = sum(each.cpu_s for each in found)
    memory = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(
        f"{num_ended} requests, {num_steps} steps in {seconds:.1f} s with "
        f"{min(args.jobs, args.replicas)} processes of at most {memory / 1024:.0f} MiB"
    )
    print(f"{1e6 * cpu_s / num_ended:.0f} us of CPU time per request")
    print(f"a million requests: {1e6 / num_ended * seconds:.0f} s at this speed")


def _show(num_replicas: int, _place: int, num_done: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{num_done} of {num_replicas} replicas", end="", file=sys.stderr)


if __name__ == "__main__":
    main()
