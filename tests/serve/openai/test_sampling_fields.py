"""Sampling fields that need more than a value: presets over defaults, the reasoning budget."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine, FakeTemplate

from quickstep.errors import ConfigError
from quickstep.sampling_params import PRESETS
from quickstep.server.app import create_app
from quickstep.server.fields.sampling_fields import BUDGET_NAMES
from quickstep.server.fields.shared_fields import EFFORT_BUDGETS
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.options import AnswerOptions, ServerOptions
from quickstep.text.tool_calls.formats import formats_of
from quickstep.types import SamplingParams

DEFAULTS = {"temperature": 0.6, "top_p": 0.8, "top_k": 20}


def post(
    route: str,
    fields: dict[str, Any],
    engine: FakeEngine,
    options: ServerOptions | None = None,
) -> httpx.Response:
    body = {COMPLETIONS: {"prompt": "a"}, "/v1/responses": {}}.get(route, {"messages": MESSAGES})

    async def run() -> httpx.Response:
        async with client_of(create_app(engine, options or ServerOptions())) as client:
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


def test_a_message_at_the_end_of_the_budget_is_the_requests_or_the_servers() -> None:
    options = ServerOptions(answers=AnswerOptions(budget_message="The server's."))
    for fields, message in (
        ({"thinking_budget": 7}, "The server's."),
        ({"thinking_budget": 7, "reasoning_budget_message": "Mine."}, "Mine."),
        ({"thinking_budget": 7, "reasoning_budget_message": ""}, ""),
        ({"reasoning_budget": -1, "reasoning_budget_message": "Mine."}, ""),
        ({}, ""),
    ):
        engine = thinking("x</think>")
        assert post(CHAT, fields, engine, options).status_code == 200
        assert engine.submitted[-1].sampling.reasoning_budget_message == message


def test_a_conversation_without_a_budget_has_the_servers() -> None:
    options = ServerOptions(answers=AnswerOptions(thinking_budget=5))
    for path, fields, budget in (
        (CHAT, {}, 5),
        (CHAT, {"thinking_budget": 7}, 7),
        (CHAT, {"reasoning_budget": -1}, None),
        (CHAT, {"reasoning_effort": "minimal"}, 512),
        ("/v1/completions", {"prompt": "a"}, None),
    ):
        engine = thinking("x</think>")
        assert post(path, fields, engine, options).status_code == 200
        assert engine.submitted[-1].sampling.thinking_budget == budget


def test_a_message_without_a_budget_or_with_the_tag_is_refused() -> None:
    engine = thinking("x</think>")
    alone = post(CHAT, {"reasoning_budget_message": "Enough."}, engine)
    assert alone.status_code == 400
    assert alone.json()["error"]["message"].startswith(
        "reasoning_budget_message needs thinking_budget"
    )
    fields = {"thinking_budget": 7, "reasoning_budget_message": "x" * 1025}
    assert "has 1025 characters, the limit is 1024" in post(CHAT, fields, engine).text
    options = ServerOptions(answers=AnswerOptions(budget_message="Enough.</think>"))
    with pytest.raises(ConfigError, match=r"--reasoning-budget-message: .* contains </think>"):
        ModelRegistry.of_one(engine, options)


ANTHROPIC = {"model": "fake", "max_tokens": 9}
EFFORT_FIELDS: tuple[tuple[str, Callable[[str], dict[str, Any]]], ...] = (
    (CHAT, lambda level: {"reasoning_effort": level}),
    ("/v1/responses", lambda level: {"input": "a", "reasoning": {"effort": level}}),
    ("/v1/messages", lambda level: {"output_config": {"effort": level}, **ANTHROPIC}),
)


@pytest.mark.parametrize(("route", "fields"), EFFORT_FIELDS)
@pytest.mark.parametrize("level", EFFORT_BUDGETS)
def test_an_effort_is_a_budget_where_the_template_has_no_levels(
    route: str, fields: Callable[[str], dict[str, Any]], level: str
) -> None:
    engine = thinking("x</think>")
    response = post(route, fields(level), engine)
    assert response.status_code == 200, response.text
    assert "x-quickstep-ignored" not in response.headers
    assert engine.submitted[-1].sampling.thinking_budget == EFFORT_BUDGETS[level]
    assert "reasoning_effort" not in bytes(engine.submitted[-1].prompt).decode()


@pytest.mark.parametrize("think", ["low", "medium", "high"])
def test_ollamas_levels_are_budgets_too(think: str) -> None:
    engine = thinking("x</think>")
    body = {"model": "fake", "think": think, "stream": False}
    assert post("/api/chat", body, engine).status_code == 200
    assert engine.submitted[-1].sampling.thinking_budget == EFFORT_BUDGETS[think]


@pytest.mark.parametrize(
    ("fields", "budget"),
    [({"thinking_budget": 7}, 7), ({"thinking_token_budget": -1}, None), ({}, 1024)],
)
def test_a_budget_of_the_request_goes_before_the_effort(
    fields: dict[str, Any], budget: int | None
) -> None:
    sampling = sampled({"reasoning_effort": "low", **fields}, thinking("x</think>"))
    assert sampling.thinking_budget == budget


def test_a_template_with_levels_gets_the_effort_and_no_budget() -> None:
    engine = thinking("x</think>")
    engine.chat_template.source = "{{ reasoning_effort }}"
    sampling = sampled({"reasoning_effort": "low"}, engine)
    assert sampling.thinking_budget is None
    assert "reasoning_effort=low" in bytes(engine.submitted[-1].prompt).decode()


def test_a_level_that_no_table_has_is_reported() -> None:
    response = post(CHAT, {"reasoning_effort": "heroic"}, thinking("x</think>"))
    assert response.headers["x-quickstep-ignored"] == "reasoning_effort"
