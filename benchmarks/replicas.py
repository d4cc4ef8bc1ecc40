"""`python -m benchmarks.replicas`: two replicas of one thread against one engine of two threads.

Chat sessions, each with a prompt that grows from turn to turn, run against `quickstep serve` as one
engine and as replicas behind each router, in turn, several times. Printed are the part of prompt
tokens that came from the prefix cache, output tokens a second and the time to the first token: the
median of the repeats, with the least and the most. The same sessions run in the simulator, with the
step times that the live replicas had reported at the end. The exit code is 1 if a goal is missed:

    hit rate of the replicas          >= 0.95 of one engine's
    throughput of the replicas        >= 0.95 of one engine's
    p90 of the first token            predicted <= 0.8 of round-robin; simulated within 15 %

    --sessions 24 --turns 6 --clients 8 --repeats 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles

import httpx
import msgspec

from benchmarks.machine import describe_machine
from quickstep.bench.server_process import ServerProcess
from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.recordings.routing import ChoiceLine, RoutingLine
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.router import ROUTERS
from quickstep.sim.engine import SimulatedEngine, VirtualClock
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival, Ending
from quickstep.sim.replicas.replica import ReplicaSpec
from quickstep.sim.replicas.run import ReplicaRun
from quickstep.types import Request, SamplingParams

_VOCABULARY = range(300, 4000)  # token ids of prompts
_FIRST_TOKENS, _TURN_TOKENS, _ANSWER_TOKENS = 200, 150, 32
_MAX_SEQS, _BLOCKS, _BATCH_TOKENS, _MODEL_LEN = 32, 4096, 2048, 2048
_ONE_ENGINE = "one engine"
_GOALS = {"hit rate": 0.95, "throughput": 0.95, "first token": 0.8, "simulated": 0.15}


class _Answer(msgspec.Struct, frozen=True):
    """What a client measured of a turn."""

    first_token_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


class _Figures(msgspec.Struct, frozen=True):
    """Of a run: the part of prompts that was cached, output tokens a second, first tokens."""

    hit_rate: float
    tokens_per_s: float
    first_token_p50_s: float
    first_token_p90_s: float

    @staticmethod
    def of(answers: Sequence[_Answer], seconds: float) -> _Figures:
        """The figures of a run that took so long."""
        tenths = quantiles([answer.first_token_s for answer in answers], n=10, method="inclusive")
        cached = sum(answer.num_cached_tokens for answer in answers)
        return _Figures(
            cached / sum(answer.num_prompt_tokens for answer in answers),
            len(answers) * _ANSWER_TOKENS / seconds,
            tenths[4],
            tenths[8],
        )


def _sessions(num: int, num_turns: int) -> list[list[tuple[int, ...]]]:
    """The prompts of each session, turn by turn; each begins with the one before."""
    rng, sessions = Random(0), []
    for _ in range(num):
        ids = rng.choices(_VOCABULARY, k=_FIRST_TOKENS + num_turns * _TURN_TOKENS)
        ends = range(_FIRST_TOKENS, len(ids), _TURN_TOKENS)
        sessions.append([tuple(ids[:end]) for end in ends])
    return sessions


async def _turn(client: httpx.AsyncClient, prompt: Sequence[int]) -> _Answer:
    body = {
        "prompt": list(prompt),
        "max_tokens": _ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun_s, first_s, usage = time.monotonic(), None, None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if first_s is None:
                first_s = time.monotonic() - begun_s
            usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    assert first_s is not None and usage is not None, "the server sent both"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return _Answer(first_s, usage["prompt_tokens"], cached)


async def _live(url: str, sessions: Sequence[Sequence[Sequence[int]]], clients: int) -> _Figures:
    """Run the sessions with so many clients, each of which takes one after the other."""
    answers: list[_Answer] = []
    queue = iter(sessions)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await _turn(client, range(300, 340))  # what the first request costs is not measured
        begun_s = time.monotonic()

        async def take_sessions(remaining: Iterator[Sequence[Sequence[int]]]) -> None:
            for session in remaining:
                for prompt in session:
                    answers.append(await _turn(client, prompt))

        await asyncio.gather(*(take_sessions(queue) for _ in range(clients)))
        return _Figures.of(answers, time.monotonic() - begun_s)


def _measured(model: str, flags: Sequence[str], run: Callable[[str], _Figures]) -> _Figures:
    """The figures of a server with these flags."""
    sizes = ("--max-num-seqs", str(_MAX_SEQS), "--max-model-len", str(_MODEL_LEN))
    server = ServerProcess([model, *sizes, *flags])
    server.start()
    try:
        return run(server.url)
    finally:
        server.stop()


def _coefficients(path: Path) -> Coefficients:
    """What the replicas had reported of their steps at the end of a recorded run."""
    lines = msgspec.json.Decoder(RoutingLine)
    found = None
    for text in path.read_bytes().splitlines():
        if isinstance(line := lines.decode(text), ChoiceLine):
            known = [view.coefficients for view in line.views.values() if view.coefficients]
            found = known[-1] if known else found
    if found is None:
        raise RuntimeError("no replica has reported how long its steps take")
    return found


def _simulated(
    sessions: Sequence[Sequence[tuple[int, ...]]], clients: int, router: str, costs: Coefficients
) -> _Figures:
    """The same sessions and clients on a virtual clock, with two replicas."""
    config = SchedulerConfig(
        max_num_seqs=_MAX_SEQS,
        max_num_batched_tokens=_BATCH_TOKENS,
        max_model_len=_MODEL_LEN,
        policy=PolicyName.MIXED,
    )

    def make_engine(clock: VirtualClock) -> SimulatedEngine:
        pool = KVBlockPool(_BLOCKS // 2, 16)
        scheduler = GroupedScheduler(config, pool, make_policy(config), LinearCostModel(costs))
        return SimulatedEngine(clock, scheduler, LinearCostModel(costs))

    def arrival(at_s: float, session: int, turn: int) -> Arrival:
        sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, ignore_eos=True)
        return Arrival(at_s, Request(f"{session}:{turn}", sessions[session][turn], sampling))

    waiting = iter(range(clients, len(sessions)))

    def follow(ending: Ending) -> list[Arrival]:
        session, turn = map(int, ending.request_id.split(":"))
        if turn + 1 < len(sessions[session]):
            return [arrival(ending.timings.finished_s, session, turn + 1)]
        following = next(waiting, None)
        return [] if following is None else [arrival(ending.timings.finished_s, following, 0)]

    first = [arrival(0.0, session, 0) for session in range(min(clients, len(sessions)))]
    specs = [ReplicaSpec(make_engine)] * 2
    endings = ReplicaRun(first, specs, ROUTERS[router](), Random(0), follow=follow).run().endings
    answers = []
    for timings in (ending.timings for ending in endings):
        assert timings.first_token_s is not None, "each has output"
        first_token_s = timings.first_token_s - timings.arrival_s
        answers.append(_Answer(first_token_s, timings.num_prompt_tokens, timings.num_cached_tokens))
    return _Figures.of(answers, max(ending.timings.finished_s for ending in endings))


def _row(name: str, runs: Sequence[_Figures]) -> str:
    """Medians with the least and the most."""
    cells = []
    for field, scale, digits in (
        ("hit_rate", 100.0, 1),
        ("tokens_per_s", 1.0, 0),
        ("first_token_p50_s", 1e3, 1),
        ("first_token_p90_s", 1e3, 1),
    ):
        values = [scale * float(getattr(run, field)) for run in runs]
        spread = f" ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(runs) > 1 else ""
        cells.append(f"{median(values):.{digits}f}{spread}".rjust(22))
    return name.ljust(24) + "".join(cells)


def _middle(runs: Sequence[_Figures], field: str) -> float:
    return median(float(getattr(run, field)) for run in runs)


def main() -> int:
    """Print the figures of each configuration; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    sessions = _sessions(args.sessions, args.turns)
    print(describe_machine())
    print(
        f"{args.model}: {args.sessions} sessions of {args.turns} turns, {args.clients} clients, "
        f"{args.repeats} repeats in turn; median (least-most)"
    )
    live: dict[str, list[_Figures]] = {name: [] for name in (_ONE_ENGINE, *ROUTERS)}
    costs: Coefficients | None = None

    def run(url: str) -> _Figures:
        return asyncio.run(_live(url, sessions, args.clients))

    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "routing.jsonl"
        for _ in range(args.repeats):
            flags = ("--threads", "2", "--num-blocks", str(_BLOCKS))
            live[_ONE_ENGINE].append(_measured(args.model, flags, run))
            for name in ROUTERS:
                flags = ("--threads", "1", "--num-blocks", str(_BLOCKS // 2), "-dp", "2")
                routing = ("--router", name, "--record-routing", str(recording))
                live[name].append(_measured(args.model, (*flags, *routing), run))
                if name == "predicted":
                    costs = _coefficients(recording)
    assert costs is not None, "there was a run of the predicting router"
    simulated = {name: _simulated(sessions, args.clients, name, costs) for name in ROUTERS}
    titles = ("hit rate %", "tokens/s", "first token p50 ms", "p90 ms")
    print(" " * 24 + "".join(title.rjust(22) for title in titles))
    for name, runs in live.items():
        print(_row(name, runs))
    for name, figures in simulated.items():
        print(_row(f"simulated {name}", [figures]))
    return _check_goals(live, simulated)


def _check_goals(live: dict[str, list[_Figures]], simulated: dict[str, _Figures]) -> int:
    """Print each goal and whether it is reached; 1 if one is not."""
    one, predicted = live[_ONE_ENGINE], live["predicted"]
    p90_s = {name: _middle(runs, "first_token_p90_s") for name, runs in live.items()}
    ratios = {
        "hit rate": _middle(predicted, "hit_rate") / _middle(one, "hit_rate"),
        "throughput": _middle(predicted, "tokens_per_s") / _middle(one, "tokens_per_s"),
        "first token": p90_s["predicted"] / p90_s["round-robin"],
        "simulated": abs(simulated["predicted"].first_token_p90_s / p90_s["predicted"] - 1.0),
    }
    is_met = {
        name: ratio >= _GOALS[name] if name in ("hit rate", "throughput") else ratio <= _GOALS[name]
        for name, ratio in ratios.items()
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}, goal {_GOALS[name]}: {'met' if is_met[name] else 'MISSED'}")
    return 0 if all(is_met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
