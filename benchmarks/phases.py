"""`python -m benchmarks.phases MODEL`: long prompts while streams decode, on one engine with all
threads, on two engines that divide them, and with prompts and outputs on different engines.

A few clients decode all the time; long prompts, of which no cache has a part, come one after the
other with pauses. Printed are the gaps between tokens of the streams (median, p99, longest), the
time to the first token of the prompts, and both kinds of tokens a second: medians of the repeats,
which run in turn. The exit code is 1 if divided prompts do not halve the p99 gap of one engine.

    --streams 4 --prompt-tokens 2000 --prompts 6 --repeats 3 --pause 0.5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import median, quantiles

import httpx
import msgspec

from benchmarks.machine import describe_machine
from quickstep.bench.server_process import ServerProcess

_VOCABULARY = range(5, 256)  # token ids of prompts, which every model has
_GOAL = 2.0
_SETUPS: dict[str, tuple[str, ...]] = {
    "one engine": ("--threads", "2"),
    "two engines": ("--threads", "1", "-dp", "2"),
    "divided": ("--threads", "1", "--prefill", "1", "--decode", "1"),
}


class _Figures(msgspec.Struct, frozen=True):
    """Seconds, and tokens a second of the streams and of the prompts."""

    gap_p50: float
    gap_p99: float
    gap_most: float
    first_token: float
    output_rate: float
    prompt_rate: float
    num_handovers: int


async def _stream(client: httpx.AsyncClient, seed: int, stop: asyncio.Event) -> list[float]:
    """Decode until `stop`; the times at which tokens came."""
    times: list[float] = []
    rng = Random(seed)
    while not stop.is_set():
        body = {
            "prompt": [rng.choice(_VOCABULARY) for _ in range(32)],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
            "temperature": 1.0,
            "seed": rng.randrange(1 << 30),
        }
        times.append(float("nan"))  # no gap from one request to the next
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
                if stop.is_set():
                    break
    return times


async def _prompt(client: httpx.AsyncClient, num_tokens: int, seed: int) -> float:
    """Seconds until the first token of a prompt."""
    rng = Random(-seed)
    body = {
        "prompt": [rng.choice(_VOCABULARY) for _ in range(num_tokens)],
        "max_tokens": 16,
        "ignore_eos": True,
        "stream": True,
        "seed": seed,
    }
    started_s, first_s = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices") and not first_s:
                first_s = time.perf_counter()
    return first_s - started_s


async def _measured(url: str, args: argparse.Namespace, seed: int) -> _Figures:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        stop = asyncio.Event()
        streams = [
            asyncio.create_task(_stream(client, seed * 100 + number, stop))
            for number in range(args.streams)
        ]
        await asyncio.sleep(2.0)  # the streams have begun
        started_s, first_tokens = time.perf_counter(), []
        for number in range(args.prompts):
            first_s = await _prompt(client, args.prompt_tokens, seed * 1000 + number + 1)
            first_tokens.append(first_s)
            await asyncio.sleep(args.pause)
        ended_s = time.perf_counter()
        stop.set()
        times = await asyncio.gather(*streams)
        health = (await client.get("/health")).json()
    gaps = [
        after - before
        for of_stream in times
        for before, after in pairwise(of_stream)
        if before >= started_s and after <= ended_s
    ]
    num_outputs = sum(started_s <= at_s <= ended_s for of_stream in times for at_s in of_stream)
    return _Figures(
        median(gaps),
        quantiles(gaps, n=100)[98],
        max(gaps),
        median(first_tokens),
        num_outputs / (ended_s - started_s),
        args.prompts * args.prompt_tokens / sum(first_tokens),
        health["num_handovers"],
    )


def _middle(runs: Sequence[_Figures], name: str) -> float:
    values: list[float] = [getattr(figures, name) for figures in runs]
    return median(values)


def main() -> int:
    """Print the figures of each setup."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phases")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quantization")
    args = parser.parse_args()
    print(describe_machine())
    print(
        f"{args.model}, {args.quantization or 'as stored'}: {args.streams} streams, {args.prompts} "
        f"prompts of {args.prompt_tokens} tokens, {args.repeats} repeats in turn"
    )
    found: dict[str, list[_Figures]] = {name: [] for name in _SETUPS}
    more = [] if args.quantization is None else ["--quantization", args.quantization]
    for repeat in range(args.repeats):
        for name, flags in _SETUPS.items():
            server = ServerProcess([args.model, *flags, *more, "--max-num-seqs", "16"])
            server.start()
            try:
                found[name].append(asyncio.run(_measured(server.url, args, repeat + 1)))
            finally:
                server.stop()
    print(f"{'':<14}{'gap p50':>9}{'p99':>9}{'longest':>9}{'first token':>13} ms", end="")
    print(f"{'out tok/s':>11}{'prompt tok/s':>14}{'handovers':>11}")
    for name, runs in found.items():
        gaps = [1e3 * _middle(runs, field) for field in ("gap_p50", "gap_p99", "gap_most")]
        first_ms = 1e3 * _middle(runs, "first_token")
        print(
            f"{name:<14}{gaps[0]:9.1f}{gaps[1]:9.1f}{gaps[2]:9.1f}{first_ms:13.1f}   "
            f"{_middle(runs, 'output_rate'):11.1f}{_middle(runs, 'prompt_rate'):14.1f}"
            f"{_middle(runs, 'num_handovers'):11.0f}"
        )
    pairs = zip(found["one engine"], found["divided"], strict=True)
    ratios = sorted(one.gap_p99 / divided.gap_p99 for one, divided in pairs)
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    print(f"p99 gap, one engine / divided: {median(ratios):.2f} ({spread}), goal {_GOAL}")
    return 0 if median(ratios) >= _GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
