"""KV blocks that survive their engine, in files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.types import Delta, Request, SamplingParams, SequenceTimings

PROMPT = tuple(range(20, 450))
NUM_BLOCKS = len(PROMPT) // 16


def engine_for(directory: Path | None, num_blocks: int = 64, **options: Any) -> Engine:
    return open_engine(
        EngineConfig(
            load=LoadConfig("demo", num_threads=1),
            cache=CacheConfig(num_blocks=num_blocks, kv_cache_dir=directory, **options),
            scheduler=SchedulerConfig(),
            max_model_len=512,
            seed=0,
        )
    )


def run(test: Callable[[Engine], Coroutine[Any, Any, None]], engine: Engine) -> None:
    async def started() -> None:
        await engine.start()
        try:
            await test(engine)
        finally:
            await engine.stop()

    asyncio.run(started())


async def all_of(engine: Engine, prompt: tuple[int, ...], **fields: Any) -> list[Delta]:
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=4, logprobs=2)
    return [delta async for delta in engine.stream(Request("", prompt, sampling, **fields))]


def content(deltas: list[Delta]) -> tuple[object, ...]:
    return tuple((delta.token_ids, delta.logprobs) for delta in deltas)


def timings_of(deltas: list[Delta]) -> SequenceTimings:
    (timings,) = [delta.timings for delta in deltas if delta.timings is not None]
    return timings


def test_a_prefix_survives_a_restart_with_the_same_bits(tmp_path: Path) -> None:
    found: list[list[Delta]] = []

    async def test(engine: Engine) -> None:
        found.append(await all_of(engine, PROMPT))

    for directory in (None, tmp_path, tmp_path):
        run(test, engine_for(directory))
    expected, cold, restored = found
    assert content(cold) == content(restored) == content(expected)
    assert timings_of(cold).num_cached_tokens == 0
    times = timings_of(restored)
    assert times.num_cached_tokens == times.num_restored_tokens == NUM_BLOCKS * 16
    assert times.restore_s > 0.0
