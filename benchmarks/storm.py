"""`python -m benchmarks.storm [--seconds 20]`: a healthy stream beside all attackers at once.

One client reads streams, first alone, then while another process sends every attack of
`storm_attacks` again and again. Prints the quantiles of the gaps between two pieces of a stream and
their ratio. Exit code 1 if a stream lost something, an attacker got no answer, or the 99th
percentile is above three times that of the quiet server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter

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
_TIMEOUT_S = 300.0


def main() -> int:
    """Measure; 0 if all is well."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the two phases")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--attack", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    args = parser.parse_args()
    if args.attack is not None:
        asyncio.run(_attack(args.attack, args.seconds, args.only))
        return 0
    child = ServerProcess([args.model])
    child.start()
    try:
        return asyncio.run(_measure(child.url, args.seconds, args.only))
    finally:
        child.stop()


async def _measure(url: str, seconds: float, names: list[str]) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as client:
        await _stream(client)
        quiet = await _gaps(client, time.monotonic() + seconds)
        attacking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.storm", "--attack", url),
            *("--seconds", str(seconds), "--only", *names),
        )
        storm = await _gaps(client, time.monotonic() + seconds)
        code = await attacking.wait()
        health = (await client.get("/health")).json()
    ratio = _show("storm", storm) / _show("quiet", quiet)
    print(f"p99 of the gaps under the storm is {ratio:.1f} times that of the quiet server")
    lives = health["status"] == "ok" and not health["num_restarts"]
    return 0 if ratio <= _GOAL and code == 0 and lives else 1


async def _gaps(client: httpx.AsyncClient, until_s: float) -> list[float]:
    gaps: list[float] = []
    while time.monotonic() < until_s:
        gaps += await _stream(client)
    return gaps


async def _stream(client: httpx.AsyncClient) -> list[float]:
    """The gaps of one stream, which must be complete."""
    marks, usage = [], {}
    async with client.stream("POST", "/v1/completions", json=_BODY) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                marks.append(time.monotonic())
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    if usage.get("completion_tokens") != _NUM_TOKENS:
        raise RuntimeError(f"a stream of {_NUM_TOKENS} tokens ended with usage {usage}")
    return [after - before for before, after in itertools.pairwise(marks)]


async def _attack(url: str, seconds: float, names: list[str]) -> None:
    """Every attack again and again; the last round of each is waited for."""
    until_s = time.monotonic() + seconds
    counts: Counter[tuple[str, int]] = Counter()

    async def repeat(client: httpx.AsyncClient, name: str) -> None:
        while time.monotonic() < until_s:
            counts.update((name, status) for status in await ATTACKS[name](client))

    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as client:
        await asyncio.gather(*(repeat(client, name) for name in names))
    for (name, status), count in sorted(counts.items()):
        print(f"{name}: {count} x {status}", flush=True)
    if any(status == 500 for _, status in counts):
        raise RuntimeError("an attacker was answered with 500")


def _show(name: str, gaps: list[float]) -> float:
    cuts = statistics.quantiles(gaps, n=100)
    print(
        f"{name}: {len(gaps)} gaps, p50 {cuts[49] * 1e3:.1f} ms, p99 {cuts[98] * 1e3:.1f} ms, "
        f"longest {max(gaps) * 1e3:.1f} ms",
        flush=True,
    )
    return cuts[98]


if __name__ == "__main__":
    sys.exit(main())
