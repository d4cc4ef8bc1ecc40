"""Readers that fall behind: their requests are paused, bounded, and lose nothing."""

from __future__ import annotations

import asyncio

import pytest
from scripted_engine import answer, read, run

from quickstep.config import StreamConfig
from quickstep.engine.stream import Stream
from quickstep.errors import ConfigError
from quickstep.types import Delta, FinishReason, Request, SamplingParams, TokenLogprobs

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
FEW = StreamConfig(max_unread_deltas=8)


def params(max_tokens=200, **options):
    return SamplingParams(max_tokens=max_tokens, **options)


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


def is_held(engine):
    stats = engine.stats()
    return stats.scheduler.num_paused > 0 and not stats.num_steps_in_flight


@DEPTHS
@pytest.mark.parametrize("n", [1, 3])
def test_what_nobody_reads_is_bounded_and_the_rest_comes_when_they_do(depth, n):
    async def test(parts, engine):
        stream = engine.generate("abc", params(n=n))
        await until(lambda: is_held(engine))
        stats = engine.stats()
        assert stats.num_requests == 1
        assert stats.scheduler.num_paused == n
        # a step more than the bound, and what was in flight
        assert 8 < stats.scheduler.totals.num_output_tokens <= 8 + n * (1 + depth)
        found = await read(stream)
        for text, _, last in found.values():
            assert (text, last.finish_reason) == (("abc" * 67)[:200], FinishReason.MAX_TOKENS)
            assert last.timings.paused_s > 0
        assert engine.stats().scheduler.totals.num_pauses >= 1

    run(test, pipeline_depth=depth, streams=FEW)


def test_it_continues_at_half_of_the_bound():
    async def test(parts, engine):
        stream = engine.generate("abc", params())
        await until(lambda: is_held(engine))
        for _ in range(4):
            await anext(stream)
        assert engine.stats().scheduler.num_paused == 1
        await anext(stream)
        assert engine.stats().scheduler.num_paused == 0

    run(test, streams=FEW)


def test_the_bound_in_bytes_counts_text_and_logprobs():
    async def test(parts, engine):
        for options, least in (({}, 40), ({"logprobs": 2}, 7)):
            before = engine.stats().scheduler.totals.num_output_tokens
            async with engine.generate("abc", params(**options)):
                await until(lambda: is_held(engine))
                got = engine.stats().scheduler.totals.num_output_tokens - before
            assert least <= got <= least + 5

    run(test, streams=StreamConfig(max_unread_bytes=9 * 40))
    top = TokenLogprobs(1, -1.0, 1, ((1, -1.0), (2, -2.0)))
    delta = Delta(0, "ab", (1,), (top,), prompt_logprobs=(None, top), embedding=(1.0,))
    assert delta.num_bytes == 2 + 8 * (1 + 2 * 3 + 2 * 3 + 1)


def test_others_continue_and_take_the_room_of_who_does_not_read():
    async def test(parts, engine):
        slow = engine.generate("slow", params(40))
        await until(lambda: is_held(engine))
        quick = [engine.generate(f"quick{i}", params(40)) for i in range(6)]
        for number, (text, _) in enumerate(await asyncio.gather(*map(answer, quick))):
            assert text == (f"quick{number}" * 40)[:40]
        assert (await answer(slow))[0] == "slow" * 10
        assert engine.stats().scheduler.totals.num_preemptions > 0

    run(test, num_blocks=14, max_num_seqs=2, streams=FEW)


def test_an_engine_that_waits_for_readers_sleeps_and_is_not_stalled():
    async def test(parts, engine):
        stream = engine.generate("abc", params())
        await until(lambda: is_held(engine))
        turns, expire = [], parts.scheduler.expire
        parts.scheduler.expire = lambda now: turns.append(now) or expire(now)
        for _ in range(500):
            await asyncio.sleep(0)
        assert len(turns) <= 1
        parts.skipped_s += 1000.0
        stats = engine.stats()
        assert (stats.stalled_s, stats.busy_since_s) == (0.0, None)
        parts.executor.gate.clear()
        for _ in range(5):
            await anext(stream)
        assert 0.0 <= engine.stats().stalled_s < 500.0  # counted from the resumption
        parts.executor.gate.set()
        await stream.aclose()

    run(test, streams=FEW)


def test_a_deadline_ends_a_paused_request_with_what_it_has():
    async def test(parts, engine):
        stream = engine.generate("abc", params(), timeout_s=50.0)
        await until(lambda: is_held(engine))
        parts.skipped_s += 100.0
        other = engine.generate("x", params(2))  # wakes the loop, whose alarm rings in real time
        await answer(other)
        _, ids, last = (await read(stream))[0]
        assert last.finish_reason is FinishReason.DEADLINE
        assert 8 < len(ids) < 20

    run(test, streams=FEW)


def test_leaving_or_aborting_a_paused_request_frees_it_at_once():
    async def test(parts, engine):
        left, aborted = engine.generate("abc", params()), engine.generate("de", params())
        await until(lambda: engine.stats().scheduler.num_paused == 2)
        await left.aclose()
        engine.abort(aborted.request_id)
        assert engine.stats().num_requests == 0
        text, reason = await answer(aborted)
        assert reason is FinishReason.ABORTED
        assert ("de" * 99).startswith(text)
        await until(lambda: not engine.stats().num_steps_in_flight)
        parts.check_nothing_is_left()

    run(test, streams=FEW)


def test_a_drain_ends_what_stays_paused():
    async def test(parts, engine):
        stream = engine.generate("abc", params())
        await until(lambda: is_held(engine))
        await engine.stop(drain_s=0.01)
        assert (await answer(stream))[1] is FinishReason.SHUTDOWN

    run(test, streams=FEW)


def test_without_bounds_nothing_is_paused():
    async def test(parts, engine):
        stream = engine.generate("abc", params(240))
        await until(lambda: not parts.scheduler.has_work())
        assert engine.stats().scheduler.totals.num_pauses == 0
        assert len((await answer(stream))[0]) == 240

    run(test, streams=None)


class Owner:
    """Notes what a stream asks for."""

    def __init__(self):
        self.calls = []

    def abort(self, request_id):
        self.calls.append("abort")

    def pause(self, request_id):
        self.calls.append("pause")

    def resume(self, request_id):
        self.calls.append("resume")


def test_a_request_that_has_ended_is_neither_paused_nor_resumed():
    async def whole():
        owner = Owner()
        stream = Stream(Request("r", (1,)), owner, StreamConfig(max_unread_deltas=2))
        stream.accept()
        for _ in range(3):
            stream.put(Delta(0, "a"))
        assert owner.calls == ["pause"]
        stream.put(Delta(0, "b", finish_reason=FinishReason.ABORTED))
        assert [delta.text async for delta in stream] == ["a", "a", "a", "b"]
        assert owner.calls == ["pause"]
        ended = Stream(Request("s", (1,)), owner, StreamConfig(max_unread_deltas=1))
        ended.put(Delta(0, "a"))
        ended.put(Delta(0, "b", finish_reason=FinishReason.EOS))
        assert owner.calls == ["pause"]

    asyncio.run(whole())


@pytest.mark.parametrize("name", ["max_unread_deltas", "max_unread_bytes"])
def test_bounds_below_one_are_refused(name):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is 0"):
        StreamConfig(**{name: 0})
