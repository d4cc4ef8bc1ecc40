"""`python -m benchmarks.following`: what a page that follows the timeline costs the engine.

One stream decodes a token a step, in short turns without and with a client that reads
`/debug/steps?follow=true`, as the page's timeline does; each pair begins with the kind with which
the one before it ended. Prints the steps per second of each turn, the medians, and by how much a
step is longer while a client follows: the median of the pairs, with the range that holds it in 95
of 100 cases (by the order of the values). The exit code is 1 if all of that range is above the
goal, which is one percent at 1,000 steps per second: 10 microseconds.

The client that follows is a process of a lower priority of the machine's, as if it were another
machine.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx

from benchmarks.machine import describe_machine
from quickstep.bench.server_process import ServerProcess

_GOAL_US = 10.0
_NORMAL_95 = 1.96  # standard deviations
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
    parser.add_argument("--tokens", type=int, default=400, help="of a turn")
    parser.add_argument("--pairs", type=int, default=100)
    args = parser.parse_args()
    print(describe_machine())
    server = ServerProcess([args.model, "--max-model-len", str(args.tokens + 16)])
    server.start()
    try:
        _steps_per_s(server.url, args.tokens)  # the first one learns step times
        pairs = [_pair(server.url, args.tokens, number) for number in range(args.pairs)]
    finally:
        server.stop()
    added_us = sorted(1e6 / following - 1e6 / quiet for quiet, following in pairs)
    least, greatest = _range_of_median(added_us)
    quiet_per_s, following_per_s = (
        statistics.median(values) for values in zip(*pairs, strict=True)
    )
    print(
        f"{quiet_per_s:.0f} steps/s, {following_per_s:.0f} while a client follows; a step is "
        f"longer by {statistics.median(added_us):.1f} us ({least:.1f} - {greatest:.1f})"
    )
    return 0 if least <= _GOAL_US else 1


def _range_of_median(values: Sequence[float]) -> tuple[float, float]:
    """The range that holds the median in 95 of 100 cases; `values` are sorted.

    By the binomial distribution's normal approximation: no distribution of the values is assumed.
    """
    width = _NORMAL_95 * math.sqrt(len(values)) / 2
    middle = len(values) / 2
    first, last = math.floor(middle - width), math.ceil(middle + width)
    return values[max(0, first)], values[min(len(values) - 1, last)]


def _pair(url: str, num_tokens: int, number: int) -> tuple[float, float]:
    """Steps per second without and with a client that follows; `number` says which is first."""
    if number % 2:
        following = _following(url, num_tokens)
        quiet = _steps_per_s(url, num_tokens)
    else:
        quiet = _steps_per_s(url, num_tokens)
        following = _following(url, num_tokens)
    print(f"{quiet:.0f} {following:.0f}", flush=True)
    return quiet, following


def _following(url: str, num_tokens: int) -> float:
    """Steps per second while a client follows."""
    command = [sys.executable, "-c", _READ, f"{url}/debug/steps?follow=true&last_s=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        client.stdout.readline()
        steps_per_s = _steps_per_s(url, num_tokens)
        client.kill()
    return steps_per_s


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
