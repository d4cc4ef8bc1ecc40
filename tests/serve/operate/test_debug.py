"""`/debug`: the step log as lines of JSON, and where a request's time went."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from client import CHAT, MESSAGES, client_of
from fake_engine import FakeEngine
from logged_engine import logged_engine
from msgspec.structs import replace
from remote_run import until
from starlette.applications import Starlette
from step_records import QUEUED, step

from quickstep.engine.interface import ServedEngine
from quickstep.engine.records.step_log import SequenceRecord
from quickstep.server.app import app_of_models, create_app
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.residents import ModelEntry, SeveralModels
from quickstep.server.operate import debug
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys
from quickstep.types import FinishReason, Request, SamplingParams


def get(
    path: str, engine: FakeEngine | None = None, options: ServerOptions | None = None
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or logged_engine(), options)) as client:
            return await client.get(path)

    return asyncio.run(run())


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def num_readers(engine: FakeEngine) -> int:
    return sum(
        isinstance(follower, debug._RecordQueue) for follower in engine.step_log._step_followers
    )


def test_only_an_admin_key_resets_the_prefix_cache() -> None:
    engine = FakeEngine()
    keys = ServerOptions(api_keys=ApiKeys(["ann=AAAA"], ["root=RRRR"]))

    async def post(key: str) -> httpx.Response:
        async with client_of(create_app(engine, keys)) as client:
            return await client.post("/reset_prefix_cache", headers={"x-api-key": key})

    assert asyncio.run(post("AAAA")).status_code == 403
    assert engine.num_resets == 0
    response = asyncio.run(post("RRRR"))
    assert (response.status_code, response.json()) == (200, {"num_blocks": 7})
    assert engine.num_resets == 1


def test_the_newest_records_are_lines_of_json() -> None:
    response = get("/debug/steps?last_s=2.5")
    assert response.headers["content-type"] == "application/x-ndjson"
    records = lines(response.text)
    assert [(record["kind"], record.get("step_id")) for record in records] == [
        ("step", 4),
        ("step", 5),
        ("step", 6),
        ("sequence", None),
    ]
    assert records[0]["prefills"] == [["other-9", 10, 0.5]]
    assert records[-1]["timings"]["activities"][0] == ["queue", 1.0]


@pytest.mark.parametrize("query", ["last_s=-1", "last_s=soon", "follow=perhaps", "last=3"])
def test_a_query_that_means_nothing_is_refused(query: str) -> None:
    assert get(f"/debug/steps?{query}").status_code == 400


@pytest.mark.parametrize("path", ["/debug/steps", "/debug/requests/web-1"])
def test_a_key_that_is_no_admins_is_refused(path: str) -> None:
    options = ServerOptions(api_keys=ApiKeys(["ann=secret-a"], ["root=secret-r"]))

    async def run(key: str) -> int:
        async with client_of(create_app(logged_engine(), options)) as client:
            return (await client.get(path, headers={"x-api-key": key})).status_code

    assert [asyncio.run(run(key)) for key in ("secret-a", "secret-r", "")] == [403, 200, 401]


async def follow(
    app: Starlette, path: str, reads: Callable[[bytes], bool], slow: asyncio.Event | None = None
) -> None:
    """Read a stream until `reads` returns False; a reader that is slow waits at its first bytes."""
    ended = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            if slow is not None:
                await slow.wait()
            if not reads(message["body"]):
                ended.set()

    name, _, query = path.partition("?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": name,
        "raw_path": name.encode(),
        "query_string": query.encode(),
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("server", 80),
        "scheme": "http",
        "root_path": "",
    }
    await asyncio.wait_for(app(scope, receive, send), 20)


def test_a_reader_that_follows_gets_new_records() -> None:
    engine, got = logged_engine(), []

    async def run() -> None:
        app = create_app(engine)

        def reads(body: bytes) -> bool:
            got.extend(lines(body.decode()))
            if len(got) == 2:  # what was in memory
                engine.step_log.add_step(step(7, 7.0, 8.0))
            return len(got) < 3

        await follow(app, "/debug/steps?last_s=0&follow=true", reads)

    asyncio.run(run())
    assert [one.get("step_id") for one in got] == [6, None, 7]
    assert num_readers(engine) == 0


def test_a_reader_follows_models_that_are_loaded_after_it_began() -> None:
    later, got = logged_engine(), []

    async def open_later() -> ServedEngine:
        return later

    async def run() -> None:
        engine, options = logged_engine(), ServerOptions()
        entries = tuple(  # the first one is open already
            ModelEntry((name,), replace(options, served_model_names=(name,)), open_later)
            for name in "ab"
        )
        models = ModelRegistry.of_several(engine, SeveralModels(entries, 2))
        app = app_of_models(models, entries[0].options)

        def reads(body: bytes) -> bool:
            got.extend(lines(body.decode()))
            return got[-1].get("step_id") != 7

        async with client_of(app) as client:
            path = "/debug/steps?last_s=0&follow=true"
            reading = asyncio.create_task(follow(app, path, reads))
            await until(lambda: num_readers(engine) == 1)
            body = {"model": "b", "messages": [{"role": "user", "content": "a"}]}
            assert (await client.post(CHAT, json=body)).status_code == 200
            later.step_log.add_step(step(7, 7.0, 8.0))
            await reading
            assert (num_readers(engine), num_readers(later)) == (0, 0)

    asyncio.run(run())
    assert got[-1]["step_id"] == 7


def test_a_slow_reader_loses_records_and_learns_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(debug, "_MAX_QUEUED", 10)
    engine, got = logged_engine(), []

    async def run() -> None:
        app, slow = create_app(engine), asyncio.Event()

        def reads(body: bytes) -> bool:
            got.extend(lines(body.decode()))
            return len(got) < 13

        reading = asyncio.create_task(follow(app, "/debug/steps?last_s=0&follow=true", reads, slow))
        await until(lambda: num_readers(engine) == 1)
        for number in range(7, 32):
            engine.step_log.add_step(step(number, float(number), number + 1.0))
        slow.set()
        await reading

    asyncio.run(run())
    assert got[2] == {"kind": "lost", "num_records": 15}
    assert [one["step_id"] for one in got[3:]] == list(range(22, 32))


@pytest.mark.parametrize("name", ["web-1", "web-1-ab", "chatcmpl-web-1", "cmpl-web-1"])
def test_an_ended_request_is_explained_by_either_id(name: str) -> None:
    body = get(f"/debug/requests/{name}").json()
    (one,) = body["sequences"]
    assert one["is_finished"]
    assert one["sentence"].startswith("web-1-ab took 6.00 s, 4.0 times the 1.50 s")
    assert one["parts"][0]["prefills"] == [["other-9", 1.5]]


def test_a_live_request_is_explained_so_far() -> None:
    engine = FakeEngine()
    engine.script.endless = True

    async def run(path: str) -> httpx.Response:
        async with client_of(create_app(engine)) as client:
            stream = engine.stream(Request("", (1,), SamplingParams()))
            engine.timings = {stream.request_id: {1: QUEUED, 0: QUEUED}}
            try:
                return await client.get(path.replace("r1", stream.request_id))
            finally:
                await stream.aclose()

    sequences = asyncio.run(run("/debug/requests/r1")).json()["sequences"]
    assert [(sequence["index"], sequence["is_finished"]) for sequence in sequences] == [
        (0, False),
        (1, False),
    ]
    live = lines(asyncio.run(run("/debug/steps")).text)
    assert [(one["kind"], one["index"]) for one in live] == [("live", 0), ("live", 1)]


def test_of_many_sequences_those_that_took_longest_are_explained() -> None:
    engine = FakeEngine()
    for number in range(100):
        timings = replace(QUEUED, finished_s=QUEUED.finished_s + (number * 7) % 100)
        record = SequenceRecord("many-ab", number, "", 0, 0, FinishReason.EOS, timings)
        engine.step_log.add_sequence(record)
    body = get("/debug/requests/many", engine).json()
    indices = [sequence["index"] for sequence in body["sequences"]]
    assert len(indices) == debug._MAX_EXPLAINED and indices == sorted(indices)
    assert all((index * 7) % 100 >= 100 - len(indices) for index in indices)
    assert body["num_more"] == 100 - len(indices)


def test_an_unknown_request_is_404() -> None:
    response = get("/debug/requests/web")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "request_not_found"


_ONE = {"input": "a"}
_BEAMS = {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", _BEAMS),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/api/embed", {**_ONE, "model": "fake"}),
        ("/api/embeddings", {"prompt": "a", "model": "fake"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ],
)
def test_the_engine_knows_a_request_by_the_id_of_its_response(
    path: str, body: dict[str, Any]
) -> None:
    engine = FakeEngine()

    async def run() -> httpx.Response:
        async with client_of(create_app(engine)) as client:
            return await client.post(path, json=body, headers={"x-request-id": "web 7"})

    response = asyncio.run(run())
    assert response.headers["x-request-id"] == "web 7"
    ids = [item.request_id for item in engine.submitted]
    assert ids and len(set(ids)) == len(ids)
    assert all(one.startswith("web 7-") for one in ids)
    if path == CHAT:
        assert response.json()["id"] == "chatcmpl-web 7"
