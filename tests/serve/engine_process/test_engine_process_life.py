"""The engine in a process of its own: how it dies, is started again, and is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import scripted_worker
from remote_run import DEADLINE_S, LONG, QUICK, ask, ends, is_alive, read, run, until

from quickstep.engine.remote.engine import RemoteEngine
from quickstep.engine.remote.messages import FromEngine, Opened, StepNote
from quickstep.engine.stats import EngineState
from quickstep.errors import ConfigError, EngineError
from quickstep.server.options import ServerOptions
from quickstep.server.run import bind, serve
from quickstep.types import FinishReason, SamplingParams


def test_a_killed_engine_ends_every_stream_and_serves_again(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        await read(ask(engine, "abc", SamplingParams(max_tokens=5)))
        await until(lambda: engine.stats().scheduler.totals.num_steps == 5)
        before = engine.process_id
        assert before is not None
        os.kill(before, signal.SIGSTOP)  # so that neither is taken, nor runs
        streams = [ask(engine, "abc", SamplingParams(n=2, max_tokens=5)) for _ in range(20)]
        os.kill(before, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineError, match="send it again"):
                await stream.accepted()
        assert engine.stats().state is EngineState.RESTARTING
        with pytest.raises(EngineError, match="restarting"):
            ask(engine, "abc", SamplingParams())
        await until(lambda: engine.stats().state is EngineState.RUNNING)
        stats = engine.stats()
        assert (stats.num_restarts, stats.num_requests, stats.failure) == (1, 0, "")
        assert engine.process_id != before
        assert not is_alive(before)
        assert await read(ask(engine, "abc", SamplingParams(max_tokens=5)))
        await until(lambda: engine.stats().scheduler.totals.num_steps == 10)

    run(tmp_path, test)


def test_a_restart_keeps_the_tokenizer_while_its_files_are_the_same(tmp_path: Path) -> None:
    """Each one has a process for long texts, and the old one would stay until it is collected."""

    async def restarted(engine: RemoteEngine) -> None:
        num_restarts = engine.stats().num_restarts
        os.kill(engine.process_id or 0, signal.SIGKILL)
        await until(lambda: engine.stats().num_restarts == num_restarts + 1)

    async def test(engine: RemoteEngine) -> None:
        before = engine.tokenizer
        await restarted(engine)
        assert engine.tokenizer is before
        path = tmp_path / "tokenizer_config.json"
        path.write_text(path.read_text() + " ")
        await restarted(engine)
        assert engine.tokenizer is not before

    run(tmp_path, test)


def test_an_engine_that_dies_in_the_middle_gives_each_sequence_an_error(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        streams = [ask(engine, "abc", SamplingParams(n=3, max_tokens=9)) for _ in range(4)]
        for stream in streams:
            await stream.accepted()
        os.kill(engine.process_id or 0, signal.SIGKILL)
        for stream in streams:
            found = await ends(stream)
            assert [reason for reason, _ in found] == [FinishReason.ERROR] * 3
            assert all("engine process ended" in error for _, error in found)
        recorded = [(record.request_id, record.index) for record in engine.step_log.sequences]
        assert sorted(recorded) == sorted(
            (stream.request_id, index) for stream in streams for index in range(3)
        )
        assert {record.finish_reason for record in engine.step_log.sequences} == {
            FinishReason.ERROR
        }

    run(tmp_path, test, mode="hold")


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("break", "NoneType"),
        ("panic", "Panic: planted"),
        ("fail", "3 steps in a row failed"),
        ("garbage", "SIGKILL"),
    ],
)
def test_an_engine_that_cannot_be_trusted_is_replaced_until_it_is_given_up(
    tmp_path: Path, mode: str, why: str
) -> None:
    async def test(engine: RemoteEngine) -> None:
        while engine.stats().state is not EngineState.FAILED:
            with suppress(EngineError):  # while it is restarting
                await read(ask(engine, "abc", LONG))
            await asyncio.sleep(0.005)
        stats = engine.stats()
        assert stats.num_restarts == QUICK.max_quick_deaths
        assert why in stats.failure
        with pytest.raises(EngineError, match="failed"):
            ask(engine, "abc", LONG)

    run(tmp_path, test, mode=mode)


def test_an_engine_that_answers_is_never_given_up(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        for _ in range(QUICK.max_quick_deaths + 2):
            await read(ask(engine, "abc", SamplingParams(max_tokens=2)))
            process_id = engine.process_id
            assert process_id is not None
            os.kill(process_id, signal.SIGKILL)
            await until(lambda killed=process_id: engine.process_id not in (None, killed))
        assert engine.stats().state is EngineState.RUNNING

    run(tmp_path, test)


def test_an_answer_that_cannot_be_sent_ends_its_own_request(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        neighbour = ask(engine, "abc", LONG)
        found = await ends(ask(engine, "x", SamplingParams(n=2, max_tokens=5)))
        assert [reason for reason, _ in found] == [FinishReason.ERROR] * 2
        assert all("surrogates" in error for _, error in found)
        assert (await ends(neighbour))[0][0] is FinishReason.MAX_TOKENS
        await until(lambda: engine.stats().scheduler.num_running == 0)
        assert engine.stats().num_restarts == 0

    run(tmp_path, test, mode="unsendable")


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
        stream = ask(engine, "abc", LONG)
        stopping = asyncio.create_task(engine.stop(DEADLINE_S))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="stopping"):
            ask(engine, "abc", LONG)
        assert (await ends(stream))[0][0] is FinishReason.MAX_TOKENS
        await stopping
        assert engine.stats().state is EngineState.STOPPED

    run(tmp_path, test)


def test_an_engine_that_dies_while_it_drains_is_not_started_again(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        stream = ask(engine, "abc", LONG)
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
        stream = ask(engine, "abc", LONG)
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
            stream = ask(engine, "abc", SamplingParams(max_tokens=3))
            await until(lambda: engine.stats().stalled_s > 0.2)
        finally:
            os.kill(process_id, signal.SIGCONT)
        await read(stream)
        assert engine.stats().stalled_s == 0

    run(tmp_path, test)


def test_a_panic_while_the_engine_is_started_again_is_no_end_in_silence(tmp_path: Path) -> None:
    class Panic(BaseException):
        """What pyo3 raises for a panic in Rust, here of a tokenizer, is no Exception."""

    async def test(engine: RemoteEngine) -> None:
        async def opened(message: Opened, process: object) -> None:
            raise Panic("planted")

        engine.opened = opened
        os.kill(engine.process_id or 0, signal.SIGKILL)
        await until(lambda: engine.stats().state is EngineState.FAILED)
        assert "Panic: planted" in engine.stats().failure

    run(tmp_path, test)


def test_a_server_whose_engine_is_given_up_says_so_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = RemoteEngine(
        scripted_worker.config(tmp_path),
        command=scripted_worker.command("break"),
        restart_limits=QUICK,
    )

    async def opened() -> RemoteEngine:
        await engine.open()
        return engine

    served: Future[None] = Future()

    def run_server(sock: socket.socket) -> None:
        try:
            served.set_result(serve(opened, sock, ServerOptions(drain_s=0.0)))
        except BaseException as error:
            served.set_exception(error)

    with bind("127.0.0.1", 0) as sock:
        threading.Thread(target=run_server, args=(sock,), daemon=True).start()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions"
        statuses = set()
        while not served.done():
            with suppress(httpx.HTTPError):  # before it listens, and when it has ended
                body = {"model": "script", "prompt": "abc", "max_tokens": 5}
                statuses.add(httpx.post(url, json=body, timeout=DEADLINE_S).status_code)
    with pytest.raises(EngineError, match=r"given up: .*NoneType"):
        served.result()
    assert statuses <= {500, 503}
    assert any("the server ends" in record.message for record in caplog.records)


def test_the_engine_leaves_signals_of_the_group_to_its_parent(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.process_id or 0, number)
        assert (await ends(ask(engine, "abc", LONG)))[0][0] is FinishReason.MAX_TOKENS
        assert engine.stats().num_restarts == 0

    run(tmp_path, test)


def test_a_message_that_cannot_be_received_costs_a_process_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: RemoteEngine) -> None:
        before, receive, failing = engine.process_id, engine.receive, [True]

        def fails_once(message: FromEngine) -> None:
            if isinstance(message, StepNote) and failing:
                failing.clear()
                raise ValueError("planted")
            receive(message)

        monkeypatch.setattr(engine, "receive", fails_once)
        (end,) = await ends(ask(engine, "abc", SamplingParams(max_tokens=4)))
        assert end[0] is FinishReason.ERROR and "send it again" in end[1]
        await until(lambda: engine.stats().state is EngineState.RUNNING)
        assert engine.process_id != before
        assert await read(ask(engine, "abc", SamplingParams(max_tokens=4)))

    run(tmp_path, test)
