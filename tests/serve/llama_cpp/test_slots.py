"""llama.cpp's slots: saved, restored and erased by the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from client import client_of
from fake_engine import FakeEngine
from live_server import live_server_of

from quickstep.config import CacheConfig, EngineConfig, LoadConfig
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.server.app import create_app

Test = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]


def with_client(test: Test, engine: FakeEngine | None = None) -> None:
    async def run() -> None:
        async with client_of(create_app(engine or FakeEngine())) as client:
            await test(client)

    asyncio.run(run())


async def change(client: httpx.AsyncClient, action: str, id_slot: object = 0, **body: Any) -> Any:
    return await client.post(f"/slots/{id_slot}?action={action}", json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_a_slot_are_saved_and_restored(stream: bool) -> None:
    engine = FakeEngine()

    async def test(client: httpx.AsyncClient) -> None:
        body = {"prompt": "abcdef", "n_predict": 3, "id_slot": 0, "stream": stream}
        completion = await client.post("/completion", json=body)
        assert '"id_slot":0' in completion.text
        saved = (await change(client, "save", filename="a.bin")).json()
        assert saved.pop("timings")["save_ms"] >= 0.0
        assert saved == {"id_slot": 0, "filename": "a.bin", "n_saved": 8, "n_written": 80}
        _, prefix = engine.slots["a.bin"]
        assert prefix.token_ids[:7] == (1, *b"abcdef")
        assert (await change(client, "erase")).json() == {"id_slot": 0, "n_erased": 10}
        assert (await client.post("/slots/0?action=erase")).json()["n_erased"] == 0
        restored = (await change(client, "restore", filename="a.bin")).json()
        assert restored.pop("timings")["restore_ms"] >= 0.0
        assert restored == {"id_slot": 0, "filename": "a.bin", "n_restored": 8, "n_read": 80}
        again = await change(client, "save", filename="b.bin")
        assert again.json()["n_saved"] == 8

    with_client(test, engine)


@pytest.mark.parametrize(
    ("action", "id_slot", "body", "message"),
    [
        ("save", 0, {"filename": "a"}, "slot 0 has no tokens"),
        ("save", 0, {}, "filename"),
        ("restore", 0, {}, "filename"),
        ("save", 9, {"filename": "a"}, "id_slot is 9, this server has the slots 0 to 0"),
        ("save", "x", {"filename": "a"}, "must be the number of a slot"),
        ("save", -1, {"filename": "a"}, "must be the number of a slot"),
        ("drop", 0, {"filename": "a"}, "action"),
        ("save", 0, {"filename": 3}, "filename"),
    ],
)
def test_what_cannot_be_done_is_refused(
    action: str, id_slot: object, body: dict[str, Any], message: str
) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        response = await change(client, action, id_slot, **body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]

    with_client(test)


def test_a_completion_names_a_slot_that_there_is() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        response = await client.post("/completion", json={"prompt": "a", "id_slot": 1})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "id_slot"
        response = await client.post("/completion", json={"prompt": "a", "id_slot": -1})
        assert response.json()["id_slot"] == -1

    with_client(test)


def test_a_slot_is_saved_by_one_server_and_restored_by_the_next(tmp_path: Path) -> None:
    """With the engine in a process of its own, whose refusals have their status and text."""
    config = EngineConfig(
        load=LoadConfig("demo", num_threads=1),
        cache=CacheConfig(num_blocks=64, slot_save_path=str(tmp_path / "slots")),
        max_model_len=512,
    )
    body = {"prompt": list(range(20, 120)), "n_predict": 8, "seed": 3, "id_slot": 1}
    completions = []

    async def opened() -> RemoteEngine:
        engine = RemoteEngine(config)
        await engine.open()
        return engine

    for action, counted in (("save", "n_saved"), ("restore", "n_restored")):
        with live_server_of(opened) as server:
            url = f"{server.url}/slots/1?action={action}"
            if action == "save":
                completions.append(httpx.post(f"{server.url}/completion", json=body).json())
            else:
                missing = httpx.post(url, json={"filename": "other"})
                assert missing.status_code == 404
                assert "there is no slot 'other'" in missing.text
            answer = httpx.post(url, json={"filename": "talk"}).json()
            assert answer[counted] == 96, answer
            completions.append(httpx.post(f"{server.url}/completion", json=body).json())
    fresh, cached, restored = completions
    assert fresh["content"] == cached["content"] == restored["content"]
    assert (fresh["tokens_cached"], restored["tokens_cached"]) == (0, 96)
