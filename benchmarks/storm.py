"""`python -m benchmarks.storm [--seconds 20]`: the latency of a stream while attackers send load.

One client reads streams, first without other load, then while another process, with another API
key, repeats every attack of `storm_attacks`. The server shares the device fairly between keys.
Prints quantiles of the times between two chunks of a stream, and their ratio.
Exit code 1 if a stream was incomplete, an attack got status 500, or the 99th percentile under
attack is more than three times the one without load.

Both clients stand for other machines: the healthy one runs in real time, where the system allows
it, the attackers' process below the server's priority, and the processor time that each process
takes and waits for is printed. `--explain` attributes every gap
above the goal, by the step log of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import msgspec

from benchmarks.peers.checkpoints import make_checkpoint
from benchmarks.storm_attacks import ATTACKS, build_bodies
from benchmarks.storm_report import Gap, ProcessTimes, explanation_of, process_times
from quickstep.bench.server_process import ServerProcess
from quickstep.bench.shapes import SHAPES
from quickstep.engine.records.step_log import SequenceRecord
from quickstep.types import StepRecord

_NUM_TOKENS = 400
_BODY = {
    "prompt": "import os\n",
    "max_tokens": _NUM_TOKENS,
    "speculation": False,  # a token per step, so that gaps are those between steps
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "ignore_eos": True,
    "temperature": 0.0,
}
_GOAL = 3.0
_HEALTHY = {"authorization": "Bearer healthy-client"}
_ADMIN = {"authorization": "Bearer operator"}
_ATTACKER = {"authorization": "Bearer attacking-client"}
_KEYS = (
    "--api-key healthy=healthy-client --api-key attacker=attacking-client --admin-api-key operator"
)
# The bundled model takes 1 to 2 ms per token without load; the engine's default target is 200 ms.
_SERVER_FLAGS = "--scheduling-policy fair --inter-token-target-s 0.005"
_TIMEOUT_S = 300.0
_CACHE = Path.home() / ".cache" / "quickstep-peers"


def main() -> int:
    """Measure both phases. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="duration of each of the two phases"
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="demo")
    model.add_argument("--shape", choices=SHAPES, help="random weights, as `benchmarks.peers` has")
    parser.add_argument("--cache", type=Path, default=_CACHE, help="where the weights are kept")
    parser.add_argument("--attack", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    text = "of the server, in addition to two API keys (default: %(default)s)"
    parser.add_argument("--explain", action="store_true", help="print where long gaps come from")
    parser.add_argument("--server-flags", default=_SERVER_FLAGS, metavar="FLAGS", help=text)
    args = parser.parse_args()
    if args.attack is not None:
        build_bodies()
        print("ready", flush=True)
        sys.stdin.readline()
        asyncio.run(_attack(args.attack, args.seconds, args.only))
        return 0
    if args.shape is not None:
        args.model = str(make_checkpoint(args.shape, args.cache, seed=0))
    server = ServerProcess([args.model, *shlex.split(f"{_KEYS} {args.server_flags}")])
    server.start()
    _take_precedence(server.processes()["server"])
    try:
        return asyncio.run(_measure(server, args.seconds, args.only, args.explain))
    finally:
        server.stop()


async def _measure(server: ServerProcess, seconds: float, names: list[str], explain: bool) -> int:
    url = server.url
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, headers=_HEALTHY) as client:
        await _stream(client)
        quiet = await _gaps(client, time.monotonic() + seconds)
        attacking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.storm", "--attack", url),
            *("--seconds", str(seconds), "--only", *names),
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert attacking.stdin is not None
        assert attacking.stdout is not None
        await attacking.stdout.readline()  # its bodies are built
        # after the server, but never starved: about a tenth of its share of a busy processor
        _set_session_nice(attacking.pid, min(19, _session_nice() + 10))
        process_ids = (*server.processes().values(), attacking.pid, os.getpid())
        before = {process_id: process_times(process_id) for process_id in process_ids}
        attacking.stdin.write(b"start\n")
        started_s = time.monotonic()
        storm = await _gaps(client, started_s + seconds)
        lasted_s = time.monotonic() - started_s
        for name, one in server.processes().items():
            _report_process(name, process_times(one), before.get(one), lasted_s)
        _report_process("client", process_times(os.getpid()), before.get(os.getpid()), lasted_s)
        _report_process(
            "attackers' client", process_times(attacking.pid), before.get(attacking.pid), lasted_s
        )
        steps = await _steps(client, lasted_s) if explain else []
        print((await attacking.stdout.read()).decode(), end="")
        code = await attacking.wait()
        health = (await client.get("/health")).json()
    quiet_s, storm_s = _report("quiet", quiet), _report("storm", storm)
    if explain:
        print("\n".join(explanation_of(storm, _GOAL * quiet_s, steps)))
    ratio = storm_s / quiet_s
    print(f"the p99 gap under attack is {ratio:.1f} times the one without load")
    is_healthy = health["status"] == "ok" and not health["num_restarts"]
    return 0 if ratio <= _GOAL and code == 0 and is_healthy else 1


async def _steps(client: httpx.AsyncClient, last_s: float) -> list[StepRecord | SequenceRecord]:
    """The records of the last seconds."""
    found = await client.get("/debug/steps", params={"last_s": last_s}, headers=_ADMIN)
    found.raise_for_status()
    lines = (line for line in found.text.splitlines() if '"kind":"live"' not in line)
    return [msgspec.json.decode(line, type=StepRecord | SequenceRecord) for line in lines]


def _report_process(
    name: str, now: ProcessTimes, before: ProcessTimes | None, lasted_s: float
) -> None:
    used = now.since(before or ProcessTimes(0.0, 0.0))
    print(
        f"{name}: {100 * used.cpu_s / lasted_s:.0f} % of a core, its threads waited for one "
        f"{used.waited_s:.2f} s in {lasted_s:.1f} s",
        flush=True,
    )


def _take_precedence(server_id: int) -> None:
    """Read chunks as soon as they come, as a client on another machine does: in real time, where
    the system allows that. Child processes do not inherit it. The server gets the priority that
    this session of processes has (Linux shares processors between sessions first).
    """
    try:
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(1))
        _set_session_nice(server_id, _session_nice())
    except PermissionError:
        print("the client has the usual priority: its gaps contain its own waits for a core")


def _session_nice() -> int:
    path = Path("/proc/self/autogroup")
    return int(path.read_text().rpartition(" ")[2]) if path.exists() else 0


def _set_session_nice(process_id: int, nice: int) -> None:
    path = Path(f"/proc/{process_id}/autogroup")
    if path.exists():
        path.write_text(str(nice))


async def _gaps(client: httpx.AsyncClient, until_s: float) -> list[Gap]:
    gaps: list[Gap] = []
    while time.monotonic() < until_s:
        gaps += await _stream(client)
    return gaps


async def _stream(client: httpx.AsyncClient) -> list[Gap]:
    """The times between chunks of one stream, which must be complete."""
    arrivals: list[float] = []
    num_tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=_BODY) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.monotonic())
                usage = json.loads(line.removeprefix("data: "))["usage"]
                num_tokens.append(usage["completion_tokens"])
    if num_tokens[-1:] != [_NUM_TOKENS]:
        raise RuntimeError(f"a stream of {_NUM_TOKENS} tokens ended after {num_tokens[-1:]}")
    return [
        Gap(*times, before)
        for times, (before, after) in zip(
            itertools.pairwise(arrivals), itertools.pairwise(num_tokens), strict=True
        )
        if after > before  # the chunk at the end repeats the usage
    ]


async def _attack(url: str, seconds: float, names: list[str]) -> None:
    """Repeat every attack until the time is over, and wait for the last ones."""
    until_s = time.monotonic() + seconds
    counts: Counter[tuple[str, int]] = Counter()

    async def repeat(client: httpx.AsyncClient, name: str) -> None:
        while time.monotonic() < until_s:
            counts.update((name, status) for status in await ATTACKS[name](client))

    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, headers=_ATTACKER) as client:
        await asyncio.gather(*(repeat(client, name) for name in names))
    for (name, status), count in sorted(counts.items()):
        print(f"{name}: {count} x {status}", flush=True)
    if any(status == 500 for _, status in counts):
        raise RuntimeError("an attack was answered with status 500")


def _report(name: str, gaps: list[Gap]) -> float:
    lengths = [gap.seconds for gap in gaps]
    cuts = statistics.quantiles(lengths, n=100)
    print(
        f"{name}: {len(gaps)} gaps, p50 {cuts[49] * 1e3:.1f} ms, p99 {cuts[98] * 1e3:.1f} ms, "
        f"longest {max(lengths) * 1e3:.1f} ms",
        flush=True,
    )
    return cuts[98]


if __name__ == "__main__":
    sys.exit(main())
