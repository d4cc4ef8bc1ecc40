"""`python -m benchmarks.lora_race`: adapters are loaded, replaced and unloaded while streams run.

A part of the operations is invalid (a missing directory, another shape, a name that is not loaded).
Every answer must be the one of the adapter version that its request began with, byte for byte, and
at the end nothing may be left in memory but what requests may name.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.lora import write_adapters
from quickstep.config import CacheConfig, EngineConfig, LoadConfig, LoRAConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.errors import RequestError
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.types import Request, SamplingParams

__all__ = ["RaceCounts", "race"]

_NAMES = ("first", "second", "third", "fourth", "fifth")
_INVALID = 0.1


class RaceCounts(msgspec.Struct):
    """What happened. `wrong` answers and `leaked` adapters should be 0."""

    operations: Counter[str] = msgspec.field(default_factory=Counter)
    answers: int = 0
    wrong: int = 0
    leaked: int = 0


async def race(
    engine: Engine, versions: Sequence[Path], num_operations: int, num_streams: int, seed: int
) -> RaceCounts:
    """Run the operations against streams, on an engine that has been started."""
    rng = random.Random(seed)
    counts = RaceCounts()
    prompt = tuple(engine.tokenizer.encode("def add(first, second):\n    return"))
    loaded: dict[str, Path] = {}
    expected: dict[Path, list[int]] = {}
    for version in versions:
        await engine.load_adapter("expected", str(version))
        expected[version] = await _answer(engine, prompt, "expected")
    await engine.unload_adapter("expected")
    is_over = False

    async def stream(number: int) -> None:
        names = random.Random(number)
        while not is_over:
            name = names.choice(_NAMES)
            version = loaded.get(name)
            if version is None:
                await asyncio.sleep(0.001)
                continue
            answer = await _answer(engine, prompt, name, names.choice((0, 0, 0, -5, 5)))
            counts.answers += 1
            counts.wrong += answer != expected[version]

    streams = [asyncio.create_task(stream(number)) for number in range(num_streams)]
    for _ in range(num_operations):
        name = rng.choice(_NAMES)
        if rng.random() < _INVALID:
            counts.operations["refused"] += await _is_refused(engine, rng, name, versions[0])
        elif name in loaded and rng.random() < 0.3:
            del loaded[name]
            await engine.unload_adapter(name)
            counts.operations["unloaded"] += 1
        else:
            version = rng.choice(versions)
            what = "replaced" if name in loaded else "loaded"
            loaded.pop(name, None)  # its requests may get either version until it is loaded
            await engine.load_adapter(name, str(version))
            loaded[name] = version
            counts.operations[what] += 1
        await asyncio.sleep(rng.choice((0, 0, 0.002)))
    is_over = True
    await asyncio.gather(*streams)
    for name in loaded:
        await engine.unload_adapter(name)
    for _ in range(100):  # the engine frees what nobody uses when it next turns
        await asyncio.sleep(0.01)
        adapters = engine.stats().scheduler.adapters
        counts.leaked = 0 if adapters is None else adapters.num_resident
        if not counts.leaked:
            break
    return counts


async def _answer(
    engine: Engine, prompt: tuple[int, ...], adapter: str, priority: int = 0
) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    stream = engine.stream(Request("", prompt, sampling, adapter=adapter, priority=priority))
    return [token async for delta in stream for token in delta.token_ids]


async def _is_refused(engine: Engine, rng: random.Random, name: str, version: Path) -> bool:
    """Whether an operation that cannot be done is refused, and changes nothing."""
    try:
        match rng.choice(("absent", "not-loaded", "no-adapter")):
            case "absent":
                await engine.load_adapter(name, str(version / "absent"))
            case "not-loaded":
                await engine.unload_adapter("no one loaded it")
            case _:
                await engine.load_adapter(name, str(version.parent))
    except RequestError:
        return True
    return False


def main() -> int:
    """Run a race on the bundled model; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora_race")
    parser.add_argument("--operations", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--streams", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--max-loras", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    args = parser.parse_args()
    load = LoadConfig(model="demo", device="cpu")
    with tempfile.TemporaryDirectory() as directory:
        base = find_checkpoint(load).path
        targets = ("q_proj", "v_proj", "up_proj", "down_proj")
        versions = write_adapters(base, Path(directory), 8, 8, targets)
        config = EngineConfig(
            load=load,
            cache=CacheConfig(num_blocks=400),
            lora=LoRAConfig(max_loras=args.max_loras),
        )

        async def run() -> RaceCounts:
            engine = open_engine(config)
            await engine.start()
            try:
                return await race(engine, versions, args.operations, args.streams, args.seed)
            finally:
                await engine.stop()

        counts = asyncio.run(run())
    print(msgspec.json.encode(counts).decode())
    return 1 if counts.wrong or counts.leaked else 0


if __name__ == "__main__":
    sys.exit(main())
