"""`python -m benchmarks.following`: what a page that follows the timeline costs the engine.

One stream decodes a token a step, in turns without and with a client that reads
`/debug/steps?follow=true`, as the page's timeline does. Prints the steps per second of each turn,
the medians, and the ratio of the medians of the pairs. The exit code is 1 if the goal is missed:
with the follower at least 0.99 of the steps per second.

The client that follows is a process of a lower priority of the machine's, as if it were another
machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import httpx

from benchmarks.machine import describe_machine
from quickstep.bench.server_process import ServerProcess

_GOAL = 0.99
_PATIENCE_S = 120.0
_READ = (
    "import os, sys, urllib.request\n"
    "os.nice(10)\n"
    "stream = urllib.request.urlopen(sys.argv[1])\n"
    "print('follows', flush=True)\n"
    "while stream.read1(65536): pass\n"
)


def main() -> int:
    """Measure and print. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.following")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=1500, help="of a turn")
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    print(describe_machine())
    server = ServerProcess([args.model, "--max-model-len", str(args.tokens + 16)])
    server.start()
    try:
        _steps_per_s(server.url, args.tokens)  # the first one learns step times
        pairs = [_pair(server.url, args.tokens) for _ in range(args.pairs)]
    finally:
        server.stop()
    ratio = statistics.median(following / quiet for quiet, following in pairs)
    quiet_per_s, following_per_s = (
        statistics.median(values) for values in zip(*pairs, strict=True)
    )
    print(f"{quiet_per_s:.0f} steps/s, {following_per_s:.0f} while a client follows: {ratio:.3f}")
    return 0 if ratio >= _GOAL else 1


def _pair(url: str, num_tokens: int) -> tuple[float, float]:
    """Steps per second without and with a client that follows."""
    quiet = _steps_per_s(url, num_tokens)
    command = [sys.executable, "-c", _READ, f"{url}/debug/steps?follow=true&last_s=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        client.stdout.readline()
        following = _steps_per_s(url, num_tokens)
        client.kill()
    print(f"{quiet:.0f} {following:.0f}", flush=True)
    return quiet, following


def _steps_per_s(url: str, num_tokens: int) -> float:
    body = {
        **{"prompt": f"import os  # {time.time_ns()}\n", "max_tokens": num_tokens - 32},
        **{"speculation": False, "ignore_eos": True, "temperature": 0.0},
    }
    since_s = time.perf_counter()
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=_PATIENCE_S).json()
    seconds = time.perf_counter() - since_s
    return float(answer["usage"]["completion_tokens"]) / seconds


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
