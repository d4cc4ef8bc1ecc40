"""Replicas of the demo model, as the server uses them: their processes are killed under load, and
no client notices it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from quickstep.cluster.replicas import ReplicaSet
from quickstep.config import EngineConfig, LoRAConfig, ReplicaConfig, RouterName, StreamConfig
from quickstep.core.explanation import explain
from quickstep.core.recordings.routing import replay_routing
from quickstep.engine.llm import engine_config
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.engine.remote.messages import AdapterNote
from quickstep.engine.remote.supervisor import RestartLimits
from quickstep.engine.stats import EngineState
from quickstep.errors import EngineError, RequestError
from quickstep.model.checkpoint.source import bundled_adapter, local_checkpoint
from quickstep.types import Delta, FinishReason, Grammar, Request, SamplingParams, SlotPrefix

TEXT = "def first(a):\n    return a\n\ndef second(a):\n    return a\n\n"
OPTIONS = {"num_threads": 1, "max_model_len": 512, "num_blocks": 200, "device": "cpu"}
MANY_RESTARTS = RestartLimits(max_quick_deaths=1000, first_delay_s=0.01, max_delay_s=0.05)

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "logprobs": 2},
    {"temperature": 0.8, "seed": 4, "n": 3, "repetition_penalty": 1.1},
    {"temperature": 0.9, "seed": 5, "grammar": Grammar("regex", r"( [0-9],){12,40}")},
    {"temperature": 0.7, "seed": 6, "stop": ("third", "\n\n\n"), "prompt_logprobs": 1},
]


def run(
    test: Callable[[ReplicaSet], Awaitable[None]],
    num_replicas: int = 2,
    max_moves: int = 1000,
    router: RouterName = RouterName.PREDICTED,
    restart_limits: RestartLimits = MANY_RESTARTS,
    model: str = "demo",
    record_routing: Path | None = None,
    lora: LoRAConfig | None = None,
    **options: Any,
) -> None:
    config: EngineConfig = engine_config(model, {**OPTIONS, **options})
    config = config if lora is None else replace(config, lora=lora)

    def make(number: int, step_log: StepLog, watcher: ReplicaSet) -> RemoteEngine:
        return RemoteEngine(
            config,
            restart_limits=restart_limits,
            watcher=watcher,
            replica=number,
            step_log=step_log,
        )

    async def main() -> None:
        replicas = ReplicaSet(
            ReplicaConfig(
                num_replicas,
                router,
                max_moves,
                max_deaths=1000,
                record_routing=record_routing,
            ),
            make,
            seed=1,
        )
        await replicas.open()
        await replicas.start()
        try:
            async with asyncio.timeout(240):
                await test(replicas)
        finally:
            await replicas.stop()
        assert replicas.stats().state in (EngineState.STOPPED, EngineState.FAILED)
        assert not replicas.request_ids

    asyncio.run(main())


def request_of(
    engine: ReplicaSet, number: int, max_tokens: int = 60, cache_salt: str = "", **fields: Any
) -> Request:
    sampling = SamplingParams(**{"max_tokens": max_tokens, **KINDS[number % len(KINDS)], **fields})
    ids = tuple(engine.tokenizer.encode(TEXT + "x = " * (number % 7)))
    return Request(f"r{number}", ids, sampling, cache_salt=cache_salt)


def content(deltas: list[Delta]) -> dict[int, list[Any]]:
    """What the client has of each sequence; no times."""
    found: dict[int, list[Any]] = {}
    for delta in deltas:
        one = found.setdefault(delta.index, ["", (), (), (), None])
        one[0] += delta.text
        one[1] += delta.token_ids
        one[2] += delta.logprobs
        one[3] += delta.prompt_logprobs
        if delta.finish_reason is not None:
            one[4] = (delta.finish_reason, delta.stop_reason, delta.error)
    return found


async def output(engine: ReplicaSet, request: Request, begun: asyncio.Event | None = None) -> Any:
    async with engine.stream(request) as stream:
        deltas = []
        async for delta in stream:
            deltas.append(delta)
            if begun is not None:
                begun.set()
    return content(deltas)


def kill(engine: ReplicaSet, replica: int) -> None:
    process_id = engine.process_ids[replica]
    if process_id is not None:
        os.kill(process_id, signal.SIGKILL)


async def until_running(engine: ReplicaSet, num: int) -> None:
    while sum(replica.is_serving for replica in engine.engines) < num:
        await asyncio.sleep(0.01)


def test_streams_of_killed_replicas_continue_with_the_same_bits() -> None:
    async def test(engine: ReplicaSet) -> None:
        requests = [request_of(engine, number) for number in range(20)]
        expected = [await output(engine, request) for request in requests]
        rng = Random(3)

        async def kill_some() -> None:
            for _ in range(6):
                await until_running(engine, 2)
                busy = [n for n, one in enumerate(engine.engines) if one.num_live]
                kill(engine, rng.choice(busy or [0]))
                await asyncio.sleep(0.1)

        killing = asyncio.create_task(kill_some())
        while not killing.done():
            await until_running(engine, 1)
            found = await asyncio.gather(*(output(engine, request) for request in requests))
            assert found == expected
        await killing
        await until_running(engine, 3)  # restarts may take long on a busy machine
        stats = engine.stats()
        assert stats.num_moves > 2
        assert stats.num_restarts > 2
        assert len(stats.replicas) == 3

    run(test, num_replicas=3)


def test_a_stream_of_the_only_engine_continues_on_its_successor() -> None:
    async def test(engine: ReplicaSet) -> None:
        request = request_of(engine, 1, max_tokens=200, ignore_eos=True)
        expected = await output(engine, request)
        begun = asyncio.Event()
        task = asyncio.create_task(output(engine, request, begun))
        await begun.wait()
        kill(engine, 0)
        while engine.engines[0].is_serving:
            await asyncio.sleep(0.005)
        assert engine.request_ids == ("r1",), "it waits for the successor"
        assert await task == expected
        assert engine.stats().num_moves == 1
        *_, record = engine.step_log.sequences
        timings = record.timings
        assert timings.num_moves == 1
        assert 0.0 < timings.elsewhere_s <= timings.queue_s
        explained = explain(record.request_id, timings, engine.step_log.steps)
        explained_s = explained.elsewhere_s + sum(part.seconds for part in explained.parts)
        assert explained_s == pytest.approx(explained.total_s)

    run(test, num_replicas=1)


async def kill_the_only(engine: ReplicaSet) -> None:
    kill(engine, 0)
    while engine.engines[0].is_serving:
        await asyncio.sleep(0.005)


def test_new_requests_wait_while_no_engine_serves() -> None:
    async def test(engine: ReplicaSet) -> None:
        # none with a grammar, whose preparation lets others pass
        requests = [request_of(engine, number) for number in (0, 1, 2, 4, 5)]
        expected = [await output(engine, request) for request in requests]
        await kill_the_only(engine)
        streams = [engine.stream(request) for request in requests[:2]]
        tasks = [asyncio.create_task(output(engine, request)) for request in requests[2:]]
        await asyncio.sleep(0)
        stats = engine.stats()
        assert stats.num_requests == 5
        assert stats.scheduler.num_waiting == sum(one.sampling.n for one in requests)
        assert engine.request_ids == ("r0", "r1", "r2", "r4", "r5")
        with pytest.raises(RequestError, match="is in use"):
            engine.stream(requests[0])
        await streams[1].aclose()
        found = [content([delta async for delta in streams[0]])]
        found += await asyncio.gather(*tasks)
        assert found == [expected[0], *expected[2:]]
        assert engine.stats().num_moves == 0, "none was on an engine that has ended"
        by_id = {record.request_id: record for record in engine.step_log.sequences[-9:]}
        waits = [by_id[f"r{number}"].timings.first_scheduled_s for number in (0, 2, 4, 5)]
        assert waits == sorted(waits)

    run(test, num_replicas=1)


def test_so_many_new_requests_wait_as_in_the_queue_of_an_engine() -> None:
    async def test(engine: ReplicaSet) -> None:
        await kill_the_only(engine)
        waiting = [engine.stream(request_of(engine, 0)), engine.stream(request_of(engine, 2))]
        full = "4 sequences wait for one, the limit is 4"
        with pytest.raises(EngineError, match=full):
            engine.stream(request_of(engine, 1))
        with pytest.raises(EngineError, match=full):
            engine.check_admission(request_of(engine, 1), 1)
        await waiting[1].aclose()
        other = engine.stream(request_of(engine, 1))
        for stream in (waiting[0], other):
            assert [delta async for delta in stream]

    run(test, num_replicas=1, max_waiting=4)


@pytest.mark.parametrize("field", ["timeout_s", "ttft_deadline_s"])
def test_a_new_request_waits_until_its_deadline(field: str) -> None:
    async def test(engine: ReplicaSet) -> None:
        await kill_the_only(engine)
        stream = engine.stream(replace(request_of(engine, 0), **{field: 0.05}))
        if field == "timeout_s":
            ((text, _, _, _, end),) = content([delta async for delta in stream]).values()
            assert (text, end) == ("", (FinishReason.DEADLINE, "deadline", ""))
        else:
            with pytest.raises(RequestError, match="within 50 ms: it has waited"):
                await stream.accepted()
        assert not engine.engines[0].is_serving
        assert not engine.request_ids

    run(test, num_replicas=1, restart_limits=RestartLimits(first_delay_s=0.5))


def test_no_request_waits_for_engines_that_are_given_up() -> None:
    async def test(engine: ReplicaSet) -> None:
        await kill_the_only(engine)
        with pytest.raises(EngineError, match=r"send it again|failed"):  # before, or after that
            await engine.stream(request_of(engine, 0)).accepted()
        assert engine.stats().state is EngineState.FAILED
        with pytest.raises(EngineError, match="failed"):
            engine.stream(request_of(engine, 0))

    run(test, num_replicas=1, restart_limits=RestartLimits(max_quick_deaths=0))


def test_a_request_that_ends_every_engine_is_ended() -> None:
    async def test(engine: ReplicaSet) -> None:
        begun = asyncio.Event()
        request = request_of(engine, 0, max_tokens=400, ignore_eos=True)
        task = asyncio.create_task(output(engine, request, begun))
        await begun.wait()
        while not task.done():
            running = next((one for one in engine.engines if one.is_live("r0")), None)
            if running is not None and running.process_id is not None:
                os.kill(running.process_id, signal.SIGKILL)
            await asyncio.sleep(0.001)
        ((_, token_ids, _, _, end),) = (await task).values()
        assert end == (FinishReason.ERROR, None, end[2])
        assert "2 engine processes ended in a row while they computed it" in end[2]
        assert token_ids
        await until_running(engine, 2)

    run(test, max_moves=1)


def test_a_deadline_passes_while_no_engine_serves() -> None:
    async def test(engine: ReplicaSet) -> None:
        request = replace(request_of(engine, 0, max_tokens=400, ignore_eos=True), timeout_s=0.4)
        begun = asyncio.Event()
        task = asyncio.create_task(output(engine, request, begun))
        await begun.wait()
        is_done = asyncio.Event()

        async def keep_dead() -> None:
            while not is_done.is_set():
                kill(engine, 0)
                await asyncio.sleep(0.005)

        killing = asyncio.create_task(keep_dead())
        ((_, token_ids, _, _, end),) = (await task).values()
        assert end == (FinishReason.DEADLINE, "deadline", "")
        assert token_ids
        (record,) = engine.step_log.sequences
        assert record.finish_reason is FinishReason.DEADLINE
        assert record.timings.num_output_tokens == len(token_ids)
        is_done.set()
        await killing

    run(test, num_replicas=1)


def test_a_client_that_leaves_while_no_engine_serves_leaves_nothing() -> None:
    async def test(engine: ReplicaSet) -> None:
        request = request_of(engine, 0, max_tokens=400, ignore_eos=True)
        async with engine.stream(request) as stream:
            await anext(stream)
            kill(engine, 0)
            while engine.engines[0].is_serving:
                await asyncio.sleep(0.005)
        assert not engine.request_ids
        (record,) = engine.step_log.sequences
        assert record.finish_reason is FinishReason.ABORTED
        assert record.timings.num_output_tokens >= 1
        await until_running(engine, 1)
        assert not engine.request_ids

    run(test, num_replicas=1)


def test_the_replicas_share_requests_and_find_what_they_have_cached() -> None:
    async def test(engine: ReplicaSet) -> None:
        requests = [request_of(engine, number) for number in range(12)]
        await asyncio.gather(*(output(engine, request) for request in requests))
        replicas = [record.timings.replica for record in engine.step_log.sequences]
        assert set(replicas) == {0, 1}
        assert {record.replica for record in engine.step_log.steps} == {0, 1}
        conversation = replace(
            requests[0],
            request_id="long",
            prompt_token_ids=tuple(engine.tokenizer.encode("import os\n" * 60)),
        )
        await output(engine, conversation)
        for _ in range(3):
            await output(engine, conversation)
        *_, last = engine.step_log.sequences
        assert last.timings.num_cached_tokens > 100
        assert len({record.timings.replica for record in engine.step_log.sequences[-4:]}) == 1
        assert await engine.reset_prefix_cache() > 0

    run(test)


def test_what_no_replica_takes_is_refused_as_by_one_engine() -> None:
    async def test(engine: ReplicaSet) -> None:
        too_long = Request("long", tuple(range(5, 600)), SamplingParams(max_tokens=1))
        with pytest.raises(RequestError, match="512"):
            engine.stream(too_long)
        stream = engine.stream(request_of(engine, 0))
        with pytest.raises(RequestError, match="is in use"):
            engine.stream(request_of(engine, 0))
        await stream.aclose()

    run(test)


def test_paused_readers_and_aborts_follow_a_request_to_its_replica() -> None:
    async def test(engine: ReplicaSet) -> None:
        request = request_of(engine, 0, max_tokens=300, ignore_eos=True)
        expected = await output(engine, request)
        stream = ReplicaSet.stream(engine, request)
        stream._max_deltas = 4  # a reader that falls behind at once
        deltas = [await anext(stream)]
        await asyncio.sleep(0.2)
        first = next(number for number, one in enumerate(engine.engines) if one.is_live("r0"))
        kill(engine, first)
        async for delta in stream:
            deltas.append(delta)
        assert content(deltas) == expected
        assert StreamConfig().max_unread_deltas > 4

    run(test)


def test_an_adapter_moves_with_its_request_or_the_stream_ends() -> None:
    async def test(engine: ReplicaSet) -> None:
        for name, content_of in (("one", "demo-docstrings"), ("two", "demo-annotations")):
            await engine.load_adapter(name, content_of)
        requests = [
            replace(
                request_of(engine, number, max_tokens=200, ignore_eos=True),
                request_id=name,
                adapter=name,
            )
            for number, name in enumerate(("one", "two"))
        ]
        expected = [await output(engine, request) for request in requests]
        begun = [asyncio.Event(), asyncio.Event()]
        tasks = [
            asyncio.create_task(output(engine, request, event))
            for request, event in zip(requests, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        await engine.load_adapter("two", "demo-sql")  # for later requests, and after the restart
        kill(engine, 0)
        first, second = await asyncio.gather(*tasks)
        assert first == expected[0]
        ((_, _, _, _, end),) = second.values()
        assert end[0] is FinishReason.ERROR
        assert "'two' was unloaded or replaced" in end[2]

    run(test, num_replicas=1, enable_lora=True)


def test_an_adapter_that_the_system_did_not_let_a_restart_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a thread or a descriptor for a moment, an engine would be without it for ever."""
    monkeypatch.setattr("quickstep.engine.remote.engine._RELOAD_S", 0.05)
    bundled = bundled_adapter("demo-sql")
    assert bundled is not None
    path, away = tmp_path / "mine", tmp_path / "away"
    shutil.copytree(bundled, path)

    async def test(engine: ReplicaSet) -> None:
        await engine.load_adapter("mine", str(path))
        request = replace(request_of(engine, 0), adapter="mine")
        expected = await output(engine, request)
        remote, num_refused, note_change = engine.engines[0], 0, engine.engines[0]._note_change

        def refused(note: AdapterNote) -> None:
            nonlocal num_refused
            if note.refused is not None:
                num_refused += 1
                note = replace(note, refused=replace(note.refused, status=500, code=None))
            note_change(note)

        monkeypatch.setattr(remote, "_note_change", refused)
        path.rename(away)
        kill(engine, 0)
        while num_refused < 2:
            await asyncio.sleep(0.01)
        away.rename(path)
        while remote._reloads or num_refused < 2:
            await asyncio.sleep(0.01)
        while True:  # ended by the limit of the test
            try:
                assert await output(engine, request) == expected
                return
            except RequestError:
                await asyncio.sleep(0.05)

    run(test, num_replicas=1, enable_lora=True)


def test_no_restart_brings_back_the_adapters_of_the_start(tmp_path: Path) -> None:
    """Neither one that was unloaded, nor one that was replaced by what is gone from disk since."""
    copies = {name: str(tmp_path / name) for name in ("replaced", "removed")}
    bundled = bundled_adapter("demo-sql")
    assert bundled is not None
    for path in copies.values():
        shutil.copytree(bundled, path)
    names = ("unloaded", *copies)

    async def test(engine: ReplicaSet) -> None:
        await engine.unload_adapter("unloaded")
        for name, path in copies.items():
            await engine.load_adapter(name, path)
        request = replace(request_of(engine, 0), adapter="replaced")
        expected = await output(engine, request)
        shutil.rmtree(copies["removed"])
        kill(engine, 0)
        assert await output(engine, request) == expected
        for name in ("unloaded", "removed"):
            refused = replace(request, request_id=name, adapter=name)
            with pytest.raises(RequestError, match=f"{name!r} is not loaded"):
                await output(engine, refused)

    modules = tuple((name, "demo-docstrings") for name in names)
    run(test, num_replicas=1, lora=LoRAConfig(modules=modules))


def test_an_engine_that_ends_while_the_server_drains_ends_its_requests() -> None:
    async def test(engine: ReplicaSet) -> None:
        begun = asyncio.Event()
        request = request_of(engine, 0, max_tokens=400, ignore_eos=True)
        task = asyncio.create_task(output(engine, request, begun))
        await begun.wait()
        stopping = asyncio.create_task(engine.stop(drain_s=60))
        await asyncio.sleep(0)
        kill(engine, 0)
        ((_, _, _, _, end),) = (await task).values()
        assert end[0] is FinishReason.SHUTDOWN
        await stopping

    run(test, num_replicas=1)


LONG = {"max_tokens": 400, "ignore_eos": True}


async def begun(engine: ReplicaSet, requests: Sequence[Request]) -> list[asyncio.Task[Any]]:
    """The outputs of requests that all have their first tokens."""
    events = [asyncio.Event() for _ in requests]
    tasks = [
        asyncio.create_task(output(engine, request, event))
        for request, event in zip(requests, events, strict=True)
    ]
    for event in events:
        await event.wait()
    return tasks


def assert_recorded_once(engine: ReplicaSet, requests: Sequence[Request]) -> None:
    """Each sequence has one record, whatever engines it was on: it is counted once."""
    num = sum(request.sampling.n for request in requests)
    recorded = [(one.request_id, one.index) for one in engine.step_log.sequences][-num:]
    assert sorted(recorded) == sorted(
        (request.request_id, index) for request in requests for index in range(request.sampling.n)
    )


def test_a_rolling_restart_changes_no_stream_and_stops_one_engine_at_a_time() -> None:
    async def test(engine: ReplicaSet) -> None:
        requests = [request_of(engine, number, **LONG) for number in (0, 1, 2, 5, 6, 7)]
        expected = [await output(engine, request) for request in requests]
        processes = engine.process_ids
        tasks = await begun(engine, requests)
        restarting = asyncio.create_task(engine.restart_replicas())
        states = []
        while not restarting.done():
            states.append([replica.is_up for replica in engine.stats().replicas])
            await asyncio.sleep(0.005)
        assert min(map(sum, states)) == 2
        assert {False} < {is_up for state in states for is_up in state}
        changes = await restarting
        assert [change.replica for change in changes] == [0, 1, 2]
        assert sum(change.num_moved for change in changes) == engine.stats().num_moves > 0
        assert not set(processes) & set(engine.process_ids)
        assert await asyncio.gather(*tasks) == expected
        assert_recorded_once(engine, requests)
        stats = engine.stats()
        assert [replica.num_restarts for replica in stats.replicas] == [1, 1, 1]
        assert stats.scheduler.blocks.num_used == 0

    run(test, num_replicas=3)


def test_requests_wait_while_the_only_engine_is_restarted() -> None:
    async def test(engine: ReplicaSet) -> None:
        requests = [request_of(engine, number, **LONG) for number in (0, 1, 5)]
        expected = [await output(engine, request) for request in requests]
        tasks = await begun(engine, requests[:2])
        restarting = asyncio.create_task(engine.restart_replica(0))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(output(engine, requests[2])))
        with pytest.raises(RequestError, match="being drained or restarted"):
            await engine.restart_replica(0)
        change = await restarting
        assert (change.num_moved, change.num_ended, change.note) == (2, 0, "")
        assert await asyncio.gather(*tasks) == expected
        with pytest.raises(RequestError, match="restart it instead"):
            await engine.drain_replica(0)
        with pytest.raises(RequestError, match="there is no replica 1"):
            await engine.restart_replica(1)

    run(test, num_replicas=1)


def test_a_drained_engine_gets_no_requests_until_it_is_restarted() -> None:
    async def test(engine: ReplicaSet) -> None:
        requests = [request_of(engine, number, **LONG) for number in (0, 1, 2, 5, 6, 7)]
        expected = [await output(engine, request) for request in requests]
        tasks = await begun(engine, requests)
        change = await engine.drain_replica(1)
        assert change.num_moved
        assert change.is_draining
        first, second = engine.stats().replicas
        assert (first.is_up, second.is_up, second.is_draining) == (True, False, True)
        assert await asyncio.gather(*tasks) == expected
        assert_recorded_once(engine, requests)
        await asyncio.gather(*(output(engine, request) for request in requests))
        assert {one.timings.replica for one in engine.step_log.sequences[-10:]} == {0}
        kill(engine, 1)
        await until_running(engine, 1)
        while not engine.engines[1].is_serving:
            await asyncio.sleep(0.005)
        assert engine.stats().replicas[1].is_draining, "its own restart does not end that"
        assert not (await engine.restart_replica(1)).is_draining
        await asyncio.gather(*(output(engine, request) for request in requests))
        assert {one.timings.replica for one in engine.step_log.sequences[-10:]} == {0, 1}

    run(test)


def test_a_request_comes_back_to_an_engine_that_has_ended_it() -> None:
    """As when the engine fails that its prompt was handed over to."""

    async def test(engine: ReplicaSet) -> None:
        requests = [request_of(engine, number, **LONG) for number in (0, 2, 5)]
        expected = [await output(engine, request) for request in requests]
        tasks = await begun(engine, requests)
        for lost in engine.engines[0].take_requests():
            engine._parked.add(lost)
        engine._place_parked()
        assert len(engine._parked) == len(requests)
        assert await asyncio.gather(*tasks) == expected
        assert_recorded_once(engine, requests)

    run(test, num_replicas=1)


def test_requests_may_end_on_an_engine_before_it_is_restarted() -> None:
    async def test(engine: ReplicaSet) -> None:
        tasks = await begun(engine, [request_of(engine, 0, max_tokens=20, ignore_eos=True)])
        change = await engine.restart_replica(0, drain_s=60)
        assert (change.num_ended, change.num_moved) == (1, 0)
        await asyncio.gather(*tasks)

    run(test, num_replicas=1)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_streams_end_before_other_weights_are_loaded(num_replicas: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(local_checkpoint("demo").path, model)
    (weights,) = model.glob("*.safetensors")

    async def test(engine: ReplicaSet) -> None:
        requests = [request_of(engine, number, **LONG) for number in (0, 1, 5, 6)]
        old = [await output(engine, request) for request in requests]
        before = engine.fingerprint
        content = weights.read_bytes()
        replaced = tmp_path / "new"
        replaced.write_bytes(content[:-64] + bytes(64))
        tasks = await begun(engine, requests)
        replaced.rename(weights)
        restarting = asyncio.create_task(engine.restart_replicas())
        found = [await asyncio.gather(*tasks)]
        while not restarting.done():
            outputs = (output(engine, request) for request in requests)
            found.append(await asyncio.gather(*outputs))
        changes = await restarting
        assert engine.fingerprint != before
        assert {change.fingerprint for change in changes} == {engine.fingerprint}
        assert changes[-1].num_moved == 0
        new = [await output(engine, request) for request in requests]
        assert new != old
        assert found[0] == old
        for outputs_found in found:
            for either, *both in zip(outputs_found, old, new, strict=True):
                assert either in both
        if num_replicas == 1:
            assert "those on disk have changed" in changes[0].note

    run(test, num_replicas=num_replicas, model=str(model))


def test_the_decisions_of_a_live_router_are_those_of_the_simulators(tmp_path: Path) -> None:
    async def test(engine: ReplicaSet) -> None:
        requests = [request_of(engine, number) for number in range(24)]
        for part in (requests[:12], requests[12:], requests):
            await asyncio.gather(*(output(engine, request) for request in part))
            kill(engine, 0)
            await until_running(engine, 2)
        tasks = await begun(engine, [request_of(engine, 0, **LONG)])
        await engine.restart_replicas()
        await asyncio.gather(*tasks)

    path = tmp_path / "routing.jsonl"
    run(test, num_replicas=3, record_routing=path)
    lines = path.read_bytes().splitlines(keepends=True)
    replayed = replay_routing(lines)
    assert replayed.different_line is None
    assert replayed.num_choices >= 48
    assert (replayed.router, replayed.num_replicas) == ("predicted", 3)
    assert b"def first" not in path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0


ROUTERS = [RouterName.PREDICTED, RouterName.PREFIX, RouterName.ROUND_ROBIN]


async def cached(engine: ReplicaSet, request: Request) -> tuple[Any, int, int]:
    """What a request gives, how many of its tokens were cached, and on which replica."""
    found = await output(engine, request)
    record = engine.step_log.sequences[-1]
    assert record.request_id == request.request_id
    num_cached = record.timings.num_cached_tokens
    assert num_cached is not None
    return found, num_cached, record.timings.replica


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_slot_is_restored_where_its_prompt_is_sent_next(
    num_replicas: int, router: RouterName, tmp_path: Path
) -> None:
    """Also by other engines, after a restart, and if another prefix is cached by each of them."""
    options = {"slot_save_path": str(tmp_path / "slots")}
    requests: list[Request] = []
    saved: list[tuple[Any, SlotPrefix]] = []

    async def save(engine: ReplicaSet) -> None:
        for number in range(4):
            request = request_of(engine, number, cache_salt="s")
            requests.append(request)
            found, _, _ = await cached(engine, request)
            tokens = request.prompt_token_ids
            prefix = await engine.save_slot(f"{number}.bin", "", "s", tokens)
            assert prefix.token_ids == tokens[: len(tokens) // 16 * 16] != ()
            saved.append((found, prefix))

    async def restore(engine: ReplicaSet) -> None:
        for number, (_, prefix) in enumerate(saved):
            assert await engine.restore_slot(f"{number}.bin", "s") == prefix
        for request, (found, prefix) in zip(requests, saved, strict=True):
            again, num_cached, _ = await cached(engine, request)
            assert (again, num_cached) == (found, len(prefix.token_ids))
        with pytest.raises(RequestError, match="there is no slot 'none") as missing:
            await engine.restore_slot("none.bin", "s")
        assert missing.value.status == 404
        with pytest.raises(RequestError, match="of another API key"):
            await engine.restore_slot("0.bin", "t")
        for name in ("../0.bin", ""):
            with pytest.raises(RequestError, match="must be the name of a file"):
                await engine.restore_slot(name, "s")
            with pytest.raises(RequestError, match="must be the name of a file"):
                await engine.save_slot(name, "", "s", prefix.token_ids)
        with pytest.raises(EngineError, match="nothing of the slot's 16 tokens is cached"):
            await engine.save_slot("other.bin", "", "s", range(16))

    run(save, num_replicas, router=router, **options)
    run(restore, num_replicas, router=router, **options)


def test_a_slot_is_saved_by_the_replica_that_has_the_most_of_it(tmp_path: Path) -> None:
    """Both have the beginning; and it is restored once one of them has died."""

    async def test(engine: ReplicaSet) -> None:
        ids = tuple(engine.tokenizer.encode(TEXT * 8))
        sampling = SamplingParams(max_tokens=4, temperature=0.0)
        lengths, replicas = (40, len(ids)), []
        for name, length in enumerate(lengths):
            _, _, replica = await cached(engine, Request(str(name), ids[:length], sampling))
            replicas.append(replica)
        assert sorted(replicas) == [0, 1]
        prefix = await engine.save_slot("talk.bin", "", "", ids)
        assert prefix.token_ids == ids[: len(ids) // 16 * 16]
        kill(engine, replicas[1])
        while engine.engines[replicas[1]].is_serving:
            await asyncio.sleep(0.01)
        assert await engine.restore_slot("talk.bin", "") == prefix
        _, num_cached, _ = await cached(engine, Request("again", ids, sampling))
        assert num_cached == (len(ids) - 1) // 16 * 16
        await until_running(engine, 2)

    run(test, router=RouterName.ROUND_ROBIN, slot_save_path=str(tmp_path / "slots"))


def test_a_restored_slot_is_computed_elsewhere_once_its_replica_has_died(tmp_path: Path) -> None:
    async def test(engine: ReplicaSet) -> None:
        request = request_of(engine, 1)
        expected, _, _ = await cached(engine, request)
        await engine.save_slot("talk.bin", "", "", request.prompt_token_ids)
        await engine.reset_prefix_cache()
        assert not engine._restored
        await engine.restore_slot("talk.bin", "")
        ((_, number),) = engine._restored
        kill(engine, number)
        while engine.engines[number].is_serving:
            await asyncio.sleep(0.01)
        again, num_cached, _ = await cached(engine, replace(request, request_id="again"))
        assert (again, num_cached) == (expected, 0)
        assert not engine._restored
        await until_running(engine, 2)
        await engine.restore_slot("talk.bin", "")
        _, num_cached, _ = await cached(engine, replace(request, request_id="third"))
        assert num_cached > 0
        assert not engine._restored  # it was used, by one request

    run(test, slot_save_path=str(tmp_path / "slots"))


def test_slots_need_a_directory_with_any_number_of_replicas() -> None:
    async def test(engine: ReplicaSet) -> None:
        for work in (engine.save_slot("a", "", "", range(16)), engine.restore_slot("a", "")):
            with pytest.raises(RequestError, match="--slot-save-path") as refused:
                await work
            assert (refused.value.status, refused.value.code) == (501, "not_supported")

    run(test)


def test_a_recorded_router_replays_restored_slots(tmp_path: Path) -> None:
    path = tmp_path / "router.jsonl"

    async def test(engine: ReplicaSet) -> None:
        request = request_of(engine, 0)
        await output(engine, request)
        await engine.save_slot("talk.bin", "", "", request.prompt_token_ids)
        await engine.reset_prefix_cache()
        await engine.restore_slot("talk.bin", "")
        await output(engine, replace(request, request_id="again"))

    run(test, record_routing=path, slot_save_path=str(tmp_path / "slots"))
    replayed = replay_routing(path.read_bytes().splitlines(keepends=True))
    assert (replayed.different_line, replayed.num_choices) == (None, 3)
