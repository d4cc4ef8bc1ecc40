"""The engine's refusals, failures and life: bad requests, broken steps, drains, the book."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from scripted_engine import ScriptedEngine, answer, read, run

from quickstep.config import PolicyName
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.stats import EngineState
from quickstep.errors import EngineError, RequestError
from quickstep.types import FinishReason, Request, SamplingParams

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def params(max_tokens=8, **options):
    return SamplingParams(max_tokens=max_tokens, **options)


BAD_PROMPTS = [
    ("", "empty"),
    ([], "empty"),
    ([1, 257], "257"),
    ([-1], "-1"),
    ([1.5], "integer"),
    ([True], "integer"),
    (None, "integer"),
    ({1: 2}, "integer"),
    ("x" * 256, "256 tokens"),
    ("\ud800", "Unicode"),
]


@pytest.mark.parametrize(("prompt", "says"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_nothing_else_notices(prompt, says):
    async def test(parts, engine):
        good = engine.generate("ok", params(4))
        with pytest.raises(RequestError, match=says) as caught:
            engine.generate(prompt, params())
        assert caught.value.param == "prompt"
        assert (await answer(good))[0] == "okok"

    run(test)


BAD_SAMPLING = [
    ({"logit_bias": {999: 1.0}}, "logit_bias"),
    ({"allowed_token_ids": (999,)}, "allowed_token_ids"),
    ({"stop_token_ids": (-5,)}, "stop_token_ids"),
    ({"logprobs": 999}, "logprobs"),
]


@pytest.mark.parametrize(("options", "param"), BAD_SAMPLING)
def test_sampling_parameters_outside_the_vocabulary_are_refused(options, param):
    async def test(parts, engine):
        with pytest.raises(RequestError) as caught:
            engine.generate("ok", params(**options))
        assert caught.value.param == param

    run(test)


def test_a_request_id_in_use_and_a_past_deadline_are_refused():
    async def test(parts, engine):
        async with engine.generate("ab", params(200), request_id="one"):
            with pytest.raises(RequestError, match="one"):
                engine.generate("ab", params(), request_id="one")
        with pytest.raises(RequestError, match="timeout_s"):
            engine.generate("ab", params(), timeout_s=0)

    run(test)


@DEPTHS
def test_a_failed_step_fails_its_sequences_and_the_engine_continues(depth, caplog):
    async def test(parts, engine):
        parts.executor.broken = {3}
        with caplog.at_level(logging.CRITICAL, "quickstep.engine.engine"):
            streams = [engine.generate(text, params(50, n=2)) for text in ("abc", "def")]
            for found in await asyncio.gather(*map(read, streams)):
                for _, _, last in found.values():
                    assert last.finish_reason is FinishReason.ERROR
                    assert "the script says so" in last.error
        assert await answer(engine.generate("abc", params(4))) == ("abca", FinishReason.MAX_TOKENS)
        assert engine.stats().state is EngineState.RUNNING

    run(test, pipeline_depth=depth)


@DEPTHS
def test_sequences_outside_a_failed_step_continue_to_the_same_answer(depth, caplog):
    """Prefill goes first: two decoding sequences sit out while a long prompt's step fails."""

    async def test(parts, engine):
        with caplog.at_level(logging.CRITICAL, "quickstep.engine.engine"):
            decoding = [engine.generate(text, params(30)) for text in ("ab", "cd")]
            begun = [(await anext(stream)).text for stream in decoding]
            parts.executor.gate.clear()
            long = engine.generate("x" * 200, params(4))
            last_step_id = engine.step_log.steps[-1].step_id
            parts.executor.broken = {last_step_id + 5}
            parts.executor.gate.set()
            assert (await answer(long))[1] is FinishReason.ERROR
            ends = [await answer(stream) for stream in decoding]
        texts = [first + text for first, (text, _) in zip(begun, ends, strict=True)]
        assert texts == ["ab" * 15, "cd" * 15]

    run(test, pipeline_depth=depth, max_num_batched_tokens=16, policy=PolicyName.PREFILL_FIRST)


def test_a_broken_loop_fails_every_request_and_says_so(caplog):
    async def test(parts, engine):
        def broken(now):
            raise ValueError("planted")

        with caplog.at_level(logging.CRITICAL, "quickstep.engine.engine"):
            parts.scheduler.plan = broken
            text, reason = await answer(engine.generate("abc", params()))
        assert (text, reason) == ("", FinishReason.ERROR)
        assert engine.stats().state is EngineState.FAILED
        with pytest.raises(EngineError, match="planted"):
            engine.generate("abc", params())

    async def whole():
        parts = ScriptedEngine()
        await parts.engine.start()
        await test(parts, parts.engine)
        await parts.engine.stop()
        assert parts.executor.is_closed

    asyncio.run(whole())


def test_unseeded_requests_get_seeds_that_repeat_with_the_engines():
    async def test(parts, engine):
        drawn = [engine.generate("a", params(1)) for _ in range(3)]
        given = engine.generate("a", params(1, seed=-7))
        await asyncio.gather(*map(answer, [*drawn, given]))
        assert given.seed == -7
        assert all(record.seed in {s.seed for s in [*drawn, given]} for record in book(engine))
        return [stream.seed for stream in drawn]

    def book(engine):
        return engine.step_log.sequences

    first, again, other = run(test, seed=1), run(test, seed=1), run(test, seed=2)
    assert first == again != other
    assert len(set(first)) == 3


def test_stop_drains_first_and_then_shuts_the_rest_down():
    async def whole():
        parts = ScriptedEngine()
        await parts.engine.start()
        short = parts.engine.generate("ab", params(4))
        await parts.engine.stop(drain_s=60)
        assert await answer(short) == ("abab", FinishReason.MAX_TOKENS)
        parts.check_nothing_is_left()
        with pytest.raises(EngineError, match="stopped"):
            parts.engine.generate("ab", params())
        with pytest.raises(EngineError, match="stopped"):
            await parts.engine.start()

        parts = ScriptedEngine()
        await parts.engine.start()
        long = parts.engine.generate("ab", params(250))
        await parts.engine.stop()
        assert (await answer(long))[1] is FinishReason.SHUTDOWN
        parts.check_nothing_is_left()
        assert parts.executor.is_closed

    asyncio.run(whole())


def test_a_drain_that_was_cut_short_is_ended_by_the_next_stop():
    async def test(parts, engine):
        parts.executor.gate.clear()
        stream = engine.generate("ab", SamplingParams(max_tokens=200))
        draining = asyncio.create_task(engine.stop(drain_s=60))
        await asyncio.sleep(0)
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        parts.executor.gate.set()
        await engine.stop()
        assert (await answer(stream))[1] is FinishReason.SHUTDOWN

    run(test)


def test_an_engine_takes_requests_only_between_start_and_stop():
    parts = ScriptedEngine()
    with pytest.raises(EngineError, match="not started"):
        parts.engine.generate("ab", params())
    parts.executor.close()


def test_an_idle_engine_takes_no_turns():
    async def test(parts, engine):
        await answer(engine.generate("ab", params(2)))
        calls = []
        plan = parts.scheduler.plan
        parts.scheduler.plan = lambda now: calls.append(now) or plan(now)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(calls) <= 1

    run(test)


def test_the_step_log_adds_up():
    async def test(parts, engine):
        await asyncio.gather(*(answer(engine.generate("abcd", params(5))) for _ in range(4)))
        log = engine.step_log
        totals = log.totals
        assert totals.num_steps == len(log.steps)
        assert totals.num_output_tokens == 20
        assert totals.num_prompt_tokens == 16
        assert totals.num_finished == {FinishReason.MAX_TOKENS: 4}
        shared_s = sum(record.timings.device_s for record in log.sequences)
        assert shared_s == pytest.approx(totals.busy_s)
        wall_s = log.steps[-1].committed_at_s - log.steps[0].planned_at_s
        counted = engine.stats().scheduler.totals
        parts_s = counted.attributed_s + counted.recomputed_s + counted.rejected_s
        assert parts_s + counted.unclaimed_s + counted.idle_s == pytest.approx(wall_s, rel=1e-9)
        assert engine.stats().last_step_s is not None

    run(test)


def test_the_step_log_is_written_as_json_lines(tmp_path):
    path = tmp_path / "steps.jsonl"

    async def test(parts, engine):
        await answer(engine.stream(Request("", tuple(b"abcd"), params(5), tenant="t")))

    run(test, step_log=StepLog(path=path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    sequences = [line for line in lines if line["kind"] == "sequence"]
    assert sum(line["num_decode_tokens"] for line in steps) == 4
    assert [line["finish_reason"] for line in sequences] == ["max_tokens"]
    assert sequences[0]["tenant"] == "t"
    assert sequences[0]["timings"]["num_output_tokens"] == 5


def test_a_conversation_needs_a_template():
    async def test(parts, engine):
        with pytest.raises(RequestError, match="completion"):
            engine.chat_prompt([{"role": "user", "content": "hi"}])

    async def templated(parts, engine):
        prompt = engine.chat_prompt([{"role": "user", "content": "hi"}])
        assert bytes(prompt) == b"hi!"

    run(test)
    run(templated, template="{{ messages[0].content }}!")
