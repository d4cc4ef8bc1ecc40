"""The engine in a process of its own: the same answers, refusals and accounts as in this one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import scripted_worker
from msgspec.structs import replace
from remote_run import LONG, ask, ends, read, run, until

from quickstep.engine.remote.engine import RemoteEngine
from quickstep.errors import EngineError, RequestError
from quickstep.types import Delta, FinishReason, Grammar, SamplingParams


def test_every_delta_is_the_one_that_the_engine_gives_in_this_process(tmp_path: Path) -> None:
    requests = [
        ("hello", SamplingParams(max_tokens=7, logprobs=2)),
        ("ab", SamplingParams(n=2, max_tokens=5, temperature=0.5)),
        ("stop here", SamplingParams(max_tokens=9, stop=("he",), logit_bias={65: -3.0})),
        ("é<|end|>", SamplingParams(max_tokens=9, seed=2**64 - 1)),
    ]

    async def local() -> list[tuple[list[Delta], int, tuple[int, ...]]]:
        engine = scripted_worker.opened(scripted_worker.config(tmp_path))
        await engine.start()
        answers = []
        for prompt, sampling in requests:
            stream = ask(engine, prompt, sampling)
            answers.append((await read(stream), stream.seed, stream.prompt_token_ids))
        await engine.stop()
        return answers

    async def test(engine: RemoteEngine) -> None:
        for (prompt, sampling), (deltas, seed, prompt_token_ids) in zip(
            requests, expected, strict=True
        ):
            stream = ask(engine, prompt, sampling)
            assert await read(stream) == deltas
            assert (stream.seed, stream.prompt_token_ids) == (seed, prompt_token_ids)

    expected = asyncio.run(local())
    run(tmp_path, test)


def test_the_facts_of_the_model_are_known_here(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        assert (engine.model_name, engine.fingerprint, engine.max_model_len) == (
            "script",
            "00",
            256,
        )
        assert engine.tokenizer.encode("ab") == [97, 98]
        assert engine.chat_template is None
        assert engine.stats().scheduler.blocks.num_free == scripted_worker.NUM_BLOCKS

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([], SamplingParams(), "prompt"),
        ([5] * 256, SamplingParams(), "prompt"),
        ([257], SamplingParams(), "prompt"),
        ([5], SamplingParams(stop_token_ids=(257,)), "stop_token_ids"),
        ("\ud800", SamplingParams(), "prompt"),
        ([5], SamplingParams(stop=("\ud800",)), None),
    ],
)
def test_what_can_be_refused_here_is_refused_at_once(
    tmp_path: Path, prompt: str | list[int], sampling: SamplingParams, param: str | None
) -> None:
    async def test(engine: RemoteEngine) -> None:
        with pytest.raises(RequestError) as caught:
            ask(engine, prompt, sampling)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert engine.stats().num_requests == 0

    run(tmp_path, test)


def test_what_only_the_engine_knows_comes_with_its_status(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        running = ask(engine, "a", LONG)
        await until(lambda: engine.stats().scheduler.num_running == 1)
        waiting = ask(engine, "b", LONG)
        await waiting.accepted()
        refused = ask(engine, "c", LONG)
        with pytest.raises(RequestError) as caught:
            await refused.accepted()
        assert caught.value.status == 429
        with pytest.raises(RequestError):
            await anext(refused)
        await refused.aclose()
        assert engine.stats().num_requests == 2
        await running.accepted()

    run(tmp_path, test, mode="hold", max_num_seqs=1, max_waiting=1)


def test_a_grammar_is_prepared_in_the_engine_or_refused(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        fine = SamplingParams(max_tokens=3, grammar=Grammar.of_regex("[a-z]+"))
        wrong = SamplingParams(grammar=Grammar.of_json_schema({"pattern": "(?<=a)b"}))
        stream = ask(engine, "abc", fine)
        await stream.accepted()
        assert await read(stream)
        refused = ask(engine, "abc", wrong)
        with pytest.raises(RequestError, match="look-around") as caught:
            await refused.accepted()
        assert caught.value.param == "grammar"
        overlapping = {"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 9}]}
        relaxed = SamplingParams(max_tokens=9, grammar=Grammar.of_json_schema(overlapping))
        stream = ask(engine, "a", relaxed)
        await stream.accepted()
        assert stream.ignored == ("oneOf",)
        assert await read(stream)
        assert engine.stats().num_requests == 0

    run(tmp_path, test)


def test_leaving_while_a_grammar_is_prepared_leaves_nothing(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        sampling = replace(LONG, ignore_eos=False, grammar=Grammar.of_regex("[a-z]+"))
        for _ in range(3):
            stream = ask(engine, "abcdefgh", sampling)
            await stream.aclose()
            await until(lambda: engine.stats().num_requests == 0)
        await until(lambda: engine.stats().scheduler.blocks.num_used == 0)
        assert await read(ask(engine, "abc", SamplingParams(max_tokens=3)))
        await until(lambda: not engine.stats().scheduler.num_running)

    run(tmp_path, test)


def test_an_id_that_is_in_use_is_refused_and_free_again_after_the_end(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        first = ask(engine, "abc", SamplingParams(max_tokens=3), request_id="mine")
        with pytest.raises(RequestError) as caught:
            ask(engine, "abc", SamplingParams(), request_id="mine")
        assert caught.value.param == "request_id"
        await read(first)
        assert await read(ask(engine, "abc", SamplingParams(max_tokens=3), request_id="mine"))

    run(tmp_path, test)


def test_leaving_a_stream_frees_its_blocks_in_the_engine(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        streams = [ask(engine, "abcdefgh", LONG) for _ in range(4)]
        await until(lambda: engine.stats().scheduler.blocks.num_used > 0)
        for stream in streams:
            await stream.aclose()
        await until(lambda: engine.stats().num_requests == 0)
        await until(lambda: engine.stats().scheduler.blocks.num_used == 0)
        assert not engine.stats().has_work

    run(tmp_path, test)


def test_abort_gives_the_partial_answer(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        stream = ask(engine, "abc", LONG, request_id="mine")
        await until(lambda: engine.stats().num_requests == 1)
        engine.abort("mine")
        engine.abort("nobody's")
        assert (await ends(stream))[0][0] is FinishReason.ABORTED

    run(tmp_path, test, mode="hold")


def test_the_step_log_is_reported_here_too(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        await read(ask(engine, "abc", SamplingParams(max_tokens=5)))
        await until(lambda: engine.step_log.totals.num_output_tokens == 5)
        assert engine.step_log.sequences[-1].finish_reason is FinishReason.MAX_TOKENS
        assert engine.step_log.totals.num_steps == 5
        await until(lambda: engine.stats().scheduler.totals.num_steps == 5)

    run(tmp_path, test)


def test_a_reset_of_the_prefix_cache_frees_the_blocks_of_ended_requests(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        await read(ask(engine, list(range(40)), SamplingParams(max_tokens=1)))
        await until(lambda: engine.stats().scheduler.blocks.num_cached > 0)
        num_cached = engine.stats().scheduler.blocks.num_cached
        assert await asyncio.gather(*(engine.reset_prefix_cache() for _ in range(2))) == [
            num_cached,
            0,
        ]
        await until(lambda: engine.stats().scheduler.blocks.num_cached == 0)
        await engine.stop()
        with pytest.raises(EngineError, match="stopped"):
            await engine.reset_prefix_cache()

    run(tmp_path, test)


def test_a_live_request_reports_its_time_so_far(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        stream = ask(engine, "abc", SamplingParams(max_tokens=9, n=2), request_id="mine")
        await until(lambda: engine.stats().scheduler.num_running == 2)
        assert engine.request_ids == ("mine",)
        both = await asyncio.gather(*(engine.live_timings("mine") for _ in range(2)))
        assert both[0] == both[1]
        assert [timings.num_prompt_tokens for timings in both[0].values()] == [3, 3]
        assert await engine.live_timings("other") == {}
        await stream.aclose()

    run(tmp_path, test, mode="hold")
