"""Streams of two engine processes with the demo model: one of them is killed, no stream ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from msgspec.structs import replace

from quickstep.cluster.streams import ResumableStream
from quickstep.config import CacheConfig, EngineConfig, LoadConfig
from quickstep.engine.interface import ServedEngine
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.engine.remote.supervisor import RestartLimits
from quickstep.engine.stats import EngineState
from quickstep.types import Delta, Grammar, Request, SamplingParams

CONFIG = EngineConfig(
    load=LoadConfig(model="demo", device="cpu", num_threads=1),
    cache=CacheConfig(num_blocks=200),
    seed=0,
)
SCHEMA = Grammar.of_json_schema(
    {
        "type": "object",
        "properties": {"s": {"type": "string", "minLength": 30, "maxLength": 60}},
        "required": ["s"],
        "additionalProperties": False,
    }
)
SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=80, n=3, logprobs=2, stop=("\n\n\n",)),
    SamplingParams(temperature=1.0, seed=2, max_tokens=90, grammar=SCHEMA),
    SamplingParams(
        temperature=0.9, seed=3, max_tokens=90, frequency_penalty=0.3, prompt_logprobs=1
    ),
)


async def deltas_of(request: Request, engines: list[RemoteEngine], first: int) -> list[Delta]:
    """All deltas; the request begins on engine `first`, and moves to one that runs."""

    async def choose(_: Request, lost: Sequence[ServedEngine]) -> ServedEngine:
        for place in range(len(engines)):
            engine = engines[(first + place) % len(engines)]
            if engine.stats().state is EngineState.RUNNING and engine not in lost:
                return engine
        return engines[first]

    stream = await ResumableStream.open(request, choose)
    return [replace(delta, timings=None) async for delta in stream]


def by_sequence(deltas: list[Delta]) -> list[list[Delta]]:
    indices = sorted({delta.index for delta in deltas})
    return [[delta for delta in deltas if delta.index == index] for index in indices]


def test_a_killed_engine_breaks_no_stream_and_changes_no_bit() -> None:
    async def check() -> None:
        limits = RestartLimits(max_quick_deaths=9, first_delay_s=0.01, max_delay_s=0.01)
        engines = [RemoteEngine(CONFIG, restart_limits=limits) for _ in range(2)]
        await asyncio.gather(*(engine.open() for engine in engines))
        for engine in engines:
            await engine.start()
        try:
            prompt = tuple(engines[0].tokenizer.encode("def add(first, second):\n    return"))
            requests = [Request("", prompt, sampling) for sampling in SAMPLING]
            quiet = [by_sequence(await deltas_of(one, engines, 1)) for one in requests]
            streams = [asyncio.create_task(deltas_of(one, engines, 0)) for one in requests * 3]
            process_id = engines[0].process_id
            assert process_id is not None
            while engines[0].stats().scheduler.totals.num_output_tokens < 60:
                await asyncio.sleep(0.005)
            os.kill(process_id, signal.SIGKILL)
            found = [by_sequence(deltas) for deltas in await asyncio.gather(*streams)]
            assert found == quiet * 3
            assert engines[1].stats().scheduler.totals.num_requests > len(requests)
        finally:
            await asyncio.gather(*(engine.stop() for engine in engines))

    asyncio.run(check())
