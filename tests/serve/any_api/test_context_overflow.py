"""A prompt that is too long is refused in the words that clients look for."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx
import openai
import pytest
from client import CHAT, COMPLETIONS, client_of
from fake_engine import FakeEngine
from live_server import live_server

from quickstep.core.admission import SequenceLimits
from quickstep.engine.requests import check_token_ids
from quickstep.errors import RequestError
from quickstep.server.app import create_app
from quickstep.types import Request, SamplingParams

LONG = "a" * 50
TURNS = [{"role": "user", "content": LONG}]


def post(path: str, body: dict[str, Any]) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(FakeEngine(max_model_len=32))) as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", LONG]}, "prompt"),
        (CHAT, {"messages": TURNS}, "messages"),
        (CHAT, {"messages": TURNS, "stream": True}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/completion", {"prompt": LONG}, "prompt"),
    ],
)
def test_the_code_and_the_clients_field_are_named(
    path: str, body: dict[str, Any], param: str
) -> None:
    answer = post(path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert "this model's maximum context length is 32 tokens" in error["message"]


def test_anthropics_client_finds_its_own_sentence() -> None:
    with (
        live_server(FakeEngine(max_model_len=32)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError) as refused,
    ):
        client.messages.create(
            model="fake", max_tokens=4, messages=[{"role": "user", "content": LONG}]
        )
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("prompt is too long: 67 tokens > 31 maximum")


def test_openais_client_finds_the_code() -> None:
    with (
        live_server(FakeEngine(max_model_len=32)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as refused,
    ):
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": LONG}])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_the_engine_and_the_scheduler_refuse_alike() -> None:
    limits = SequenceLimits(max_model_len=8, pool_tokens=64, max_num_seqs=1, max_waiting=None)
    ids = tuple(range(8))
    with pytest.raises(RequestError) as scheduler:
        limits.check(Request("a", ids, SamplingParams()))
    with pytest.raises(RequestError) as engine:
        check_token_ids(ids, vocab_size=100, max_model_len=8)
    assert str(scheduler.value) == str(engine.value)
    assert scheduler.value.code == engine.value.code == "context_length_exceeded"


def test_what_the_cache_cannot_hold_has_the_same_code() -> None:
    limits = SequenceLimits(max_model_len=64, pool_tokens=8, max_num_seqs=1, max_waiting=None)
    with pytest.raises(RequestError, match="--num-blocks") as refused:
        limits.check(Request("a", tuple(range(8)), SamplingParams()))
    assert refused.value.code == "context_length_exceeded"
