"""`python -m benchmarks.scheduler`: the scheduler's own time per row of a step, without a model.

A full batch decodes while others wait; every sequence that ends is replaced by a waiting one and by
a new arrival, so that admissions, prefill, block tables and the prefix cache take part. The results
of steps are made up. `plan` and `commit` are measured by themselves.

    --profile    the functions that take most of the time, by cProfile
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import sys
import time
from random import Random

from benchmarks.machine import describe_machine
from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.scheduler import Scheduler
from quickstep.types import Request, RowOutput, SamplingParams, StepPlan, StepResult

_COSTS = Coefficients(step_s=0.004, token_s=0.0002, row_s=0.0001)
_BLOCK_SIZE = 16
_MODEL_LEN = 4096


class Load:
    """A scheduler with running and waiting sequences on a virtual clock."""

    def __init__(self, policy: PolicyName, num_running: int, num_waiting: int, seed: int) -> None:
        config = SchedulerConfig(
            max_num_seqs=num_running, max_model_len=_MODEL_LEN, policy=policy, max_waiting=None
        )
        pool = KVBlockPool(num_running * 64, _BLOCK_SIZE)
        cost_model = LinearCostModel(_COSTS)
        self.scheduler = Scheduler(config, pool, make_policy(config), cost_model)
        self._rng = Random(seed)
        self._names = itertools.count()
        self._now = 0.0
        for _ in range(num_running + num_waiting):
            self._arrive()

    def _arrive(self) -> None:
        rng = self._rng
        prompt = tuple(rng.randrange(32_000) for _ in range(rng.randint(32, 256)))
        sampling = SamplingParams(max_tokens=rng.randint(128, 512), ignore_eos=True)
        name, tenant = f"r{next(self._names)}", f"t{rng.randrange(4)}"
        self.scheduler.add(Request(name, prompt, sampling, tenant=tenant), self._now)

    def step(self) -> tuple[int, float, float]:
        """One step: its rows, and the seconds of `plan` and of `commit`."""
        started_s = time.perf_counter()
        plan = self.scheduler.plan(self._now)
        planned_s = time.perf_counter()
        assert plan is not None, "sequences run"
        result = _result(plan, self._rng)
        self._now += 0.02
        result_s = time.perf_counter()
        outcome = self.scheduler.commit(plan, result, self._now)
        committed_s = time.perf_counter()
        for output in outcome.outputs:
            if output.finish_reason is not None:
                self._arrive()
        return len(plan.rows), planned_s - started_s, committed_s - result_s


def _result(plan: StepPlan, rng: Random) -> StepResult:
    outputs = [RowOutput((rng.randrange(32_000),) if row.emits else ()) for row in plan.rows]
    return StepResult(plan.step_id, tuple(outputs), 0.02)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--policies", nargs="+", default=["mixed", "fair"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    print(describe_machine())
    print(f"{args.running} running, {args.waiting} waiting, median of {args.steps} steps")
    print("| policy | rows | plan us/row | commit us/row | together |\n|---|---|---|---|---|")
    for name in args.policies:
        load = Load(PolicyName(name), args.running, args.waiting, args.seed)
        for _ in range(args.steps // 2):  # the batch fills
            load.step()
        with cProfile.Profile() as profile:
            if not args.profile:
                profile.disable()
            steps = [load.step() for _ in range(args.steps)]
        print(_line(name, steps))
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return 0


def _line(name: str, steps: list[tuple[int, float, float]]) -> str:
    plans = statistics.median(1e6 * plan_s / rows for rows, plan_s, _ in steps)
    commits = statistics.median(1e6 * commit_s / rows for rows, _, commit_s in steps)
    num_rows = statistics.median(rows for rows, _, _ in steps)
    return f"| {name} | {num_rows:g} | {plans:.1f} | {commits:.1f} | {plans + commits:.1f} |"


if __name__ == "__main__":
    sys.exit(main())
