"""A server's replicas that are engines on other hosts, here over the loopback: they give the bits
of one engine, and their connections end without a word.
"""

from __future__ import annotations

import asyncio
import signal
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import scripted_worker
from listening_engine import TOKEN, EngineCommand, hello, listening, token_file
from msgspec.structs import replace
from scripted_engine import ScriptedEngine

from benchmarks.pulled_cable import Cable, cable
from quickstep.cluster.replicas import ReplicaSet
from quickstep.config import ReplicaConfig, RouterName
from quickstep.engine.llm import engine_config
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.engine.remote.hello import Hello, HelloRefused, Welcome
from quickstep.engine.remote.host import RECONNECTIONS, EngineAddress, connector
from quickstep.engine.remote.listener import EngineListener, bind
from quickstep.engine.remote.opening import framed
from quickstep.engine.remote.texts import text_digests
from quickstep.engine.stats import EngineState
from quickstep.errors import ConfigError, EngineError
from quickstep.types import FinishReason, Grammar, Request, SamplingParams

TEXT = "def first(a):\n    return a\n\ndef second(a):\n    return a\n\n"
DEADLINE_S = 60
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "logprobs": 2},
    {"temperature": 0.8, "seed": 4, "n": 2, "repetition_penalty": 1.1},
    {"temperature": 0.9, "seed": 5, "grammar": Grammar("regex", r"( [0-9],){12,40}")},
]


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_file(tmp_path_factory.mktemp("token"))


@pytest.fixture(scope="module")
def engines(token: Path) -> Iterator[list[EngineCommand]]:
    with listening("127.0.0.1:0", "127.0.0.1:0", token=token) as found:
        yield found


def server_of(
    addresses: Sequence[EngineAddress], said: Hello | None = None, model: str = "demo"
) -> ReplicaSet:
    """The replicas of a server, not open yet."""
    connectors = [connector(address, said or hello()) for address in addresses]

    def make(number: int, step_log: StepLog, watcher: ReplicaSet) -> RemoteEngine:
        return RemoteEngine(
            engine_config(model, {}),
            connect=connectors[number],
            restart_limits=RECONNECTIONS,
            watcher=watcher,
            replica=number,
            step_log=step_log,
        )

    return ReplicaSet(ReplicaConfig(len(addresses), RouterName.ROUND_ROBIN, 1000), make, seed=1)


async def opened(addresses: Sequence[EngineAddress]) -> ReplicaSet:
    """A server that takes requests."""
    server = server_of(addresses)
    await server.open()
    await server.start()
    return server


def run(engines: Sequence[EngineCommand], test: Callable[[ReplicaSet], Awaitable[None]]) -> None:
    async def main() -> None:
        server = await opened([engine.address for engine in engines])
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(server)
        finally:
            await server.stop()
        assert server.stats().state is EngineState.STOPPED
        assert not server.request_ids

    asyncio.run(main())


def request_of(server: ReplicaSet, number: int, max_tokens: int = 40, **fields: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": max_tokens, **KINDS[number % len(KINDS)], **fields})
    prompt = server.tokenizer.encode(TEXT + "y = " * (number % 5))
    return Request(f"r{number}", tuple(prompt), sampling)


async def output(
    server: ReplicaSet, request: Request, begun: asyncio.Event | None = None
) -> list[Any]:
    """Texts, tokens, logprobs and ends of a stream's sequences, without times."""
    parts: dict[int, list[Any]] = {index: ["", [], [], None] for index in request.indices}
    async with server.stream(request) as stream:
        async for delta in stream:
            part = parts[delta.index]
            part[0] += delta.text
            part[1] += delta.token_ids
            part[2] += delta.logprobs
            part[3] = delta.finish_reason or part[3]
            if begun is not None:
                begun.set()
    return list(parts.values())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def long_request(server: ReplicaSet, number: int) -> Request:
    return request_of(
        server, number, max_tokens=400, ignore_eos=True, temperature=0.8, grammar=None
    )


def test_two_engines_give_the_bits_of_one(engines: list[EngineCommand]) -> None:
    found: list[list[Any]] = []

    async def test(server: ReplicaSet) -> None:
        requests = [request_of(server, number) for number in range(8)]
        found.append(await asyncio.gather(*(output(server, request) for request in requests)))
        records = server.step_log.sequences
        assert {record.timings.replica for record in records} == set(range(len(server.engines)))
        assert {record.request_id for record in records} == {f"r{number}" for number in range(8)}

    run(engines, test)
    run(engines[:1], test)
    assert found[0] == found[1]


def test_two_servers_share_an_engine_and_a_request_id_is_each_ones_own(
    engines: list[EngineCommand],
) -> None:
    async def test(server: ReplicaSet) -> None:
        other = await opened([engines[0].address])
        request = long_request(server, 1)
        expected = await output(server, request)
        begun = asyncio.Event()
        both = asyncio.gather(output(server, request), output(other, request, begun))
        left = other.stream(long_request(other, 2))
        await begun.wait()
        await anext(left)
        assert [stats.num_requests for stats in (server.stats(), other.stats())] == [1, 2]
        assert await both == [expected, expected]
        await other.stop()
        assert await output(server, request) == expected
        assert {record.request_id for record in server.step_log.sequences} == {"r1"}

    run(engines[:1], test)


def test_an_engine_keeps_its_prefix_cache_when_a_server_goes_and_ends_its_requests(
    engines: list[EngineCommand],
) -> None:
    async def first(server: ReplicaSet) -> None:
        await output(server, request_of(server, 0))
        server.stream(long_request(server, 1))
        server.engines[0]._supervisor.process.kill()  # as if the server were killed

    async def second(server: ReplicaSet) -> None:
        await output(server, request_of(server, 0))
        (record,) = server.step_log.sequences
        assert record.timings.num_cached_tokens >= 16
        assert server.engines[0]._worker_stats.last.num_requests == 0

    async def both() -> None:
        server = await opened([engines[0].address])
        await first(server)
        await server.stop()

    asyncio.run(both())
    run(engines[:1], second)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Hello(hello().protocol, "another token, as long"), "the token is another one"),
        (Hello("0.0.1 (000000000000)", TOKEN), r"the build 0\.0\.1 \(000000000000\), the engine "),
    ],
)
def test_another_token_or_build_is_refused(
    engines: list[EngineCommand], said: Hello, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        asyncio.run(server_of([engines[0].address], said).open())


def test_nothing_listens_there() -> None:
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1 cannot be reached: Connection refused"):
        asyncio.run(server_of([EngineAddress("127.0.0.1", 1)]).open())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nhost: engine\r\n\r\n",
        b"\0\0\0\5\x91\x92\xa5Abort",
        struct.pack(">I", 5000),
        framed([Hello("x", "y"), Hello("x", "y")]),
        b"",
    ],
    ids=["http", "other", "long", "two", "silence"],
)
def test_a_stranger_is_disconnected_and_others_are_served(
    engines: list[EngineCommand], sent: bytes
) -> None:
    async def test(server: ReplicaSet) -> None:
        reader, writer = await asyncio.open_connection(*msgspec.structs.astuple(engines[0].address))
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()
        await output(server, request_of(server, 0))

    run(engines[:1], test)


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1"], ids=["long", "garbage"])
def test_a_server_that_sends_no_messages_is_disconnected(
    engines: list[EngineCommand], sent: bytes
) -> None:
    async def test(server: ReplicaSet) -> None:
        reader, writer = await asyncio.open_connection(*msgspec.structs.astuple(engines[0].address))
        writer.write(framed([hello()]))
        length = struct.unpack(">I", await reader.readexactly(4))[0]
        answer = msgspec.msgpack.decode(
            await reader.readexactly(length), type=list[Welcome | HelloRefused]
        )
        assert answer == [Welcome()]
        writer.write(sent)
        await reader.read()
        writer.close()
        await output(server, request_of(server, 0))

    run(engines[:1], test)


def test_a_silent_engine_is_noticed_and_its_streams_continue_elsewhere(
    engines: list[EngineCommand],
) -> None:
    async def test(server: ReplicaSet) -> None:
        request = long_request(server, 1)
        expected = await output(server, request)
        begun = asyncio.Event()
        task = asyncio.create_task(output(server, request, begun))
        await begun.wait()
        busy = next(number for number, one in enumerate(server.engines) if one.num_live)
        engines[busy].send(signal.SIGSTOP)
        try:
            await until(lambda: not server.engines[busy].is_serving)
            assert await task == expected
        finally:
            engines[busy].send(signal.SIGCONT)
        assert "has sent nothing for" in server.engines[busy].stats().failure
        await until(lambda: server.engines[busy].is_serving)
        assert server.stats().num_moves == 1

    run(engines, test)


def test_a_killed_engine_loses_no_stream_and_is_used_again_when_it_is_back(token: Path) -> None:
    async def test(server: ReplicaSet, engine: EngineCommand) -> None:
        request = long_request(server, 1)
        expected = await output(server, request)
        begun = asyncio.Event()
        task = asyncio.create_task(output(server, request, begun))
        await begun.wait()
        engine.send(signal.SIGKILL)
        await until(lambda: not server.engines[0].is_serving)
        assert server.request_ids == ("r1",), "it waits for the engine to come back"
        engine.process.wait()
        with listening(str(engine.address), token=token):
            assert await task == expected
            await server.stop()

    with listening("127.0.0.1:0", token=token) as (engine,):
        run([engine], lambda server: test(server, engine))


def test_sigterm_drains_an_engine_and_with_other_weights_it_is_not_used_again(
    token: Path,
) -> None:
    async def test(server: ReplicaSet, engine: EngineCommand) -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(output(server, long_request(server, 1), begun))
        await begun.wait()
        engine.send(signal.SIGTERM)
        await until(lambda: not server.engines[0].is_serving)
        ((_, token_ids, _, reason),) = await task
        assert reason is FinishReason.MAX_TOKENS
        assert len(token_ids) == 400
        assert server.stats().num_moves == 0
        assert await asyncio.to_thread(engine.process.wait) == 0
        with listening(str(engine.address), token=token, options="--quantization int8"):
            found = "came back with the fingerprint"
            await until(lambda: found in server.engines[0].stats().failure)
            assert server.fingerprint in server.engines[0].stats().failure
            assert not server.engines[0].is_serving

    with listening("127.0.0.1:0", token=token) as (engine,):
        run([engine], lambda server: test(server, engine))


def test_streams_leave_a_host_whose_cable_was_pulled(
    engines: list[EngineCommand], token: Path
) -> None:
    async def test(addresses: Sequence[EngineAddress], link: Cable) -> None:
        server = await opened(addresses)
        request = long_request(server, 1)
        begun = asyncio.Event()
        tasks = [asyncio.create_task(output(server, request, begun))]
        await begun.wait()
        other = replace(request, request_id="r2")
        other_begun = asyncio.Event()
        tasks.append(asyncio.create_task(output(server, other, other_begun)))
        await other_begun.wait()
        assert server.engines[1].num_live
        link.pull()
        await until(lambda: not server.engines[1].is_serving)
        first, second = await asyncio.gather(*tasks)
        assert first == second
        assert server.stats().num_moves == 1
        link.mend()
        await until(lambda: server.engines[1].is_serving)
        await until(lambda: server.engines[1]._worker_stats.last.num_requests == 0)
        await server.stop()

    with cable() as link, listening(link.listen, token=token, prefix=link.prefix) as (far,):
        addresses = [engines[0].address, link.plug(far.address)]
        asyncio.run(asyncio.wait_for(test(addresses, link), DEADLINE_S))


async def scripted_listener(path: Path) -> tuple[ScriptedEngine, EngineListener]:
    """A scripted engine that runs in this process, and what will listen for it."""
    far = scripted_worker.scripted(scripted_worker.config(path))
    await far.engine.start()
    return far, EngineListener(far.engine, hello(), text_digests(path, far.engine.tokenizer))


def test_a_server_waits_for_an_engine_that_starts_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        far, listener = await scripted_listener(tmp_path)
        sock = bind(EngineAddress("127.0.0.1", 0), "--listen")  # refuses, since it does not listen
        address = EngineAddress(*sock.getsockname()[:2])
        near = RemoteEngine(
            scripted_worker.config(tmp_path), connect=connector(address, hello(), wait_s=60.0)
        )
        opening = asyncio.create_task(near.open())
        await until(lambda: "Connection refused; trying again" in caplog.text)
        await listener.start(sock)
        await opening
        await near.stop()
        await listener.stop(0.0)
        await far.engine.stop()

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


def test_a_server_counts_what_an_engine_did_while_it_was_connected(tmp_path: Path) -> None:
    async def answered(near: RemoteEngine) -> None:
        request = Request("r", tuple(b"abc"), SamplingParams(max_tokens=5, ignore_eos=True))
        async with near.stream(request) as stream:
            assert [delta async for delta in stream][-1].finish_reason is FinishReason.MAX_TOKENS

    async def test() -> None:
        far, listener = await scripted_listener(tmp_path)
        sock = bind(EngineAddress("127.0.0.1", 0), "--listen")
        await listener.start(sock)
        address = EngineAddress(*sock.getsockname()[:2])
        for _ in range(2):  # the second server finds an engine that has counted
            near = RemoteEngine(
                scripted_worker.config(tmp_path),
                connect=connector(address, hello()),
                restart_limits=RECONNECTIONS,
            )
            await near.open()
            await near.start()
            assert near.stats().scheduler.totals.num_steps == 0
            await answered(near)
            lost = near._supervisor.process
            await until(lambda near=near: near.stats().scheduler.totals.num_steps == 5)
            lost.kill()
            await until(lambda near=near: near.stats().num_restarts == 1)
            await answered(near)
            await near.stop()
            totals = near.stats().scheduler.totals
            assert (totals.num_steps, totals.num_output_tokens) == (10, 10)
            assert len(near.step_log.steps) == 10
        await listener.stop(0.0)
        await far.engine.stop()

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


def test_times_of_an_engine_are_by_the_clock_of_the_server(tmp_path: Path) -> None:
    async def test() -> None:
        far, listener = await scripted_listener(tmp_path)
        far.skipped_s = 12_345.0  # its clock is that far ahead
        sock = bind(EngineAddress("127.0.0.1", 0), "--listen")
        await listener.start(sock)
        address = EngineAddress(*sock.getsockname()[:2])
        near = RemoteEngine(scripted_worker.config(tmp_path), connect=connector(address, hello()))
        await near.open()
        await near.start()
        since_s = time.monotonic()
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        request = Request("r", tuple(b"abc"), sampling, received_s=since_s, timeout_s=30.0)
        async with near.stream(request) as stream:
            deltas = [delta async for delta in stream]
        until_s = time.monotonic()
        assert since_s <= near.stats().last_step_s <= until_s + 0.05
        await near.stop()
        assert deltas[-1].finish_reason is FinishReason.MAX_TOKENS
        (record,) = near.step_log.sequences
        for timings in (record.timings, deltas[-1].timings):
            assert timings.arrival_s == pytest.approx(since_s, abs=0.05)
            assert timings.arrival_s <= timings.first_token_s <= timings.finished_s
            assert timings.finished_s <= until_s + 0.05
        for step in near.step_log.steps:
            assert since_s - 0.05 <= step.planned_at_s <= step.committed_at_s <= until_s + 0.05
        await listener.stop(0.0)
        await far.engine.stop()

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


def test_a_probe_of_the_port_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        far, listener = await scripted_listener(tmp_path)
        with bind(EngineAddress("127.0.0.1", 0), "--listen") as sock:
            await listener.start(sock)
            for sent in (b"", b"GET / HTTP/1.1\r\n\r\n"):
                reader, writer = await asyncio.open_connection(*sock.getsockname())
                writer.write(sent)
                writer.write_eof()
                async with asyncio.timeout(DEADLINE_S):
                    await reader.read()  # until it is closed
                writer.close()
            await listener.stop(0.0)
        await far.engine.stop()

    asyncio.run(test())
    assert [record.levelname for record in caplog.records if "the server at" in record.message] == [
        "WARNING"
    ]
