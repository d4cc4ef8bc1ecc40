"""The engine's loop with the real scheduler and a scripted executor: streams, ends, failures."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from scripted_engine import END_ID, ScriptedEngine, answer, read, run

from quickstep.config import PolicyName
from quickstep.engine.stats import EngineState
from quickstep.engine.step_log import Quantity, StepLog
from quickstep.errors import EngineError, RequestError
from quickstep.types import FinishReason, SamplingParams

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def params(max_tokens=8, **options):
    return SamplingParams(max_tokens=max_tokens, **options)


@DEPTHS
def test_text_streams_as_tokens_arrive_and_ends_at_max_tokens(depth):
    async def test(parts, engine):
        stream = engine.submit("héllo", params(7))
        deltas = [delta async for delta in stream]
        assert [delta.text for delta in deltas] == ["h", "", "é", "l", "l", "o", "h"]
        assert [len(delta.token_ids) for delta in deltas] == [1] * 7
        assert deltas[-1].finish_reason is FinishReason.MAX_TOKENS
        assert deltas[-1].timings.num_output_tokens == 7
        assert all(delta.finish_reason is None for delta in deltas[:-1])

    run(test, pipeline_depth=depth)


@DEPTHS
def test_concurrent_streams_give_what_each_gives_alone(depth):
    prompts = [f"prompt {n} says {'x' * n}" for n in range(20)]

    async def test(parts, engine):
        streams = [engine.submit(prompt, params(20)) for prompt in prompts]
        together = await asyncio.gather(*map(answer, streams))
        alone = [await answer(engine.submit(prompt, params(20))) for prompt in prompts]
        assert together == alone
        assert together == [((p * 20)[:20], FinishReason.MAX_TOKENS) for p in prompts]

    run(test, pipeline_depth=depth, max_num_batched_tokens=16)


def test_end_token_and_stop_token_end_a_stream_and_are_not_shown():
    async def test(parts, engine):
        prompt = [*b"bye", END_ID]
        text, ids, last = (await read(engine.submit(prompt, params(9))))[0]
        assert (text, ids, last.finish_reason) == ("bye", tuple(prompt), FinishReason.EOS)
        assert last.stop_reason is None
        stream = engine.submit(prompt, params(9, stop_token_ids=(ord("y"),)))
        text, ids, last = (await read(stream))[0]
        assert (text, ids) == ("b", tuple(b"by"))
        assert last.finish_reason is FinishReason.STOP_TOKEN
        assert last.stop_reason == ord("y")
        kept = params(9, stop_token_ids=(ord("y"),), include_stop_str_in_output=True)
        assert (await answer(engine.submit(prompt, kept)))[0] == "by"
        whole = params(6, ignore_eos=True, skip_special_tokens=False)
        assert (await answer(engine.submit(prompt, whole)))[0] == "bye<|end|>by"

    run(test)


@DEPTHS
def test_a_stop_string_ends_the_sequence_and_frees_it(depth):
    async def test(parts, engine):
        stream = engine.submit("one STOP two", params(100, stop=("zzz", "STOP")))
        text, ids, last = (await read(stream))[0]
        assert (text, bytes(ids)) == ("one ", b"one STOP")
        assert last.finish_reason is FinishReason.STOP_STRING
        assert last.stop_reason == "STOP"
        assert last.timings.num_output_tokens == len(ids)
        await until_idle(engine)
        parts.check_nothing_is_left()

    run(test, pipeline_depth=depth)


async def until_idle(engine):
    while engine.stats().num_steps_in_flight:
        await asyncio.sleep(0)


def test_a_stop_string_completed_by_the_last_token_counts_as_stop():
    async def test(parts, engine):
        stream = engine.submit("abcd", params(2, stop=("b",), include_stop_str_in_output=True))
        assert await answer(stream) == ("ab", FinishReason.STOP_STRING)

    run(test)


def test_min_tokens_puts_off_stop_strings_and_held_text_comes_out_at_the_end():
    async def test(parts, engine):
        stream = engine.submit("a.b.", params(9, stop=(".",), min_tokens=3))
        assert await answer(stream) == ("a.b", FinishReason.STOP_STRING)
        stream = engine.submit("a.b", params(2, stop=(".b.",)))
        assert await answer(stream) == ("a.", FinishReason.MAX_TOKENS)

    run(test)


def test_the_stops_of_one_sequence_leave_its_siblings_alone():
    async def test(parts, engine):
        found = await read(engine.submit("abc", params(3, n=3)))
        assert [found[index][0] for index in range(3)] == ["abc"] * 3
        found = await read(engine.submit("abc", params(9, n=3, stop=("c",))))
        assert [found[index][0] for index in range(3)] == ["ab"] * 3

    run(test)


@DEPTHS
def test_abort_answers_with_what_there_is_and_frees_all_blocks(depth):
    async def test(parts, engine):
        stream = engine.submit("abcdef", params(200, n=2), request_id="mine")
        first = await anext(stream)
        engine.abort("mine")
        rest = await read(stream)
        assert first.text == "a"
        assert {last.finish_reason for _, _, last in rest.values()} == {FinishReason.ABORTED}
        await until_idle(engine)
        parts.check_nothing_is_left()
        engine.abort("mine")
        engine.abort("unknown")

    run(test, pipeline_depth=depth)


def test_leaving_a_stream_early_aborts_its_request():
    async def test(parts, engine):
        async with engine.submit("abc", params(200)) as stream:
            await anext(stream)
        await stream.aclose()
        assert [delta async for delta in stream] == []
        assert engine.stats().num_requests == 0
        assert engine.step_log.sequences[-1].finish_reason is FinishReason.ABORTED

    run(test)


def test_cancelling_the_reader_aborts_its_request():
    async def test(parts, engine):
        begun = asyncio.Event()

        async def reader():
            async with engine.submit("abc", params(250)) as stream:
                async for _ in stream:
                    begun.set()

        task = asyncio.create_task(reader())
        await begun.wait()
        task.cancel()
        assert (await asyncio.gather(task, return_exceptions=True))[0] is not None
        assert engine.stats().num_requests == 0

    run(test)


def test_a_held_step_shows_as_stalled_and_an_idle_engine_does_not():
    async def test(parts, engine):
        assert engine.stats().stalled_s == 0
        parts.executor.gate.clear()
        stream = engine.submit("ab", params(2))
        first, later = engine.stats().stalled_s, engine.stats().stalled_s
        assert 0 <= first < later
        assert engine.stats().has_work
        parts.executor.gate.set()
        await answer(stream)
        assert engine.stats().stalled_s == 0

    run(test)


def test_a_drawn_request_id_never_meets_a_given_one():
    async def test(parts, engine):
        given = engine.submit("ab", params(4), request_id="request-0")
        drawn = engine.submit("ab", params(4))
        assert drawn.request_id != given.request_id
        await asyncio.gather(answer(given), answer(drawn))

    run(test)


def test_a_request_aborted_while_it_waits_never_runs():
    async def test(parts, engine):
        parts.executor.gate.clear()
        running = engine.submit("ab", params(4))
        waiting = engine.submit("cd", params(4), request_id="waiting")
        engine.abort("waiting")
        parts.executor.gate.set()
        assert await answer(waiting) == ("", FinishReason.ABORTED)
        assert await answer(running) == ("abab", FinishReason.MAX_TOKENS)

    run(test, max_num_seqs=1)


def test_a_deadline_gives_the_partial_answer():
    async def test(parts, engine):
        stream = engine.submit("abc", params(250), deadline_s=0.05)
        assert (await anext(stream)).text == "a"
        parts.executor.gate.clear()
        held = asyncio.get_running_loop().call_later(0.06, parts.executor.gate.set)
        text, reason = await answer(stream)
        held.cancel()
        assert reason is FinishReason.DEADLINE
        assert ("abc" * 99).startswith("a" + text)

    run(test)


def test_the_context_limit_ends_a_request_without_max_tokens():
    async def test(parts, engine):
        text, reason = await answer(engine.submit("abc", SamplingParams(max_tokens=None)))
        assert reason is FinishReason.CONTEXT_LIMIT
        assert len(text) == 256 - 3

    run(test)


def test_logprobs_come_with_their_tokens():
    async def test(parts, engine):
        async for delta in engine.submit("ab", params(3, logprobs=2)):
            assert [one.token_id for one in delta.logprobs] == list(delta.token_ids)
            assert len(delta.logprobs[0].top) == 2

    run(test)


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
        good = engine.submit("ok", params(4))
        with pytest.raises(RequestError, match=says) as caught:
            engine.submit(prompt, params())
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
            engine.submit("ok", params(**options))
        assert caught.value.param == param

    run(test)


def test_a_request_id_in_use_and_a_past_deadline_are_refused():
    async def test(parts, engine):
        async with engine.submit("ab", params(200), request_id="one"):
            with pytest.raises(RequestError, match="one"):
                engine.submit("ab", params(), request_id="one")
        with pytest.raises(RequestError, match="deadline_s"):
            engine.submit("ab", params(), deadline_s=0)

    run(test)


@DEPTHS
def test_a_failed_step_fails_its_sequences_and_the_engine_goes_on(depth, caplog):
    async def test(parts, engine):
        parts.executor.broken = {3}
        with caplog.at_level(logging.CRITICAL, "quickstep.engine.engine"):
            streams = [engine.submit(text, params(50, n=2)) for text in ("abc", "def")]
            for found in await asyncio.gather(*map(read, streams)):
                for _, _, last in found.values():
                    assert last.finish_reason is FinishReason.ERROR
                    assert "the script says so" in last.error
        assert await answer(engine.submit("abc", params(4))) == ("abca", FinishReason.MAX_TOKENS)
        assert engine.stats().state is EngineState.RUNNING

    run(test, pipeline_depth=depth)


@DEPTHS
def test_sequences_outside_a_failed_step_go_on_to_the_same_answer(depth, caplog):
    """Prefill goes first: two decoding sequences sit out while a long prompt's step fails."""

    async def test(parts, engine):
        with caplog.at_level(logging.CRITICAL, "quickstep.engine.engine"):
            decoding = [engine.submit(text, params(30)) for text in ("ab", "cd")]
            begun = [(await anext(stream)).text for stream in decoding]
            parts.executor.gate.clear()
            long = engine.submit("x" * 200, params(4))
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
            text, reason = await answer(engine.submit("abc", params()))
        assert (text, reason) == ("", FinishReason.ERROR)
        assert engine.stats().state is EngineState.FAILED
        with pytest.raises(EngineError, match="planted"):
            engine.submit("abc", params())

    async def whole():
        parts = ScriptedEngine()
        await parts.engine.start()
        await test(parts, parts.engine)
        await parts.engine.stop()
        assert parts.executor.is_closed

    asyncio.run(whole())


def test_unseeded_requests_get_seeds_that_repeat_with_the_engines():
    async def test(parts, engine):
        drawn = [engine.submit("a", params(1)) for _ in range(3)]
        given = engine.submit("a", params(1, seed=-7))
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
        short = parts.engine.submit("ab", params(4))
        await parts.engine.stop(drain_s=60)
        assert await answer(short) == ("abab", FinishReason.MAX_TOKENS)
        parts.check_nothing_is_left()
        with pytest.raises(EngineError, match="stopped"):
            parts.engine.submit("ab", params())
        with pytest.raises(EngineError, match="stopped"):
            await parts.engine.start()

        parts = ScriptedEngine()
        await parts.engine.start()
        long = parts.engine.submit("ab", params(250))
        await parts.engine.stop()
        assert (await answer(long))[1] is FinishReason.SHUTDOWN
        parts.check_nothing_is_left()
        assert parts.executor.is_closed

    asyncio.run(whole())


def test_an_engine_takes_requests_only_between_start_and_stop():
    parts = ScriptedEngine()
    with pytest.raises(EngineError, match="not started"):
        parts.engine.submit("ab", params())
    parts.executor.close()


def test_an_idle_engine_takes_no_turns():
    async def test(parts, engine):
        await answer(engine.submit("ab", params(2)))
        calls = []
        plan = parts.scheduler.plan
        parts.scheduler.plan = lambda now: calls.append(now) or plan(now)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(calls) <= 1

    run(test)


def test_the_step_log_adds_up():
    observed = []

    async def test(parts, engine):
        engine.step_log.subscribe(lambda quantity, value: observed.append((quantity, value)))
        await asyncio.gather(*(answer(engine.submit("abcd", params(5))) for _ in range(4)))
        log = engine.step_log
        totals = log.totals
        assert totals.num_steps == len(log.steps)
        assert totals.num_output_tokens == 20
        assert totals.num_prompt_tokens == 16
        assert totals.num_finished == {FinishReason.MAX_TOKENS: 4}
        shared_s = sum(record.timings.device_s for record in log.sequences)
        assert shared_s == pytest.approx(totals.busy_s)
        counts = {quantity: [q for q, _ in observed].count(quantity) for quantity in Quantity}
        assert counts.pop(Quantity.INTER_TOKEN) == 4 * 4
        assert set(counts.values()) == {4}
        assert all(value >= 0 for _, value in observed)
        assert engine.stats().last_step_s is not None

    run(test)


def test_the_step_log_is_written_as_json_lines(tmp_path):
    path = tmp_path / "steps.jsonl"

    async def test(parts, engine):
        await answer(engine.submit("abcd", params(5), tenant="t"))

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
