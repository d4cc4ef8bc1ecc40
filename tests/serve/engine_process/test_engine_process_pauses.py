"""Readers that fall behind an engine in a process of its own: paused there, counted here."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import scripted_worker
from msgspec.structs import replace
from remote_run import LONG, ask, ends, read, run, until

from quickstep.config import StreamConfig
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.engine.stream import Stream
from quickstep.types import FinishReason, SamplingParams


@pytest.fixture(autouse=True)
def few_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of `run` let 8 deltas wait."""
    whole = scripted_worker.config

    def bounded(path: Path, **scheduler: int) -> scripted_worker.EngineConfig:
        return replace(whole(path, **scheduler), streams=StreamConfig(max_unread_deltas=8))

    monkeypatch.setattr(scripted_worker, "config", bounded)


async def until_held(engine: RemoteEngine, num_paused: int = 1) -> None:
    await until(lambda: engine.stats().scheduler.num_paused == num_paused)
    await until(lambda: engine.stats().num_steps_in_flight == 0)


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_nobody_reads_stops_and_continues_with_its_reader(tmp_path: Path, n: int) -> None:
    async def test(engine: RemoteEngine) -> None:
        stream = ask(engine, "abc", replace(LONG, n=n, max_tokens=240))
        await until_held(engine, n)
        assert engine.stats().scheduler.totals.num_output_tokens < n * 240
        assert engine.stats().stalled_s == 0.0
        made = engine.stats().scheduler.totals.num_output_tokens
        assert len(await read(ask(engine, "de", SamplingParams(max_tokens=5)))) == 5
        # the engine sends its state later than the last token
        await until(lambda: engine.stats().scheduler.totals.num_output_tokens >= made + 5)
        await until_held(engine, n)
        assert engine.stats().scheduler.totals.num_output_tokens == made + 5
        texts = [""] * n
        async for delta in stream:
            texts[delta.index] += delta.text
        assert texts == ["abc" * 80] * n

    run(tmp_path, test, max_num_seqs=4)


def test_leaving_aborting_and_deadlines_end_it_where_it_is_paused(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        late = ask(engine, "abc", LONG, timeout_s=0.2)
        left = ask(engine, "abc", LONG)
        aborted = ask(engine, "abc", LONG)
        await until(lambda: engine.stats().scheduler.num_paused >= 2)
        await left.aclose()
        engine.abort(aborted.request_id)
        assert await ends(aborted) == [(FinishReason.ABORTED, "")]
        assert (await ends(late))[0][0] in (FinishReason.DEADLINE, FinishReason.MAX_TOKENS)
        await until(lambda: engine.stats().num_requests == 0)
        await until(lambda: engine.stats().scheduler.blocks.num_used == 0)

    run(tmp_path, test)


def test_a_paused_stream_ends_with_the_engine_that_dies(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        stream = ask(engine, "abc", LONG)
        await until_held(engine)
        os.kill(engine.process_id or 0, signal.SIGKILL)
        await until(lambda: engine.stats().num_restarts == 1)
        assert (await ends(stream))[0][0] is FinishReason.ERROR
        await until(lambda: engine.stats().state.value == "running")
        assert engine.stats().scheduler.num_paused == 0
        assert len(await read(ask(engine, "ab", SamplingParams(max_tokens=5)))) == 5

    run(tmp_path, test)


def test_many_readers_that_doze_get_what_they_would_get_awake(tmp_path: Path) -> None:
    async def doze(stream: Stream, number: int) -> str:
        parts = []
        async for delta in stream:
            parts.append(delta.text)
            for _ in range(number % 7):
                await asyncio.sleep(0)
        return "".join(parts)

    async def test(engine: RemoteEngine) -> None:
        streams = [ask(engine, f"<{number}>", LONG) for number in range(12)]
        await until(lambda: engine.stats().scheduler.num_paused > 0)
        texts = await asyncio.gather(*(doze(one, place) for place, one in enumerate(streams)))
        assert texts == [(f"<{number}>" * 200)[:200] for number in range(12)]
        await until(lambda: engine.stats().scheduler.blocks.num_used == 0)

    run(tmp_path, test, max_num_seqs=3)
