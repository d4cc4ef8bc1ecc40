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
