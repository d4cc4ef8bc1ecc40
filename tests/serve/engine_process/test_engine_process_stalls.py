"""The engine's process stopped or stuck: who waits is answered in time, and it is replaced."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import scripted_worker
from live_server import live_server_of
from msgspec.structs import replace
from remote_run import DEADLINE_S, LONG, QUICK, ask, ends, is_alive, read, run, until

from quickstep.engine.remote.engine import RemoteEngine
from quickstep.engine.stats import EngineState
from quickstep.errors import EngineError
from quickstep.server.options import ServerOptions
from quickstep.types import FinishReason, Request, Resumed, SamplingParams

STALL_S = 3.0


def stopped(engine: RemoteEngine) -> int:
    """Stop the engine's process as a debugger would; gives its id."""
    process_id = engine.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGSTOP)
    return process_id


async def is_back(engine: RemoteEngine) -> None:
    await until(lambda: engine.stats().state is EngineState.RUNNING)
    assert engine.stats().num_restarts >= 1


def test_a_stopped_process_with_work_is_replaced(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        running = ask(engine, "abc", SamplingParams(n=2, max_tokens=200))
        await running.accepted()
        before = stopped(engine)
        undecided = ask(engine, "abc", LONG)
        for stream in (running, undecided):
            try:
                found = await ends(stream)
            except EngineError as error:  # not taken yet
                found = [(FinishReason.ERROR, str(error))]
            assert {reason for reason, _ in found} <= {FinishReason.ERROR, FinishReason.MAX_TOKENS}
        await is_back(engine)
        assert not is_alive(before)
        assert await read(ask(engine, "abc", SamplingParams(max_tokens=5)))

    run(tmp_path, test, stall_s=STALL_S)


def test_a_step_that_never_ends_is_a_stall_though_the_process_talks(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        (found,) = await ends(ask(engine, "abc", LONG))
        assert found[0] is FinishReason.ERROR
        assert "engine process ended" in found[1]
        await until(lambda: "no step has ended" in engine.stats().failure)
        await is_back(engine)

    run(tmp_path, test, mode="hold", stall_s=STALL_S)


def test_an_engine_that_the_system_does_not_let_start_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a descriptor for its connection there is no process, and so none that has died."""
    num_tries = 4 * (QUICK.max_quick_deaths or 0)

    async def test(engine: RemoteEngine) -> None:
        num_refused = 0

        def refuse() -> tuple[socket.socket, socket.socket]:
            nonlocal num_refused
            num_refused += 1
            if num_refused > num_tries:
                monkeypatch.undo()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr("quickstep.engine.remote.launch.socket.socketpair", refuse)
        assert engine.process_id is not None
        os.kill(engine.process_id, signal.SIGKILL)
        await until(lambda: num_refused > num_tries)
        await is_back(engine)
        assert await read(ask(engine, "abc", SamplingParams(max_tokens=5)))

    run(tmp_path, test)


def test_a_deadline_holds_though_the_engine_says_nothing(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        running = ask(engine, "abc", SamplingParams(n=2, max_tokens=200), timeout_s=1.0)
        await anext(running)
        process_id = stopped(engine)
        undecided = ask(engine, "abc", LONG, timeout_s=0.1)
        await undecided.accepted()
        last = (await read(undecided))[-1]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.DEADLINE, "deadline")
        assert {reason for reason, _ in await ends(running)} <= {
            FinishReason.DEADLINE,
            FinishReason.MAX_TOKENS,
        }
        assert engine.stats().num_requests == 0
        os.kill(process_id, signal.SIGCONT)
        assert await read(ask(engine, "abc", SamplingParams(max_tokens=5)))
        await until(lambda: engine.stats().scheduler.blocks.num_used == 0)
        assert engine.stats().num_restarts == 0

    run(tmp_path, test)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_deadline_does_not_begin_again_on_another_engine(
    tmp_path: Path, is_resumed: bool
) -> None:
    """A request that has waited for this engine ends when its own time is over, although the engine
    says nothing.
    """

    async def test(engine: RemoteEngine) -> None:
        process_id = stopped(engine)
        received_s = time.monotonic() - 10 * DEADLINE_S
        request = Request("r", (97,), LONG, timeout_s=10 * DEADLINE_S, received_s=received_s)
        if is_resumed:
            request = replace(request, resumed=(Resumed(0, (98,)),))
        stream = engine.stream(request)
        await stream.accepted()
        assert [reason for reason, _ in await ends(stream)] == [FinishReason.DEADLINE]
        os.kill(process_id, signal.SIGCONT)

    run(tmp_path, test)


def test_a_continuation_has_the_time_that_is_left(tmp_path: Path) -> None:
    """A beam's, which is not counted from when the search was received."""

    async def test(engine: RemoteEngine) -> None:
        received_s = time.monotonic() - 10 * DEADLINE_S
        request = Request("r", (97,), SamplingParams(max_tokens=5), timeout_s=DEADLINE_S)
        request = replace(request, received_s=received_s, is_continuation=True)
        assert [reason for reason, _ in await ends(engine.stream(request))] == [
            FinishReason.MAX_TOKENS
        ]

    run(tmp_path, test)


def test_the_engines_own_end_at_a_deadline_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quickstep.engine.remote.engine._DEADLINE_MARGIN_S", DEADLINE_S)

    async def test(engine: RemoteEngine) -> None:
        stream = ask(engine, "abc", LONG, timeout_s=0.5)
        engine.pause(stream.request_id)  # which holds its steps, and not its deadline
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason is FinishReason.DEADLINE
        assert deltas[-1].timings is not None, "the engine's, which has the times"

    run(tmp_path, test)


def test_a_stopped_process_takes_no_more_than_a_bounded_number_of_requests(tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        process_id = stopped(engine)
        streams = [ask(engine, "abc", SamplingParams(max_tokens=3)) for _ in range(8)]
        with pytest.raises(EngineError, match=r"8 requests wait .* the limit is 8"):
            ask(engine, "abc", LONG)
        os.kill(process_id, signal.SIGCONT)
        for stream in streams:
            assert (await ends(stream))[0][0] is FinishReason.MAX_TOKENS
        assert await read(ask(engine, "abc", SamplingParams(max_tokens=5)))

    run(tmp_path, test, max_undecided=8)


async def over_http(
    path: Path, test: Callable[[RemoteEngine, httpx.AsyncClient], Awaitable[None]]
) -> None:
    engine = RemoteEngine(
        scripted_worker.config(path),
        command=scripted_worker.command(),
        restart_limits=QUICK,
        stall_s=STALL_S,
    )

    async def opened() -> RemoteEngine:
        await engine.open()
        return engine

    with live_server_of(opened, ServerOptions(drain_s=0.0, stall_s=STALL_S)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
            await test(engine, client)


def test_clients_of_a_stopped_engine_are_answered_and_then_served_again(tmp_path: Path) -> None:
    async def complete(client: httpx.AsyncClient, **fields: object) -> httpx.Response:
        body = {"model": "script", "prompt": "abc", "max_tokens": 200, **fields}
        return await client.post("/v1/completions", json=body)

    async def test(engine: RemoteEngine, client: httpx.AsyncClient) -> None:
        assert (await complete(client)).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        before = stopped(engine)
        patient = [asyncio.create_task(complete(client)) for _ in range(8)]
        hurried = [asyncio.create_task(complete(client, timeout_s=0.1)) for _ in range(8)]
        for task in hurried:
            answer = (await task).json()
            assert answer["choices"][0]["finish_reason"] == "timeout"
            assert answer["choices"][0]["stop_reason"] == "deadline"
        while (ready := await client.get("/ready")).status_code == 200:
            assert (await client.get("/health")).status_code in (200, 503)
            await asyncio.sleep(0.01)
        assert ready.status_code == 503
        late = (await complete(client, timeout_s=0.1)).json()
        assert "error" in late or late["choices"][0]["stop_reason"] == "deadline"
        for task in patient:
            assert (await task).status_code in (500, 503)
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)
        health = (await client.get("/health")).json()
        assert (health["status"], health["num_restarts"]) == ("ok", 1)
        assert not is_alive(before)
        assert (await complete(client)).status_code == 200

    asyncio.run(asyncio.wait_for(over_http(tmp_path, test), DEADLINE_S))
