"""The context that is served, which may be less than the model's, is the same in every listing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from client import client_of
from fake_engine import FakeEngine
from live_server import live_server

from quickstep.server.app import create_app
from quickstep.server.options import ServerOptions

CONTEXT = 137
NAMES = ("max_model_len", "n_ctx", "context_length", "model_max_length")
LISTINGS: tuple[tuple[str, dict[str, Any] | None], ...] = (
    ("/v1/models", None),
    ("/v1/models/fake", None),
    ("/props", None),
    ("/slots", None),
    ("/tokenizer_info", None),
    ("/tokenize", {"prompt": "a"}),
    ("/api/ps", None),
    ("/api/show", {"model": "fake"}),
)


def lengths_in(value: Any) -> Iterator[int]:
    """The numbers whose name is one of a context."""
    if isinstance(value, list):
        for item in value:
            yield from lengths_in(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name.rpartition(".")[2] in NAMES:
                yield item
            yield from lengths_in(item)


@pytest.mark.parametrize(("path", "body"), LISTINGS)
def test_every_listing_has_the_context_that_is_served(
    path: str, body: dict[str, Any] | None
) -> None:
    async def answer() -> str:
        async with client_of(create_app(FakeEngine(max_model_len=CONTEXT))) as client:
            response = await (client.get(path) if body is None else client.post(path, json=body))
            return response.text

    lengths = list(lengths_in(json.loads(asyncio.run(answer()))))
    assert lengths
    assert set(lengths) == {CONTEXT}


def test_the_metrics_have_the_context_that_is_served() -> None:
    async def text() -> str:
        async with client_of(create_app(FakeEngine(max_model_len=CONTEXT))) as client:
            return (await client.get("/metrics")).text

    (line,) = [
        line
        for line in asyncio.run(text()).splitlines()
        if line.startswith("quickstep:max_model_len{")
    ]
    assert float(line.split()[-1]) == CONTEXT


def test_the_first_line_of_a_server_has_the_context(caplog: pytest.LogCaptureFixture) -> None:
    options = ServerOptions(served_model_names=("one", "two"))
    with (
        caplog.at_level(logging.INFO, "quickstep.server"),
        live_server(FakeEngine(max_model_len=CONTEXT), options),
    ):
        pass
    (line,) = [record.getMessage() for record in caplog.records if record.msg.startswith("serving")]
    assert line.startswith(f"serving one, two with a context of {CONTEXT} tokens at http://")
    assert line.endswith("/v1")
