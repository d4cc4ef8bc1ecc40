"""What is wrong with a request beyond any one field: fields that contradict each other, what lies
deeper than a type, and what holds where a request is silent.

Single fields (types, bounds, refusals) are tested in `test_request_fields`.
"""

import asyncio
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine, Script

from quickstep.server.app import create_app
from quickstep.server.options import FieldRules, ServerOptions
from quickstep.types import FinishReason

JSON_FORMAT = {"response_format": {"type": "json_object"}}
EMBEDDINGS = "/v1/embeddings"
ROUTES = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "a"},
    EMBEDDINGS: {"input": "a"},
}


def post(route: str, fields: dict[str, Any], engine: FakeEngine | None = None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine())) as client:
            return await client.post(route, json={**ROUTES[route], **fields})

    return asyncio.run(run())


def test_an_unknown_field_that_is_refused_names_the_nearest() -> None:
    options = ServerOptions(field_rules=FieldRules(refuse_unknown=True))

    async def run() -> httpx.Response:
        async with client_of(create_app(FakeEngine(), options)) as client:
            return await client.post(CHAT, json={**ROUTES[CHAT], "max_token": 1})

    error = asyncio.run(run()).json()["error"]
    assert error["message"] == "max_token is unknown; did you mean max_tokens?"


WRONG: list[tuple[str, Any, str]] = [
    ("top_k", 1.5, "top_k"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("logit_bias", {"x": 1}, "logit_bias"),
    ("logit_bias", {"5": "x"}, "logit_bias[...]"),
    ("stop_token_ids", ["x"], "stop_token_ids[0]"),
    ("n", True, "n"),
    ("priority", 2**31, "priority"),
    ("priority", -(2**31) - 1, "priority"),
    ("min_tokens", 10**6, "min_tokens"),
    ("stop", [1], "stop[0]"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "s"}},
        "response_format.json_schema.schema",
    ),
    ("structured_outputs", {}, "structured_outputs"),
    ("structured_outputs", {"json_object": False}, "structured_outputs"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs"),
    ("structured_outputs", {"structural_tag": "a"}, "structured_outputs.structural_tag"),
]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("name", "value", "param"), WRONG)
def test_a_wrong_value_is_400_with_its_path(route: str, name: str, value: Any, param: str) -> None:
    engine = FakeEngine()
    response = post(route, {"max_tokens": 5, name: value}, engine)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not engine.submitted


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        (CHAT, {"metadata": {"a": 1}}, "metadata[...]"),
        (CHAT, {**JSON_FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (CHAT, {**JSON_FORMAT, "ignore_eos": True}, "ignore_eos"),
        (CHAT, {**JSON_FORMAT, "allowed_token_ids": [1]}, "allowed_token_ids"),
        (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt"),
    ],
)
def test_fields_that_contradict_or_exceed_are_400(
    route: str, fields: dict[str, Any], param: str
) -> None:
    response = post(route, fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_both_names_of_max_tokens_may_be_given_if_they_agree() -> None:
    engine = FakeEngine()
    post(CHAT, {"max_tokens": 4, "max_completion_tokens": 4}, engine)
    assert engine.submitted[0].sampling.max_tokens == 4


def test_the_checkpoints_defaults_hold_where_a_request_is_silent() -> None:
    engine = FakeEngine(default_sampling={"temperature": 0.6, "top_k": 20, "max_tokens": 7})
    post(CHAT, {"top_k": 5}, engine)
    sampling = engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.6, 5, 7)
    post(COMPLETIONS, {}, engine)
    assert engine.submitted[1].sampling.max_tokens == 16  # OpenAI's own default goes first


def test_an_embedding_that_takes_too_long_is_408_with_the_fields_name() -> None:
    engine = FakeEngine(script=Script(FinishReason.DEADLINE))
    response = post(EMBEDDINGS, {"timeout_s": 0.001}, engine)
    assert response.status_code == 408
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("timeout_s", "request_timeout")
    assert not engine.open_streams
