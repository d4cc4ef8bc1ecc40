"""Sampling fields that need more than a value: presets over defaults, the reasoning budget."""

import asyncio
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine, FakeTemplate

from quickstep.engine.tool_calls.formats import formats_of
from quickstep.sampling_params import PRESETS
from quickstep.server.app import create_app
from quickstep.server.openai.request_types import BUDGET_NAMES
from quickstep.types import SamplingParams

DEFAULTS = {"temperature": 0.6, "top_p": 0.8, "top_k": 20}


def post(route: str, fields: dict[str, Any], engine: FakeEngine) -> httpx.Response:
    body = {"messages": MESSAGES} if route == CHAT else {"prompt": "a"}

    async def run() -> httpx.Response:
        async with client_of(create_app(engine)) as client:
            return await client.post(route, json={**body, **fields})

    return asyncio.run(run())


def sampled(fields: dict[str, Any], engine: FakeEngine, route: str = CHAT) -> SamplingParams:
    response = post(route, fields, engine)
    assert response.status_code == 200, response.text
    return engine.submitted[-1].sampling


def thinking(template: str) -> FakeEngine:
    return FakeEngine(chat_template=FakeTemplate(formats_of(template)))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_goes_before_the_checkpoints_defaults(name: str) -> None:
    sampling = sampled({"preset": name}, FakeEngine(default_sampling=DEFAULTS))
    preset = PRESETS[name]
    assert (sampling.temperature, sampling.top_p) == (preset["temperature"], preset["top_p"])
    assert sampling.top_k == 20


def test_what_the_client_says_goes_before_its_preset() -> None:
    fields = {"preset": "creative", "temperature": 0, "top_p": 0.5}
    sampling = sampled(fields, FakeEngine(default_sampling=DEFAULTS))
    assert (sampling.temperature, sampling.top_p) == (0.0, 0.5)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    message = post(CHAT, {"preset": "wild"}, FakeEngine()).json()["error"]["message"]
    assert all(name in message for name in PRESETS)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_reasoning_budget_carries_the_tags_of_the_models_format(route: str) -> None:
    sampling = sampled({"thinking_budget": 7}, thinking("x</think>"), route)
    assert sampling.thinking_budget == 7
    assert sampling.reasoning_tags == ("<think>", "</think>")


@pytest.mark.parametrize("name", BUDGET_NAMES)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_reasoning_budget_has_the_names_of_other_servers(route: str, name: str) -> None:
    sampling = sampled({name: 7}, thinking("x</think>"), route)
    assert (sampling.thinking_budget, sampling.reasoning_tags) == (7, ("<think>", "</think>"))


@pytest.mark.parametrize("name", BUDGET_NAMES)
def test_a_budget_of_minus_one_is_no_limit_by_the_names_of_other_servers(name: str) -> None:
    sampling = sampled({name: -1}, FakeEngine())
    assert (sampling.thinking_budget, sampling.reasoning_tags) == (None, None)


@pytest.mark.parametrize("name", ["thinking_budget", *BUDGET_NAMES])
@pytest.mark.parametrize("value", [-2, 2**31])
def test_a_budget_out_of_range_is_refused_by_the_clients_name(name: str, value: int) -> None:
    error = post(CHAT, {name: value}, thinking("x</think>")).json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is {value}, ")


@pytest.mark.parametrize("name", BUDGET_NAMES)
def test_a_budget_without_reasoning_tags_is_refused_by_the_clients_name(name: str) -> None:
    error = post(CHAT, {name: 7}, thinking("no reasoning")).json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not supported: ")


def test_two_names_of_the_budget_have_to_agree() -> None:
    agreeing = {"thinking_budget": 7, "reasoning_budget": 7}
    assert sampled(agreeing, thinking("x</think>")).thinking_budget == 7
    fields = {"thinking_token_budget": 7, "thinking_budget_tokens": -1}
    error = post(CHAT, fields, thinking("x</think>")).json()["error"]
    assert error["param"] == "thinking_budget_tokens"
    assert error["message"] == (
        "thinking_token_budget is 7 and thinking_budget_tokens is -1; send one of them"
    )


@pytest.mark.parametrize("template", ["no reasoning", "<|channel|>analysis"])
def test_a_budget_is_refused_where_no_tags_set_the_reasoning_apart(template: str) -> None:
    response = post(CHAT, {"thinking_budget": 7}, thinking(template))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "thinking_budget"
    assert error["message"].startswith("thinking_budget is not supported: ")


def test_a_budget_bounds_the_reasoning_before_a_grammar() -> None:
    fields = {"thinking_budget": 7, "response_format": {"type": "json_object"}}
    engine = thinking("x</think>")
    assert post(CHAT, fields, engine).status_code == 200
    sampling = engine.submitted[0].sampling
    assert (sampling.thinking_budget, sampling.reasoning_tags) == (7, ("<think>", "</think>"))
    assert sampling.grammar is not None
