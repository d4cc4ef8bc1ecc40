"""The app that serves before all of it is imported answers every path as the whole one does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from client import client_of
from fake_engine import FakeEngine
from starlette.applications import Starlette

from quickstep.errors import ConfigError
from quickstep.server.api_keys import ApiKeys
from quickstep.server.app import create_app
from quickstep.server.lazy_app import LazyApp
from quickstep.server.options import FileOptions, ServerOptions

REQUESTS = (
    ("GET", "/health", None),
    ("HEAD", "/health", None),
    ("GET", "//health", None),
    ("POST", "/v1/models", None),
    ("GET", "/v1/models/other", None),
    ("GET", "/nowhere", None),
    ("GET", "/docs", None),
    ("GET", "/v1/files", None),
    ("POST", "/v1/messages", {"model": "other", "max_tokens": 1, "messages": []}),
    ("POST", "/v1/completions", {"prompt": "a", "n": 0}),
    ("POST", "/v1/responses", {"input": 3}),
)


async def answers_of(client: httpx.AsyncClient) -> list[tuple[int, bytes]]:
    """Status and body of every request above."""
    answers = [await client.request(method, path, json=body) for method, path, body in REQUESTS]
    return [(answer.status_code, answer.content) for answer in answers]


async def early(
    options: ServerOptions, work: Callable[[LazyApp, httpx.AsyncClient], Awaitable[object]]
) -> None:
    app = LazyApp(FakeEngine(), options)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.lifespan(Starlette()),
        httpx.AsyncClient(transport=transport, base_url="http://server") as client,
    ):
        await work(app, client)


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_every_path_is_answered_as_by_the_complete_app(keys: tuple[str, ...]) -> None:
    options = ServerOptions(api_keys=ApiKeys(keys))

    async def run() -> None:
        async with client_of(create_app(FakeEngine(), options)) as client:
            expected = await answers_of(client)

        async def compare(_: LazyApp, client: httpx.AsyncClient) -> None:
            assert await answers_of(client) == expected

        await early(options, compare)

    asyncio.run(run())


def test_a_first_route_is_answered_before_and_after_the_others_are_there() -> None:
    async def work(app: LazyApp, client: httpx.AsyncClient) -> None:
        body = {"prompt": "a", "max_tokens": 2, "seed": 1}
        before = (await client.post("/v1/completions", json=body)).json()["choices"]
        await app.import_all()
        assert (await client.post("/v1/completions", json=body)).json()["choices"] == before
        assert (await client.get("/openapi.json")).status_code == 200

    asyncio.run(early(ServerOptions(), work))


def test_a_directory_of_files_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    options = ServerOptions(files=FileOptions(directory=tmp_path / "taken"))

    async def nothing(app: LazyApp, client: httpx.AsyncClient) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match="--files-dir"):
        asyncio.run(early(options, nothing))
