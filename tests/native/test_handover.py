"""A request begins on one engine and continues on another one, with the KV of its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from late_copies import use_late_copies
from msgspec.structs import replace

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.core.resources.block_pool import ChainRoot
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.engine.stream import Stream
from quickstep.types import Delta, Request, Resumed, SamplingParams

PROMPT = tuple(range(20, 250))


@pytest.fixture(autouse=True, params=["host", "device"])
def where_blocks_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, or moved as those of a device."""
    if request.param == "device":
        use_late_copies(monkeypatch)


def engine_for(num_blocks: int = 64, **options: Any) -> Engine:
    return open_engine(
        EngineConfig(
            load=LoadConfig("demo", num_threads=1),
            cache=CacheConfig(num_blocks=num_blocks),
            scheduler=SchedulerConfig(transfers_kv=True, **options),
            max_model_len=512,
            seed=0,
        )
    )


async def all_of(stream: Stream) -> list[Delta]:
    return [delta async for delta in stream]


def tokens_of(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


async def first_tokens(engine: Engine, request: Request) -> tuple[Resumed, ...]:
    """The first token of each sequence; the request then leaves the engine."""
    num, found = request.sampling.n, dict[int, tuple[int, ...]]()
    stream = engine.stream(request)
    async for delta in stream:
        assert delta.finish_reason is None
        found[delta.index] = (*found.get(delta.index, ()), *delta.token_ids)
        if len(found) == num:
            break
    await asyncio.sleep(0.02)  # no more tokens come here
    engine.abort(request.request_id)
    assert all(len(token_ids) == 1 for token_ids in found.values())
    return tuple(Resumed(index, found[index]) for index in sorted(found))


def run(test: Callable[..., Coroutine[Any, Any, None]], *engines: Engine) -> None:
    async def started() -> None:
        for engine in engines:
            await engine.start()
        try:
            await test(*engines)
        finally:
            for engine in engines:
                await engine.stop()

    asyncio.run(started())


def is_idle(engine: Engine) -> bool:
    return engine.stats().scheduler.blocks.num_used == 0


async def until_idle(*engines: Engine) -> None:
    async with asyncio.timeout(10):
        while not all(map(is_idle, engines)):
            await asyncio.sleep(0.005)


async def until_offered(engine: Engine) -> None:
    """A request that comes before the offer of its blocks does not wait for them."""
    transfers = engine._scheduler.held.transfers
    assert transfers is not None
    async with asyncio.timeout(10):
        while not (transfers.are_open or engine.stats().scheduler.blocks.num_cached):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("chunk", [2048, 48])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=20, temperature=0.9, seed=4, logprobs=2),
        SamplingParams(max_tokens=12, n=3, temperature=0.7, seed=5, repetition_penalty=1.3),
        SamplingParams(max_tokens=16, temperature=0.0, frequency_penalty=0.5),
    ],
    ids=["sampled", "three", "greedy"],
)
def test_the_bits_are_those_of_one_engine(sampling: SamplingParams, chunk: int) -> None:
    async def test(first: Engine, second: Engine, single: Engine) -> None:
        request = Request("", PROMPT, sampling)
        expected = await all_of(single.stream(request))
        assert second.kv_address is not None
        begun = replace(request, request_id="r", seed=0, handover=second.kv_address)
        resumed = await first_tokens(first, begun)
        again = replace(begun, handover=None, resumed=resumed)
        await until_offered(second)
        deltas = await all_of(second.stream(again))
        for index in range(sampling.n):
            complete = [*resumed[index].token_ids, *tokens_of(deltas, index)]
            assert complete == tokens_of(expected, index)
        ended = [delta.timings for delta in deltas if delta.timings is not None]
        assert {timings.num_cached_tokens for timings in ended} == {len(PROMPT) // 16 * 16}
        await until_idle(first, second)

    engines = [engine_for(max_num_batched_tokens=chunk) for _ in range(2)]
    run(test, *engines, engine_for())


def test_what_both_engines_spent_is_in_the_timings_of_the_end() -> None:
    """The prompt is charged once, with the prefix that the first engine had cached."""

    async def test(first: Engine, second: Engine) -> None:
        sampling = SamplingParams(max_tokens=8, n=2, seed=1, temperature=1.0)
        await all_of(first.stream(Request("", PROMPT[:64], SamplingParams(max_tokens=1))))
        request = Request("r", PROMPT, sampling, handover=second.kv_address)
        begun: dict[int, Delta] = {}
        async for delta in first.stream(request):
            assert delta.finish_reason is None
            begun[delta.index] = delta
            if len(begun) == 2:
                break
        first.abort("r")
        spent = [begun[index].timings for index in range(2)]
        resumed = tuple(
            Resumed(
                index,
                begun[index].token_ids,
                num_cached_tokens=timings.num_cached_tokens,
                device_s=timings.device_s,
            )
            for index, timings in enumerate(spent)
            if timings is not None
        )
        deltas = await all_of(second.stream(replace(request, handover=None, resumed=resumed)))
        ends = {delta.index: delta.timings for delta in deltas if delta.timings is not None}
        here_s = 0.0
        for index, part in enumerate(resumed):
            end = ends[index]
            assert part.device_s > 0.0
            assert part.num_cached_tokens == end.num_cached_tokens
            here_s += end.device_s - part.device_s
        assert resumed[0].num_cached_tokens == 64
        steps = second.step_log.steps
        assert here_s == pytest.approx(sum(step.decode_s + step.prefill_s for step in steps))
        await until_idle(first, second)

    run(test, engine_for(), engine_for())


def test_a_request_waits_for_its_blocks_and_goes_on_without_them() -> None:
    """The transfer is open when the request arrives, and ends early: the rest is computed."""

    async def test(first: Engine, second: Engine) -> None:
        sampling = SamplingParams(max_tokens=8, seed=1, temperature=1.0)
        request = Request("r", PROMPT, sampling, handover=second.kv_address)
        resumed = await first_tokens(first, replace(request, handover=None, request_id="x"))
        expected = tokens_of(await all_of(first.stream(Request("", PROMPT, sampling))))
        transfers = second._scheduler.held.transfers
        assert transfers is not None
        assert transfers.begin_receiving("r", ChainRoot(), PROMPT) is not None
        reading = asyncio.create_task(
            all_of(second.stream(replace(request, handover=None, resumed=resumed)))
        )
        await asyncio.sleep(0.1)
        assert not reading.done()
        second._scheduler.arrived(transfers.end_receiving("r"), 0.0)
        second._wakeup.set()
        deltas = await asyncio.wait_for(reading, 10)
        assert [*resumed[0].token_ids, *tokens_of(deltas)] == expected
        await until_idle(first, second)

    run(test, engine_for(), engine_for())


def test_without_room_nothing_is_transferred() -> None:
    async def test(first: Engine, second: Engine) -> None:
        sampling = SamplingParams(max_tokens=8, seed=1, temperature=1.0)
        request = Request("r", PROMPT, sampling, handover=second.kv_address)
        resumed = await first_tokens(first, request)
        again = replace(request, handover=None, resumed=resumed)
        (*_, last) = await all_of(second.stream(again))
        assert last.timings is not None and last.timings.num_cached_tokens == 0
        await until_idle(first, second)

    run(test, engine_for(), engine_for(num_blocks=40))
