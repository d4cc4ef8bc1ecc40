"""`python -m benchmarks.models [--model MODEL]`: engines of several models on one machine.

Two engines of one model, each in a process with threads for all cores, as a server has them:

    next to idle   output tokens per second while the other engine is in memory without requests,
                   against those while it sleeps, in turns; the ratio of medians
    busy pair      both generate: tokens per second together against one engine, with threads for
                   all cores each, and with half of them each
    wake           seconds from `wake` to ready, with a process that waits and without

Rounds take turns, so that other load on the machine meets all of them. The figures are medians with
the first and the last decile.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from quickstep.config import CacheConfig, EngineConfig, LoadConfig
from quickstep.engine.machine import usable_cores
from quickstep.engine.remote.child import StandbyProcess
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.types import Request, SamplingParams

_PROMPT = tuple(range(20, 84))
_MIN_ROUNDS = 3


def main() -> int:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization")
    parser.add_argument("--tokens", type=int, default=256, help="of an output")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    if args.rounds < _MIN_ROUNDS:
        parser.error(f"--rounds is {args.rounds}, it must be at least {_MIN_ROUNDS}")
    asyncio.run(_measure(args))
    return 0


async def _measure(args: argparse.Namespace) -> None:
    standby = StandbyProcess()
    try:
        await _next_to_idle(args)
        await _busy_pair(args)
        await _wake(args, standby)
    finally:
        standby.end()


def _engine(
    args: argparse.Namespace, num_threads: int | None = None, standby: StandbyProcess | None = None
) -> RemoteEngine:
    load = LoadConfig(args.model, quantization=args.quantization, num_threads=num_threads)
    config = EngineConfig(load=load, cache=CacheConfig(num_blocks=256), max_model_len=1024)
    return RemoteEngine(config, standby=standby)


async def _open(*engines: RemoteEngine) -> None:
    for engine in engines:
        await engine.open()
        await engine.start()


async def _stop(*engines: RemoteEngine) -> None:
    for engine in engines:
        await engine.stop()


async def _tokens_per_s(args: argparse.Namespace, *engines: RemoteEngine) -> float:
    """Of all engines together, each with one request at a time."""
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=0.0)

    async def generate(engine: RemoteEngine) -> int:
        stream = engine.stream(Request("", _PROMPT, sampling))
        return sum([len(delta.token_ids) async for delta in stream])

    since_s = time.perf_counter()
    counts = await asyncio.gather(*map(generate, engines))
    return sum(counts) / (time.perf_counter() - since_s)


async def _next_to_idle(args: argparse.Namespace) -> None:
    busy, other = _engine(args), _engine(args)
    await _open(busy, other)
    alone: list[float] = []
    next_to_idle: list[float] = []
    for _ in range(args.rounds):
        next_to_idle.append(await _tokens_per_s(args, busy))
        await other.sleep()
        alone.append(await _tokens_per_s(args, busy))
        await other.wake()
        await _tokens_per_s(args, other)  # it has run, and has threads
    await _stop(busy, other)
    _print("one engine, the other asleep", alone, "tokens/s")
    _print("one engine, the other idle", next_to_idle, "tokens/s")
    print(f"{'ratio':<44}{statistics.median(next_to_idle) / statistics.median(alone):8.3f}")


async def _busy_pair(args: argparse.Namespace) -> None:
    cores = usable_cores()
    full = _engine(args), _engine(args)
    half = _engine(args, max(1, cores // 2)), _engine(args, max(1, cores // 2))
    await _open(*full, *half)
    one: list[float] = []
    shared: list[float] = []
    divided: list[float] = []
    for _ in range(args.rounds):
        one.append(await _tokens_per_s(args, full[0]))
        shared.append(await _tokens_per_s(args, *full))
        divided.append(await _tokens_per_s(args, *half))
    await _stop(*full, *half)
    _print(f"one engine of {cores} threads", one, "tokens/s")
    _print(f"two busy engines of {cores} threads", shared, "tokens/s")
    _print(f"two busy engines of {max(1, cores // 2)} threads", divided, "tokens/s")


async def _wake(args: argparse.Namespace, standby: StandbyProcess) -> None:
    for name, waiting in (("without a process that waits", None), ("with one", standby)):
        engine = _engine(args, standby=waiting)
        await _open(engine)
        seconds = []
        for _ in range(args.rounds):
            await engine.sleep()
            await asyncio.sleep(2.0)  # the process that waits has imported what it needs
            since_s = time.perf_counter()
            await engine.wake()
            seconds.append(time.perf_counter() - since_s)
        await _stop(engine)
        _print(f"wake {name}", seconds, "s", "{:8.3f}".format)


def _print(
    name: str, values: Sequence[float], unit: str, form: Callable[[float], str] = "{:8.1f}".format
) -> None:
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    spread = f"({form(tenths[0]).strip()} - {form(tenths[-1]).strip()})"
    print(f"{name:<44}{form(statistics.median(values))} {unit} {spread}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
