"""Faults inside the engine: what they end, and that nobody is left waiting."""

from __future__ import annotations

import asyncio
import logging

import pytest
from scripted_engine import ScriptedEngine, answer, read, run

from quickstep.engine.stats import EngineState
from quickstep.errors import EngineError, StepOutOfMemory
from quickstep.types import FinishReason, SamplingParams

DEADLINE_S = 60


class Panic(BaseException):
    """What pyo3 raises for a panic in Rust is no Exception either."""


FAULTS = pytest.mark.parametrize("fault", [ValueError("planted"), Panic("planted")], ids=repr)


@pytest.fixture(autouse=True)
def quiet(caplog):
    with caplog.at_level(logging.CRITICAL, "quickstep.engine"):
        yield


def params(max_tokens=8, **options):
    return SamplingParams(max_tokens=max_tokens, **options)


def run_to_failure(test, **options):
    """Run `test(parts, engine)` against an engine that fails; whoever waits has an answer."""

    async def whole():
        parts = ScriptedEngine(**options)
        await parts.engine.start()
        await asyncio.wait_for(test(parts, parts.engine), DEADLINE_S)
        assert parts.engine.stats().state is EngineState.FAILED
        assert parts.engine.stats().num_requests == 0
        with pytest.raises(EngineError, match="failed and takes no requests"):
            parts.engine.generate("abc", params())
        parts.executor.gate.set()
        await parts.engine.stop()
        assert parts.executor.is_closed

    asyncio.run(whole())


@FAULTS
def test_a_broken_loop_fails_every_request_and_says_why(fault):
    async def test(parts, engine):
        def broken(now):
            raise fault

        streams = [engine.generate("abc", params(250)) for _ in range(3)]
        await anext(streams[0])
        parts.scheduler.plan = broken
        for stream in streams:
            ((_, _, last),) = (await read(stream)).values()
            assert last.finish_reason is FinishReason.ERROR
            assert "planted" in last.error
        assert "planted" in engine.stats().failure

    run_to_failure(test)


def test_an_engine_whose_task_is_cancelled_has_failed():
    async def test(parts, engine):
        parts.executor.gate.clear()
        stream = engine.generate("abc", params(250))
        await asyncio.sleep(0)
        engine._task.cancel()
        assert (await answer(stream))[1] is FinishReason.ERROR

    run_to_failure(test)


class Faulty:
    """A text that raises once it has taken two tokens."""

    def __init__(self, fault):
        self.fault, self.num_taken = fault, 0

    def advance(self, output):
        self.num_taken += 1
        if self.num_taken > 2:
            raise self.fault
        return self.text.advance(output)


@FAULTS
def test_a_fault_in_the_delivery_of_a_request_ends_that_request_only(fault):
    async def test(parts, engine):
        streams = [engine.generate(text, params(30, n=2)) for text in ("ab", "cd", "ef")]
        texts = engine._live._live[streams[1].request_id].texts
        faulty = Faulty(fault)
        faulty.text, texts[1] = texts[1], faulty
        found = await asyncio.gather(*map(read, streams))
        assert {last.finish_reason for _, _, last in found[1].values()} == {FinishReason.ERROR}
        assert all("planted" in last.error for _, _, last in found[1].values())
        assert found[0][0][0] == "ab" * 15 and found[2][1][0] == "ef" * 15
        assert await answer(engine.generate("abc", params(4))) == ("abca", FinishReason.MAX_TOKENS)

    run(test)


@FAULTS
def test_a_request_that_cannot_be_accepted_leaves_nothing_behind(fault):
    async def test(parts, engine):
        def broken(token_id):
            raise fault

        is_special = engine.tokenizer.is_special
        engine.tokenizer.is_special = broken
        with pytest.raises(type(fault)):
            engine.generate("ab", params(30))
        engine.tokenizer.is_special = is_special
        assert engine.stats().num_requests == 0
        assert not parts.scheduler.has_work()

    run(test)


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_that_fail_one_after_the_other_fail_the_engine(depth):
    async def test(parts, engine):
        parts.executor.broken = range(10**9)
        for _ in range(2):
            assert (await answer(engine.generate("abc", params(4))))[1] is FinishReason.ERROR
            assert engine.stats().state is EngineState.RUNNING
        assert (await answer(engine.generate("abc", params(4))))[1] is FinishReason.ERROR
        while engine.stats().state is EngineState.RUNNING:
            await asyncio.sleep(0)
        assert "3 steps in a row failed" in engine.stats().failure
        assert "the script says so" in engine.stats().failure

    run_to_failure(test, pipeline_depth=depth)


def test_steps_that_fail_now_and_then_do_not_fail_the_engine():
    async def test(parts, engine):
        for _ in range(3):
            parts.executor.broken = range(10**9)
            for _ in range(2):
                assert (await answer(engine.generate("abc", params(4))))[1] is FinishReason.ERROR
            parts.executor.broken = ()
            assert (await answer(engine.generate("abc", params(4))))[0] == "abca"
        assert engine.stats().state is EngineState.RUNNING

    run(test)


def test_steps_that_are_out_of_memory_end_their_requests_and_never_the_engine():
    async def test(parts, engine):
        parts.executor.broken, parts.executor.error = range(10**9), StepOutOfMemory
        for _ in range(5):
            assert (await answer(engine.generate("abc", params(4))))[1] is FinishReason.ERROR
        parts.executor.broken = ()
        assert (await answer(engine.generate("abc", params(4))))[0] == "abca"
        assert engine.stats().state is EngineState.RUNNING

    run(test)
