"""The engine's process from the server's side: answers, refusals, deaths, restarts, ends.

The worker is the real one around a scripted engine; `test_engine_process_demo` runs the model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import scripted_worker

from quickstep.engine.process.remote_engine import RemoteEngine
from quickstep.engine.process.remote_streams import RemoteStream
from quickstep.engine.process.restarts import RestartLimits
from quickstep.engine.stats import EngineState
from quickstep.engine.stream import Delta, Stream
from quickstep.errors import ConfigError, EngineError, RequestError
from quickstep.types import FinishReason, Grammar, SamplingParams

DEADLINE_S = 60.0
QUICK = RestartLimits(max_quick_deaths=3, first_delay_s=0.01, max_delay_s=0.01)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


def is_alive(process_id: int) -> bool:
    """Whether there is such a process; one that waits to be reaped is dead."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def run(
    path: Path,
    test: Callable[[RemoteEngine], Awaitable[None]],
    mode: str = "serve",
    **scheduler: int,
) -> None:
    """Run `test` on a started engine in a process, which must be gone at the end."""

    async def whole() -> None:
        config = scripted_worker.config(path, **scheduler)
        engine = RemoteEngine(config, command=scripted_worker.command(mode), restart_limits=QUICK)
        await engine.open()
        process_ids = {engine.process_id}
        await engine.start()
        try:
            await asyncio.wait_for(test(engine), DEADLINE_S)
        finally:
            process_ids.add(engine.process_id)
            await engine.stop()
        assert engine.stats().state in (EngineState.STOPPED, EngineState.FAILED)
        assert engine.stats().num_requests == 0
        assert not any(is_alive(process_id) for process_id in process_ids if process_id)

    asyncio.run(whole())


async def read(stream: Stream | RemoteStream) -> list[Delta]:
    """All deltas, without what the clock says."""
    return [replace(delta, timings=None) async for delta in stream]


async def ends(stream: RemoteStream) -> list[tuple[FinishReason | None, str]]:
    return [(d.finish_reason, d.error) for d in await read(stream) if d.finish_reason is not None]


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
            stream = engine.submit(prompt, sampling)
            answers.append((await read(stream), stream.seed, stream.prompt_token_ids))
        await engine.stop()
        return answers

    async def test(engine: RemoteEngine) -> None:
        for (prompt, sampling), (deltas, seed, prompt_token_ids) in zip(
            requests, expected, strict=True
        ):
            stream = engine.submit(prompt, sampling)
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
            engine.submit(prompt, sampling)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert engine.stats().num_requests == 0

    run(tmp_path, test)


def test_what_only_the_engine_knows_comes_with_its_status(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        running = engine.submit("a", LONG)
        await until(lambda: engine.stats().scheduler.num_running == 1)
        waiting = engine.submit("b", LONG)
        await waiting.accepted()
        refused = engine.submit("c", LONG)
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
        wrong = SamplingParams(grammar=Grammar.of_json_schema({"uniqueItems": True}))
        stream = engine.submit("abc", fine)
        await stream.accepted()
        assert await read(stream)
        refused = engine.submit("abc", wrong)
        with pytest.raises(RequestError, match="uniqueItems") as caught:
            await refused.accepted()
        assert caught.value.param == "grammar"
        assert engine.stats().num_requests == 0

    run(tmp_path, test)


def test_leaving_while_a_grammar_is_prepared_leaves_nothing(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        sampling = replace(LONG, ignore_eos=False, grammar=Grammar.of_regex("[a-z]+"))
        for _ in range(3):
            stream = engine.submit("abcdefgh", sampling)
            await stream.aclose()
            await until(lambda: engine.stats().num_requests == 0)
        await until(lambda: engine.stats().scheduler.blocks.num_used == 0)
        assert await read(engine.submit("abc", SamplingParams(max_tokens=3)))
        await until(lambda: not engine.stats().scheduler.num_running)

    run(tmp_path, test)


def test_an_id_that_is_in_use_is_refused_and_free_again_after_the_end(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        first = engine.submit("abc", SamplingParams(max_tokens=3), request_id="mine")
        with pytest.raises(RequestError) as caught:
            engine.submit("abc", SamplingParams(), request_id="mine")
        assert caught.value.param == "request_id"
        await read(first)
        assert await read(engine.submit("abc", SamplingParams(max_tokens=3), request_id="mine"))

    run(tmp_path, test)


def test_leaving_a_stream_frees_its_blocks_in_the_engine(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        streams = [engine.submit("abcdefgh", LONG) for _ in range(4)]
        await until(lambda: engine.stats().scheduler.blocks.num_used > 0)
        for stream in streams:
            await stream.aclose()
        await until(lambda: engine.stats().num_requests == 0)
        await until(lambda: engine.stats().scheduler.blocks.num_used == 0)
        assert not engine.stats().has_work

    run(tmp_path, test)


def test_abort_gives_the_partial_answer(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        stream = engine.submit("abc", LONG, request_id="mine")
        await until(lambda: engine.stats().num_requests == 1)
        engine.abort("mine")
        engine.abort("nobody's")
        assert (await ends(stream))[0][0] is FinishReason.ABORTED

    run(tmp_path, test, mode="hold")


def test_the_step_log_is_told_here_too(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        observed = []
        engine.step_log.subscribe(lambda quantity, seconds: observed.append(quantity))
        await read(engine.submit("abc", SamplingParams(max_tokens=5)))
        await until(lambda: engine.step_log.totals.num_output_tokens == 5)
        assert engine.step_log.sequences[-1].finish_reason is FinishReason.MAX_TOKENS
        assert engine.step_log.totals.num_steps == 5
        assert len(set(observed)) == 5
        await until(lambda: engine.stats().scheduler.totals.num_steps == 5)

    run(tmp_path, test)


def test_a_killed_engine_ends_every_stream_and_serves_again(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        await read(engine.submit("abc", SamplingParams(max_tokens=5)))
        await until(lambda: engine.stats().scheduler.totals.num_steps == 5)
        before = engine.process_id
        assert before is not None
        os.kill(before, signal.SIGSTOP)  # so that neither is taken, nor runs
        streams = [engine.submit("abc", SamplingParams(n=2, max_tokens=5)) for _ in range(20)]
        os.kill(before, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineError, match="send it again"):
                await stream.accepted()
        assert engine.stats().state is EngineState.RESTARTING
        with pytest.raises(EngineError, match="restarting"):
            engine.submit("abc", SamplingParams())
        await until(lambda: engine.stats().state is EngineState.RUNNING)
        stats = engine.stats()
        assert (stats.num_restarts, stats.num_requests, stats.failure) == (1, 0, "")
        assert engine.process_id != before
        assert not is_alive(before)
        assert await read(engine.submit("abc", SamplingParams(max_tokens=5)))
        await until(lambda: engine.stats().scheduler.totals.num_steps == 10)

    run(tmp_path, test)


def test_an_engine_that_dies_in_the_middle_gives_each_sequence_an_error(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        streams = [engine.submit("abc", SamplingParams(n=3, max_tokens=9)) for _ in range(4)]
        for stream in streams:
            await stream.accepted()
        os.kill(engine.process_id or 0, signal.SIGKILL)
        for stream in streams:
            found = await ends(stream)
            assert [reason for reason, _ in found] == [FinishReason.ERROR] * 3
            assert all("engine process ended" in error for _, error in found)

    run(tmp_path, test, mode="hold")


@pytest.mark.parametrize(("mode", "why"), [("break", "NoneType"), ("garbage", "SIGKILL")])
def test_an_engine_that_cannot_be_trusted_is_replaced_until_it_is_given_up(
    tmp_path: Path, mode: str, why: str
) -> None:
    async def test(engine: RemoteEngine) -> None:
        while engine.stats().state is not EngineState.FAILED:
            with suppress(EngineError):  # while it is restarting
                await read(engine.submit("abc", LONG))
            await asyncio.sleep(0.005)
        stats = engine.stats()
        assert stats.num_restarts == QUICK.max_quick_deaths
        assert why in stats.failure
        with pytest.raises(EngineError, match="failed"):
            engine.submit("abc", LONG)

    run(tmp_path, test, mode=mode)


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("refuse", ConfigError, "the script wants no model"),
        ("die", EngineError, "exited with code 7 while it loaded"),
    ],
)
def test_an_engine_that_cannot_open_says_why(
    tmp_path: Path, mode: str, error: type[Exception], words: str
) -> None:
    progress: list[tuple[int, int]] = []

    async def whole() -> None:
        engine = RemoteEngine(
            scripted_worker.config(tmp_path), command=scripted_worker.command(mode)
        )
        with pytest.raises(error, match=words):
            await engine.open(lambda done, total: progress.append((done, total)))
        assert engine.process_id is None
        await engine.stop()

    asyncio.run(asyncio.wait_for(whole(), DEADLINE_S))


def test_a_command_that_is_not_there_is_an_engine_error(tmp_path: Path) -> None:
    engine = RemoteEngine(scripted_worker.config(tmp_path), command=(str(tmp_path / "nothing"),))
    with pytest.raises(EngineError, match="cannot be started"):
        asyncio.run(engine.open())


def test_stop_lets_requests_end_and_takes_no_more(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        stream = engine.submit("abc", LONG)
        stopping = asyncio.create_task(engine.stop(DEADLINE_S))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="stopping"):
            engine.submit("abc", LONG)
        assert (await ends(stream))[0][0] is FinishReason.MAX_TOKENS
        await stopping
        assert engine.stats().state is EngineState.STOPPED

    run(tmp_path, test)


def test_an_engine_that_dies_while_it_drains_is_not_started_again(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        stream = engine.submit("abc", LONG)
        await stream.accepted()
        draining = asyncio.create_task(engine.stop(DEADLINE_S))
        await asyncio.sleep(0)
        os.kill(engine.process_id or 0, signal.SIGKILL)
        await draining
        assert (await ends(stream))[0][0] is FinishReason.ERROR
        assert engine.stats().num_restarts == 0

    run(tmp_path, test, mode="hold")


def test_a_second_stop_ends_the_drain_even_of_an_engine_that_hangs(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        stream = engine.submit("abc", LONG)
        await stream.accepted()
        draining = asyncio.create_task(engine.stop(DEADLINE_S))
        await asyncio.sleep(0)
        await engine.stop()
        await draining
        assert (await ends(stream))[0][0] is FinishReason.SHUTDOWN

    run(tmp_path, test, mode="hold")


def test_stop_while_the_engine_is_started_again_leaves_nothing(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        os.kill(engine.process_id or 0, signal.SIGKILL)
        await until(lambda: engine.stats().state is EngineState.RESTARTING)
        await engine.stop()
        assert engine.stats().state is EngineState.STOPPED

    run(tmp_path, test)


def test_an_engine_that_hangs_shows_in_the_stats_though_it_says_nothing(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        process_id = engine.process_id
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)
        try:
            stream = engine.submit("abc", SamplingParams(max_tokens=3))
            await until(lambda: engine.stats().stalled_s > 0.2)
        finally:
            os.kill(process_id, signal.SIGCONT)
        await read(stream)
        assert engine.stats().stalled_s == 0

    run(tmp_path, test)


def test_the_engine_leaves_signals_of_the_group_to_its_parent(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.process_id or 0, number)
        assert (await ends(engine.submit("abc", LONG)))[0][0] is FinishReason.MAX_TOKENS
        assert engine.stats().num_restarts == 0

    run(tmp_path, test)
