"""A stream whose engine is lost continues on another one, and its reader cannot see where."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_engine import END_ID, ScriptedEngine

from quickstep.cluster.streams import ResumableStream
from quickstep.engine.engine import Engine
from quickstep.engine.interface import ServedEngine
from quickstep.errors import EngineError, RequestError
from quickstep.types import Delta, FinishReason, Request, SamplingParams

PROMPT = (*b"a stream that moves", END_ID)


class Cluster:
    """Scripted engines; `choose` names them one after the other."""

    def __init__(self, num_engines: int, **scheduler: int) -> None:
        self.parts = [ScriptedEngine(**scheduler) for _ in range(num_engines)]
        self.chosen: list[Request] = []

    async def __aenter__(self) -> Cluster:
        for part in self.parts:
            await part.engine.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for part in self.parts:
            await part.engine.stop()

    async def choose(self, request: Request, lost: Sequence[ServedEngine]) -> Any:
        self.chosen.append(request)
        if len(lost) == len(self.parts):
            raise EngineError("no engine is left")
        assert list(lost) == [part.engine for part in self.parts[: len(lost)]]
        return self.parts[len(lost)].engine

    def kill_at_step(self, number: int, step: int) -> None:
        """The loop of an engine fails when it submits this step."""
        executor = self.parts[number].executor
        submit, num_before = executor.submit, iter(range(step))

        def submitted(plan: object) -> object:
            if next(num_before, None) is None:
                raise RuntimeError("planted")
            return submit(plan)

        executor.submit = submitted


async def deltas_of(cluster: Cluster, request: Request) -> list[Delta]:
    stream = await ResumableStream.open(request, cluster.choose)
    return [replace(delta, timings=None) async for delta in stream]


def by_sequence(deltas: list[Delta]) -> list[list[Delta]]:
    indices = sorted({delta.index for delta in deltas})
    return [[delta for delta in deltas if delta.index == index] for index in indices]


async def uncut(request: Request) -> list[list[Delta]]:
    async with Cluster(1) as cluster:
        return by_sequence(await deltas_of(cluster, request))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=7, n=3, logprobs=2),
        SamplingParams(max_tokens=40, stop=("t moves",)),
        SamplingParams(max_tokens=60, ignore_eos=True),
    ],
)
def test_a_stream_continues_wherever_its_engine_is_lost(sampling: SamplingParams) -> None:
    async def check() -> None:
        request = Request("", PROMPT, sampling)
        expected = await uncut(request)
        for step in range(0, 25):
            async with Cluster(2) as cluster:
                cluster.kill_at_step(0, step)
                assert by_sequence(await deltas_of(cluster, request)) == expected, step
                assert len(cluster.chosen) == 2 or step > 6

    asyncio.run(check())


def test_a_stream_moves_three_times_and_ends_at_the_fourth_loss() -> None:
    async def check() -> None:
        request = Request("", PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
        expected = await uncut(request)
        for num_losses in (3, 4):
            async with Cluster(5) as cluster:
                for number in range(num_losses):
                    cluster.kill_at_step(number, 4)
                deltas = await deltas_of(cluster, request)
                ids = [resumed.resumed for resumed in cluster.chosen]
                assert len(ids) == 4
                assert {one.request_id for one in cluster.chosen[1:]} == {"request-0"}
                assert len({one.sampling.seed for one in cluster.chosen[1:]}) == 1
                if num_losses == 3:
                    assert by_sequence(deltas) == expected
                else:
                    assert deltas[-1].finish_reason is FinishReason.ERROR
                    assert "planted" in deltas[-1].error
                    assert deltas[:-1] == expected[0][: len(deltas) - 1]

    asyncio.run(check())


def test_a_request_whose_engines_die_at_once_gets_no_third_one() -> None:
    async def check() -> None:
        async with Cluster(4) as cluster:
            for number in range(3):
                cluster.kill_at_step(number, 0)
            (delta,) = await deltas_of(cluster, Request("", PROMPT, SamplingParams(max_tokens=9)))
            assert delta.finish_reason is FinishReason.ERROR
            assert len(cluster.chosen) == 2

    asyncio.run(check())


def test_a_stopped_engine_hands_its_streams_on() -> None:
    async def check() -> None:
        request = Request("", PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
        expected = await uncut(request)
        async with Cluster(2) as cluster:
            stream = await ResumableStream.open(request, cluster.choose)
            deltas = []
            async for delta in stream:
                deltas.append(replace(delta, timings=None))
                if len(deltas) == 5:
                    await cluster.parts[0].engine.stop()
            assert by_sequence(deltas) == expected
            assert stream.num_moves == 1

    asyncio.run(check())


def test_without_another_engine_the_sequences_end_as_they_were_lost() -> None:
    async def check() -> None:
        async with Cluster(1) as cluster:
            cluster.kill_at_step(0, 3)
            sampling = SamplingParams(max_tokens=9, n=2)
            deltas = await deltas_of(cluster, Request("", PROMPT, sampling))
            ends = [delta for delta in deltas if delta.finish_reason]
            assert [delta.index for delta in ends] == [0, 1]
            assert all(delta.finish_reason is FinishReason.ERROR for delta in ends)
            assert all("planted" in delta.error for delta in ends)

    asyncio.run(check())


def test_what_the_other_engine_refuses_ends_with_its_reason() -> None:
    async def check() -> None:
        cluster = Cluster(2)
        cluster.parts[1] = ScriptedEngine(max_model_len=16)
        async with cluster:
            with pytest.raises(RequestError, match="n is 99"):
                await deltas_of(cluster, Request("", PROMPT, SamplingParams(n=99)))
            cluster.kill_at_step(0, 3)
            deltas = await deltas_of(cluster, Request("", PROMPT, SamplingParams(max_tokens=9)))
            assert deltas[-1].finish_reason is FinishReason.ERROR
            assert "prompt is too long" in deltas[-1].error

    asyncio.run(check())


def test_an_engine_with_other_weights_continues_nothing() -> None:
    async def check() -> None:
        async with Cluster(2) as cluster:
            model = cluster.parts[1].engine.model
            cluster.parts[1].engine._model = replace(model, fingerprint="11")
            cluster.kill_at_step(0, 3)
            deltas = await deltas_of(cluster, Request("", PROMPT, SamplingParams(max_tokens=9)))
            assert deltas[-1].finish_reason is FinishReason.ERROR
            assert "began with fingerprint 00" in deltas[-1].error
            assert cluster.parts[1].engine.stats().scheduler.totals.num_requests == 0

    asyncio.run(check())


def test_the_progress_of_a_prompt_never_goes_back() -> None:
    async def check() -> None:
        sampling = SamplingParams(max_tokens=4)
        request = Request("", PROMPT * 3, sampling, reports_progress=True)
        async with Cluster(2, max_num_batched_tokens=8) as cluster:
            cluster.kill_at_step(0, 4)
            deltas = await deltas_of(cluster, request)
            assert len(cluster.chosen) == 2
            reported = [delta.progress.num_processed for delta in deltas if delta.progress]
            assert reported == sorted(set(reported))
            assert reported[-1] == len(request.prompt_token_ids)
            assert next(delta for delta in deltas if delta.token_ids).token_ids == PROMPT[:1]

    asyncio.run(check())


def test_a_closed_stream_leaves_nothing_behind() -> None:
    async def check() -> None:
        async with Cluster(2) as cluster:
            cluster.kill_at_step(0, 3)
            request = Request("", PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
            stream = await ResumableStream.open(request, cluster.choose)
            async for _ in stream:
                if stream.num_moves:
                    break
            await stream.aclose()
            await stream.aclose()
            engine: Engine = cluster.parts[1].engine
            while engine.request_ids:
                await asyncio.sleep(0)
            assert [delta async for delta in stream] == []

    asyncio.run(check())
