"""One request with many prompts takes many turns of the event loop, in both processes."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest
from client import COMPLETIONS, client_of
from fake_engine import FakeEngine
from scripted_worker import opened

from quickstep.engine.remote.connection import Connection, Sender
from quickstep.engine.remote.service import EngineService
from quickstep.server.app import create_app
from quickstep.server.options import ServerOptions
from quickstep.types import Request, SamplingParams

NUM_PROMPTS = 64
MOST_PER_TURN = 8
DEADLINE_S = 30.0


class Turns:
    """How much was done at each turn of the event loop."""

    def __init__(self) -> None:
        self.num_done = 0
        self.seen: list[int] = []

    async def watch(self) -> None:
        while True:
            self.seen.append(self.num_done)
            await asyncio.sleep(0)

    @property
    def most(self) -> int:
        counts = [*self.seen, self.num_done]
        return max(after - before for before, after in itertools.pairwise(counts))


def test_the_prompts_of_a_request_are_submitted_over_many_turns() -> None:
    turns = Turns()

    class CountedEngine(FakeEngine):
        def stream(self, request: Request):  # type: ignore[no-untyped-def]
            turns.num_done += 1
            return super().stream(request)

    async def run() -> None:
        async with client_of(create_app(CountedEngine(), ServerOptions())) as client:
            watching = asyncio.create_task(turns.watch())
            body = {"prompt": ["a"] * NUM_PROMPTS, "max_tokens": 1}
            answer = await client.post(COMPLETIONS, json=body)
            watching.cancel()
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == NUM_PROMPTS

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert turns.num_done == NUM_PROMPTS
    assert turns.most <= MOST_PER_TURN


def test_the_engine_takes_a_frame_of_requests_over_many_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = Turns()

    def receive(service: EngineService, message: object) -> None:
        turns.num_done += 1

    async def run() -> None:
        ours, theirs = socket.socketpair()
        connection = await Connection.of_pair(ours, "the server")
        service = EngineService(connection, lambda config, _: opened(config))
        monkeypatch.setattr(EngineService, "_receive", receive)
        _, writer = await asyncio.open_unix_connection(sock=theirs)
        sender = Sender(writer)
        for index in range(NUM_PROMPTS):
            sender.put(Request(str(index), (1,), SamplingParams()))
        watching = asyncio.create_task(turns.watch())
        await sender.flush()
        writer.write_eof()
        await service.run()
        watching.cancel()
        writer.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert turns.num_done == NUM_PROMPTS
    assert turns.most <= MOST_PER_TURN


def test_ids_that_cannot_fit_are_counted_before_they_are_read() -> None:
    async def run() -> str:
        engine = FakeEngine(max_model_len=100)
        async with client_of(create_app(engine, ServerOptions())) as client:
            answer = await client.post(COMPLETIONS, json={"prompt": [*[1] * 100, 10**6]})
        assert answer.status_code == 400
        code: str = answer.json()["error"]["code"]
        return code

    assert asyncio.run(run()) == "context_length_exceeded"
