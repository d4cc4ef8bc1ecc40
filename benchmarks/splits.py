"""`python -m benchmarks.splits MODEL`: each way to divide a model's work, live against simulated.

For one engine, ranks, stages, replicas, and prompts on another engine: `quickstep calibrate`
measures step times, `quickstep serve` serves Poisson arrivals, and `quickstep simulate` gets the
same arrivals with what was measured before. Prints medians and p90 of the first token, of the time
per token and the output tokens a second of both, with the error of the simulation; of stages also
the part of the time that they waited. The exit code is 1 if an error is larger than `--within`.

    --rate 1.5 --seconds 40 --repeats 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles

import httpx
import msgspec

from benchmarks.machine import describe_machine
from quickstep.bench.server_process import ServerProcess
from quickstep.cli.main import main as quickstep
from quickstep.engine.machine import usable_cores

_VOCABULARY = range(4, 250)
_GOAL = 0.15
_BUBBLE_GOAL = 0.05  # of the time


class _Way(msgspec.Struct, frozen=True):
    """Flags of `calibrate` and `serve`, and those of `simulate` for the same."""

    calibrated: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    simulated: tuple[str, ...] = ()
    num_engines: int = 1

    @property
    def threads(self) -> tuple[str, str]:
        """The flag for the threads of each engine."""
        return "--threads", str(max(1, usable_cores() // self.num_engines))


_PREDICTED = ("--router", "predicted")
WAYS = {
    "one": _Way(),
    "ranks": _Way(("-tp", "2"), ("-tp", "2"), ("-tp", "2")),
    "stages": _Way(("-pp", "2"), ("-pp", "2"), ("-pp", "2")),
    "replicas": _Way((), ("-dp", "2"), ("--replicas", "2", *_PREDICTED), 2),
    "phases": _Way(
        (),
        ("--prefill", "1", "--decode", "1"),
        ("--prefill-replicas", "1", "--decode-replicas", "1", *_PREDICTED),
        2,
    ),
}


class _Sent(msgspec.Struct, frozen=True):
    """A request: when, its prompt, and how many tokens it generates."""

    at_s: float
    prompt: tuple[int, ...]
    num_outputs: int


class _Figures(msgspec.Struct, frozen=True):
    """Milliseconds, and tokens a second; `bubble` is a part of the time."""

    first_token_p50: float
    first_token_p90: float
    per_token_p50: float
    per_token_p90: float
    tokens_per_s: float
    bubble: float = 0.0


def _requests(rate: float, seconds: float, seed: int) -> list[_Sent]:
    rng, at_s, sent = Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        prompt = tuple(rng.choices(_VOCABULARY, k=rng.randint(60, 300)))
        sent.append(_Sent(at_s, prompt, rng.randint(16, 80)))
    return sent


async def _live(url: str, sent: Sequence[_Sent]) -> _Figures:
    first_ms: list[float] = []
    token_ms: list[float] = []
    ends: list[float] = []
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(request: _Sent, start_s: float) -> None:
            await asyncio.sleep(max(0.0, start_s + request.at_s - loop.time()))
            body = {
                "prompt": list(request.prompt),
                "max_tokens": request.num_outputs,
                "ignore_eos": True,
                "temperature": 0.0,
                "stream": True,
                "return_token_ids": True,
            }
            begun_s, first_s = time.monotonic(), None
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise RuntimeError(f"status {response.status_code}")
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and first_s is None:
                        first_s = time.monotonic()
            assert first_s is not None, "it has output"
            end_s = time.monotonic()
            first_ms.append(1e3 * (first_s - begun_s))
            token_ms.append(1e3 * (end_s - first_s) / (request.num_outputs - 1))
            ends.append(loop.time() - start_s)

        await one(_Sent(0.0, sent[0].prompt, 4), loop.time())  # pages and caches
        first_ms.clear(), token_ms.clear(), ends.clear()
        before_s = await _bubble_s(client)
        start_s = loop.time()
        await asyncio.gather(*(one(request, start_s) for request in sent))
        bubble_s = await _bubble_s(client) - before_s
    return _figures(first_ms, token_ms, sent, max(ends), bubble_s / max(ends))


async def _bubble_s(client: httpx.AsyncClient) -> float:
    """What the stages of a pipeline have waited so far; 0 without any."""
    for line in (await client.get("/metrics")).text.splitlines():
        if line.startswith("quickstep:engine_bubble_seconds_total"):
            return float(line.split()[-1])
    return 0.0


def _figures(
    first_ms: Sequence[float],
    token_ms: Sequence[float],
    sent: Sequence[_Sent],
    seconds: float,
    bubble: float,
) -> _Figures:
    firsts, tokens = (quantiles(of, n=10, method="inclusive") for of in (first_ms, token_ms))
    num_tokens = sum(request.num_outputs for request in sent)
    return _Figures(firsts[4], firsts[8], tokens[4], tokens[8], num_tokens / seconds, bubble)


def _simulated(model: Sequence[str], way: _Way, trace: Path) -> _Figures:
    rows = trace.with_suffix(".csv")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        flags = ("--trace", str(trace), "--csv", str(rows), "--json", *way.simulated)
        assert quickstep(["simulate", *model, *flags]) == 0
    (run,) = json.loads(printed.getvalue())
    figures = run["figures"]
    first, token = figures["ttft_s"], figures["tpot_s"]
    with rows.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    end_s = max(float(line["finished_s"]) for line in lines)
    begun_s = min(float(line["arrival_s"]) for line in lines)
    num_tokens = sum(int(line["num_output_tokens"]) for line in lines)
    return _Figures(
        1e3 * first["p50"],
        1e3 * first["p90"],
        1e3 * token["p50"],
        1e3 * token["p90"],
        num_tokens / (end_s - begun_s),
        figures["bubble"],
    )


def _compared(
    name: str, live: Sequence[_Figures], simulated: Sequence[_Figures]
) -> dict[str, float]:
    """Print a row for each figure; returns the errors."""
    errors = {}
    for field in _Figures.__struct_fields__:
        here = [getattr(figures, field) for figures in live]
        there = [getattr(figures, field) for figures in simulated]
        if not any(here):
            continue
        one, other = median(here), median(there)
        error = other - one if field == "bubble" else other / one - 1.0
        errors[field] = error
        digits = 3 if field == "bubble" else 1
        print(
            f"{name:9} {field:16} {one:9.{digits}f} ({min(here):.{digits}f}-{max(here):.{digits}f})"
            f" {other:9.{digits}f}  {error:+.1%}",
            flush=True,
        )
    return errors


def main() -> int:
    """Print live and simulated figures; 1 if an error is too large."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.splits")
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rate", type=float, default=1.5)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--calibrate-seconds", default="30")
    parser.add_argument("--within", type=float, default=_GOAL)
    args = parser.parse_args()
    model = [args.model, *(("-q", args.quantization) if args.quantization else ())]
    ways = {name: WAYS[name] for name in args.ways.split(",")}
    print(describe_machine())
    print(
        f"{' '.join(model)}: {args.rate:g} requests/s for {args.seconds:g} s, {args.repeats} "
        "repeats in turn; median (least-most), simulated, error"
    )
    live: dict[str, list[_Figures]] = {name: [] for name in ways}
    simulated: dict[str, list[_Figures]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QUICKSTEP_CACHE_DIR"] = folder
        for split, threads in {(way.calibrated, way.threads) for way in ways.values()}:
            with contextlib.redirect_stdout(io.StringIO()):
                seconds = ("--seconds", args.calibrate_seconds)
                assert quickstep(["calibrate", *model, *split, *threads, *seconds]) == 0
        for repeat in range(args.repeats):
            sent = _requests(args.rate, args.seconds, repeat)
            trace = Path(folder) / f"{repeat}.jsonl"
            lines = [
                json.dumps(
                    {
                        "timestamp": 1e3 * request.at_s,
                        "input_length": len(request.prompt),
                        "output_length": request.num_outputs,
                    }
                )
                for request in sent
            ]
            trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
            for name, way in ways.items():
                # greedy outputs of random prompts repeat, so that drafts would be accepted
                flags = (*way.served, *way.threads, "--speculative-method", "off")
                flags += ("--max-model-len", "1024")
                server = ServerProcess([*model, *flags])
                server.start()
                try:
                    live[name].append(asyncio.run(_live(server.url, sent)))
                finally:
                    server.stop()
                simulated[name].append(_simulated(model, way, trace))
    is_met = True
    for name in ways:
        for field, error in _compared(name, live[name], simulated[name]).items():
            is_met &= abs(error) <= (_BUBBLE_GOAL if field == "bubble" else args.within)
    print(f"all within {args.within:.0%}: {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
