"""Requests that are made to hurt, through the whole server with its engine in its own process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import scripted_worker
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from live_server import DEADLINE_S, LiveServer, live_server_of, until
from malicious_grammars import NASTY
from process_lists import command_line, processes
from remote_run import HOLD_STOP_S

from quickstep.config import CacheConfig, EngineConfig, InputConfig, LoadConfig, SchedulerConfig
from quickstep.engine.remote import supervisor
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.server.app import create_app

FIELDS = {"json_schema": "json", "regex": "regex", "lark": "grammar"}


@pytest.fixture(scope="module")
def engine() -> RemoteEngine:
    return RemoteEngine(
        EngineConfig(
            load=LoadConfig(model="demo", device="cpu"),
            cache=CacheConfig(num_blocks=200),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
            inputs=InputConfig(schema_depth=20),
        )
    )


@pytest.fixture(scope="module")
def server(engine: RemoteEngine) -> Iterator[LiveServer]:
    async def opened() -> RemoteEngine:
        await engine.open()
        return engine

    with live_server_of(opened) as server:
        yield server


@pytest.mark.parametrize("name", NASTY)
def test_the_engine_survives_any_grammar(server: LiveServer, name: str) -> None:
    grammar = NASTY[name]
    field = FIELDS[grammar.kind]
    body = {"prompt": "a", "max_tokens": 6, "structured_outputs": {field: grammar.text}}
    answer = httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60)
    if answer.status_code != 200:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == f"structured_outputs.{field}"
        assert error["message"].startswith(f"structured_outputs.{field} ")
    health = httpx.get(f"{server.url}/health").json()
    assert (health["status"], health["num_restarts"]) == ("ok", 0)


def test_a_refused_keyword_and_a_bound_are_named(server: LiveServer) -> None:
    def refusal(schema: dict[str, Any]) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        body = {"messages": MESSAGES, "response_format": form}
        answer = httpx.post(f"{server.url}{CHAT}", json=body, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
        return str(answer.json()["error"]["message"])

    assert "not" in refusal({"not": {"multipleOf": 2}})
    deep: dict[str, Any] = {}
    for _ in range(11):
        deep = {"properties": {"a": deep}}
    assert "the limit is 20" in refusal(deep)  # the operator's


def test_the_process_that_tries_grammars_ends_with_the_engine(
    server: LiveServer, engine: RemoteEngine
) -> None:
    body = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[0-9]{3}"}}
    assert httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60).status_code == 200
    killed = engine.process_id
    assert killed is not None
    (trial,) = [child for child, parent in processes().items() if parent == killed]
    assert b"grammar.trial_worker" in command_line(trial)
    os.kill(killed, signal.SIGKILL)
    until(lambda: trial not in processes())
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
    assert httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60).status_code == 200


def test_a_full_queue_is_429_and_says_when_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ever ends here: one request runs, two wait, the next ones have no place."""
    monkeypatch.setattr(supervisor, "_STOP_S", HOLD_STOP_S)
    engine = RemoteEngine(
        scripted_worker.config(tmp_path, max_num_seqs=1, max_waiting=2),
        command=scripted_worker.command("hold"),
    )

    async def run() -> httpx.Response:
        await engine.open()
        async with client_of(create_app(engine)) as client:
            body = {"prompt": "abc", "max_tokens": 5}
            asked = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for _ in range(6)]
            done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            return done.pop().result()

    refused = asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")


@pytest.mark.parametrize(("route", "field"), [(COMPLETIONS, "prompt"), ("/v1/embeddings", "input")])
def test_the_prompts_of_a_body_are_queued_all_or_none(
    route: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ever ends here: one request runs, two more have a place, and a body has four."""
    monkeypatch.setattr(supervisor, "_STOP_S", HOLD_STOP_S)
    engine = RemoteEngine(
        scripted_worker.config(tmp_path, max_num_seqs=1, max_waiting=3),
        command=scripted_worker.command("hold"),
    )

    def num_accepted() -> int:
        return engine.stats().scheduler.totals.num_requests

    async def run() -> tuple[int, int]:
        await engine.open()
        async with client_of(create_app(engine)) as client:
            one = {"prompt": "abc", "max_tokens": 5}
            held = [asyncio.create_task(client.post(COMPLETIONS, json=one)) for _ in range(2)]
            while num_accepted() < len(held):
                await asyncio.sleep(0.01)
            answer = await client.post(route, json={field: ["abc"] * 4})
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            await engine.reset_prefix_cache()  # answered after all that was sent before
            return answer.status_code, num_accepted()

    assert asyncio.run(asyncio.wait_for(run(), DEADLINE_S)) == (429, 2)
