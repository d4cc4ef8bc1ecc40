"""Pydantic AI's agents over chat completions, responses and Anthropic's messages."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from conftest import KEY
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    ModelSettings,
    NativeOutput,
    PromptedOutput,
    ThinkingPart,
    ToolOutput,
)
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What does itertools.chain do?"
WEATHER = "What is the weather in Bern?"
PERSON = "Reply in JSON. Ann is 41 years old."
APIS = ["chat", "responses", "messages"]
GREEDY = ModelSettings(temperature=0, max_tokens=100)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def model_of(url: str, api: str, name: str = "demo", key: str = "none") -> Any:
    if api == "messages":
        return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key=key))
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(name, provider=provider)


@pytest.mark.parametrize("api", APIS)
def test_an_answer_and_its_stream(url: str, api: str) -> None:
    agent = Agent(model_of(url, api), instructions="Be brief.", model_settings=GREEDY)
    complete = agent.run_sync(QUESTION)

    async def run() -> tuple[str, int]:
        async with agent.run_stream(QUESTION) as stream:
            text = "".join([delta async for delta in stream.stream_text(delta=True)])
            return text, stream.usage.output_tokens

    text, num_tokens = asyncio.run(run())
    assert text == complete.output != ""
    assert num_tokens == complete.usage.output_tokens > 0


@pytest.mark.parametrize("api", APIS)
def test_a_tool_is_called_and_its_result_answered(url: str, api: str) -> None:
    agent = Agent(model_of(url, api), model_settings=GREEDY)
    cities = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the current weather of a city."""
        cities.append(city)
        return json.dumps({"city": city, "temperature_c": 20, "condition": "sunny"})

    result = agent.run_sync(WEATHER)
    assert len(cities) == 1
    assert result.output
    assert result.usage.requests == 2
    # The whole history goes into the next question.
    again = agent.run_sync(QUESTION, message_history=result.all_messages())
    assert again.output


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("output", [ToolOutput, NativeOutput, PromptedOutput])
def test_a_model_is_the_output(url: str, api: str, output: Any) -> None:
    # A model that the profile does not know gets its schema natively only if it is told so.
    profile: Any = {"supports_json_schema_output": True}
    model = model_of(url, api)
    model.profile = {**model.profile, **profile}
    agent = Agent(model, output_type=output(Person), model_settings=GREEDY, retries=3)
    assert isinstance(agent.run_sync(PERSON).output, Person)


@pytest.mark.parametrize("api", APIS)
def test_thinking_goes_around(scripted_url: str, api: str) -> None:
    agent = Agent(model_of(scripted_url, api, "fake"))
    first = agent.run_sync("reason")
    assert first.output == "Four."
    (thought,) = [part for part in first.response.parts if isinstance(part, ThinkingPart)]
    # Of a response, the client takes only a summary for the content, and keeps the text apart.
    raw = (thought.provider_details or {}).get("raw_content", [])
    assert "".join([thought.content, *raw]) == "Two and two."

    async def run() -> list[Any]:
        async with agent.run_stream("reason") as stream:
            await stream.get_output()
            return list(stream.response.parts)

    assert [type(part) for part in asyncio.run(run())] == [
        type(part) for part in first.response.parts
    ]
    assert agent.run_sync("hi", message_history=first.all_messages()).output


@pytest.mark.parametrize("api", APIS)
def test_two_calls_in_one_answer(scripted_url: str, api: str) -> None:
    agent = Agent(model_of(scripted_url, api, "fake"), output_type=[str])
    cities = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        cities.append(city)
        return "20 degrees"

    async def run() -> None:
        async with agent.iter("call twice") as steps:
            async for step in steps:
                if len(cities) == 2:
                    return
                assert step

    asyncio.run(run())
    assert sorted(cities) == ["Basel", "Bern"]


@pytest.mark.parametrize("api", APIS)
def test_errors(url: str, scripted_url: str, locked_url: str, api: str) -> None:
    cases = [
        (model_of(url, api), "word " * 5000, 400),
        (model_of(locked_url, api, "fake", "wrong"), "hi", 401),
        (model_of(scripted_url, api, "missing"), "hi", 404),
        (model_of(scripted_url, api, "fake"), "fail", 500),
    ]
    for model, text, status in cases:
        with pytest.raises(ModelHTTPError) as refused:
            Agent(model).run_sync(text)
        assert refused.value.status_code == status
    assert Agent(model_of(locked_url, api, "fake", KEY)).run_sync("hi").output


def test_settings_beyond_the_basics_are_accepted(url: str) -> None:
    settings: Any = {
        **GREEDY,
        "openai_reasoning_effort": "low",
        "openai_user": "ann",
        "openai_service_tier": "auto",
        "openai_logprobs": True,
        "openai_top_logprobs": 2,
        "parallel_tool_calls": True,
        "seed": 1,
        "stop_sequences": ["###"],
        "logit_bias": {"5": 1},
        "extra_body": {"top_k": 3},
    }
    assert Agent(model_of(url, "chat")).run_sync(QUESTION, model_settings=settings).output
    thinking: Any = {
        "max_tokens": 1500,
        "anthropic_thinking": {"type": "enabled", "budget_tokens": 1024},
        "anthropic_metadata": {"user_id": "ann"},
        "anthropic_cache_instructions": True,
        "anthropic_cache_messages": True,
    }
    agent = Agent(model_of(url, "messages"), instructions="Be brief.")
    assert agent.run_sync(QUESTION, model_settings=thinking).output
