"""The engine's loop, real scheduler and scripted executor: streams and how they end."""

from __future__ import annotations

import asyncio

import pytest
from scripted_engine import END_ID, answer, read, run

from quickstep.types import FinishReason, SamplingParams

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def params(max_tokens=8, **options):
    return SamplingParams(max_tokens=max_tokens, **options)


@DEPTHS
def test_text_streams_as_tokens_arrive_and_ends_at_max_tokens(depth):
    async def test(parts, engine):
        stream = engine.generate("héllo", params(7))
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
        streams = [engine.generate(prompt, params(20)) for prompt in prompts]
        together = await asyncio.gather(*map(answer, streams))
        alone = [await answer(engine.generate(prompt, params(20))) for prompt in prompts]
        assert together == alone
        assert together == [((p * 20)[:20], FinishReason.MAX_TOKENS) for p in prompts]

    run(test, pipeline_depth=depth, max_num_batched_tokens=16)


def test_end_token_and_stop_token_end_a_stream_and_are_not_shown():
    async def test(parts, engine):
        prompt = [*b"bye", END_ID]
        text, ids, last = (await read(engine.generate(prompt, params(9))))[0]
        assert (text, ids, last.finish_reason) == ("bye", tuple(prompt), FinishReason.EOS)
        assert last.stop_reason is None
        stream = engine.generate(prompt, params(9, stop_token_ids=(ord("y"),)))
        text, ids, last = (await read(stream))[0]
        assert (text, ids) == ("b", tuple(b"by"))
        assert last.finish_reason is FinishReason.STOP_TOKEN
        assert last.stop_reason == ord("y")
        kept = params(9, stop_token_ids=(ord("y"),), include_stop_str_in_output=True)
        assert (await answer(engine.generate(prompt, kept)))[0] == "by"
        whole = params(6, ignore_eos=True, skip_special_tokens=False)
        assert (await answer(engine.generate(prompt, whole)))[0] == "bye<|end|>by"

    run(test)


@DEPTHS
def test_a_stop_string_ends_the_sequence_and_frees_it(depth):
    async def test(parts, engine):
        stream = engine.generate("one STOP two", params(100, stop=("zzz", "STOP")))
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
        stream = engine.generate("abcd", params(2, stop=("b",), include_stop_str_in_output=True))
        assert await answer(stream) == ("ab", FinishReason.STOP_STRING)

    run(test)


def test_min_tokens_puts_off_stop_strings_and_held_text_comes_out_at_the_end():
    async def test(parts, engine):
        stream = engine.generate("a.b.", params(9, stop=(".",), min_tokens=3))
        assert await answer(stream) == ("a.b", FinishReason.STOP_STRING)
        stream = engine.generate("a.b", params(2, stop=(".b.",)))
        assert await answer(stream) == ("a.", FinishReason.MAX_TOKENS)

    run(test)


def test_the_stops_of_one_sequence_leave_its_siblings_alone():
    async def test(parts, engine):
        found = await read(engine.generate("abc", params(3, n=3)))
        assert [found[index][0] for index in range(3)] == ["abc"] * 3
        found = await read(engine.generate("abc", params(9, n=3, stop=("c",))))
        assert [found[index][0] for index in range(3)] == ["ab"] * 3

    run(test)


@DEPTHS
def test_abort_answers_with_what_there_is_and_frees_all_blocks(depth):
    async def test(parts, engine):
        stream = engine.generate("abcdef", params(200, n=2), request_id="mine")
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
        async with engine.generate("abc", params(200)) as stream:
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
            async with engine.generate("abc", params(250)) as stream:
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
        stream = engine.generate("ab", params(2))
        first, later = engine.stats().stalled_s, engine.stats().stalled_s
        assert 0 <= first < later
        assert engine.stats().has_work
        parts.executor.gate.set()
        await answer(stream)
        assert engine.stats().stalled_s == 0

    run(test)


def test_a_generated_request_id_never_equals_a_given_one():
    async def test(parts, engine):
        given = engine.generate("ab", params(4), request_id="request-0")
        drawn = engine.generate("ab", params(4))
        assert drawn.request_id != given.request_id
        await asyncio.gather(answer(given), answer(drawn))

    run(test)


def test_a_request_aborted_while_it_waits_never_runs():
    async def test(parts, engine):
        parts.executor.gate.clear()
        running = engine.generate("ab", params(4))
        waiting = engine.generate("cd", params(4), request_id="waiting")
        engine.abort("waiting")
        parts.executor.gate.set()
        assert await answer(waiting) == ("", FinishReason.ABORTED)
        assert await answer(running) == ("abab", FinishReason.MAX_TOKENS)

    run(test, max_num_seqs=1)


def test_a_deadline_gives_the_partial_answer():
    async def test(parts, engine):
        stream = engine.generate("abc", params(250), timeout_s=1000)
        assert (await anext(stream)).text == "a"
        parts.skipped_s = 2000
        text, reason = await answer(stream)
        assert reason is FinishReason.DEADLINE
        assert ("abc" * 99).startswith("a" + text)

    run(test)


def test_a_deadline_wakes_an_engine_that_has_nothing_to_run():
    async def test(parts, engine):
        parts.scheduler.plan = lambda now: None
        stream = engine.generate("abc", params(250), timeout_s=0.01)
        assert await answer(stream) == ("", FinishReason.DEADLINE)

    run(test)


def test_the_context_limit_ends_a_request_without_max_tokens():
    async def test(parts, engine):
        text, reason = await answer(engine.generate("abc", SamplingParams(max_tokens=None)))
        assert reason is FinishReason.CONTEXT_LIMIT
        assert len(text) == 256 - 3

    run(test)


def test_logprobs_come_with_their_tokens():
    async def test(parts, engine):
        async for delta in engine.generate("ab", params(3, logprobs=2)):
            assert [logprob.token_id for logprob in delta.logprobs] == list(delta.token_ids)
            assert len(delta.logprobs[0].top) == 2

    run(test)
