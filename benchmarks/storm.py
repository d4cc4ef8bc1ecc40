"""`python -m benchmarks.storm [--seconds 20]`: the latency of a stream while attackers send load.

One client reads streams, first without other load, then while another process, with another API
key, repeats every attack of `storm_attacks`. The server shares the device fairly between keys.
Prints quantiles of the times between two chunks of a stream, and their ratio.
Exit code 1 if a stream was incomplete, an attack got status 500, or the 99th percentile under
attack is more than three times the one without load.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import httpx

from benchmarks.storm_attacks import ATTACKS
from quickstep.bench.server_process import ServerProcess

_NUM_TOKENS = 400
_BODY = {
    "prompt": "import os\n",
    "max_tokens": _NUM_TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 1,
}
_GOAL = 3.0
_HEALTHY = {"authorization": "Bearer healthy-client"}
_ATTACKER = {"authorization": "Bearer attacking-client"}
_KEYS = "--api-key healthy=healthy-client --api-key attacker=attacking-client"
# The bundled model takes 2 ms per token without load; the engine's default target is 200 ms.
_SERVER_FLAGS = "--scheduling-policy fair --inter-token-target-s 0.005"
_TIMEOUT_S = 300.0


def main() -> int:
    """Measure both phases. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="duration of each of the two phases"
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--attack", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    text = "of the server, in addition to two API keys (default: %(default)s)"
    parser.add_argument("--server-flags", default=_SERVER_FLAGS, metavar="FLAGS", help=text)
    args = parser.parse_args()
    if args.attack is not None:
        _yield_cores()
        asyncio.run(_attack(args.attack, args.seconds, args.only))
        return 0
    server = ServerProcess([args.model, *shlex.split(f"{_KEYS} {args.server_flags}")])
    server.start()
    try:
        return asyncio.run(_measure(server.url, args.seconds, args.only))
    finally:
        server.stop()


async def _measure(url: str, seconds: float, names: list[str]) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, headers=_HEALTHY) as client:
        await _stream(client)
        quiet = await _gaps(client, time.monotonic() + seconds)
        attacking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.storm", "--attack", url),
            *("--seconds", str(seconds), "--only", *names),
            start_new_session=True,
        )
        storm = await _gaps(client, time.monotonic() + seconds)
        code = await attacking.wait()
        health = (await client.get("/health")).json()
    ratio = _report("storm", storm) / _report("quiet", quiet)
    print(f"the p99 gap under attack is {ratio:.1f} times the one without load")
    is_healthy = health["status"] == "ok" and not health["num_restarts"]
    return 0 if ratio <= _GOAL and code == 0 and is_healthy else 1


def _yield_cores() -> None:
    """Leave the cores to the server: attackers stand for other machines."""
    os.nice(19)
    autogroup = Path("/proc/self/autogroup")  # Linux shares cores between sessions first
    if autogroup.exists():
        autogroup.write_text("19")


async def _gaps(client: httpx.AsyncClient, until_s: float) -> list[float]:
    gaps: list[float] = []
    while time.monotonic() < until_s:
        gaps += await _stream(client)
    return gaps


async def _stream(client: httpx.AsyncClient) -> list[float]:
    """The times between chunks of one stream, which must be complete."""
    arrivals, usage = [], {}
    async with client.stream("POST", "/v1/completions", json=_BODY) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.monotonic())
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    if usage.get("completion_tokens") != _NUM_TOKENS:
        raise RuntimeError(f"a stream of {_NUM_TOKENS} tokens ended with usage {usage}")
    return [after - before for before, after in itertools.pairwise(arrivals)]


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


def _report(name: str, gaps: list[float]) -> float:
    cuts = statistics.quantiles(gaps, n=100)
    print(
        f"{name}: {len(gaps)} gaps, p50 {cuts[49] * 1e3:.1f} ms, p99 {cuts[98] * 1e3:.1f} ms, "
        f"longest {max(gaps) * 1e3:.1f} ms",
        flush=True,
    )
    return cuts[98]


if __name__ == "__main__":
    sys.exit(main())
