"""OpenAI's agents SDK over the Responses API and over chat completions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import agents
import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
)
from openai.types.shared import Reasoning
from pydantic import BaseModel

QUESTION = "What does itertools.chain do?"
WEATHER = "What is the weather in Bern?"
PERSON = "Reply in JSON. Ann is 41 years old."
APIS = ["responses", "chat"]
# Only on OpenAI's own servers does the client ask for the usage of a stream by itself.
GREEDY = ModelSettings(temperature=0, max_tokens=200, include_usage=True)
QUIET = RunConfig(tracing_disabled=True)
# One loop for all: a client's open connections belong to the loop that it was used in.
LOOP = asyncio.Runner()


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return json.dumps({"city": city, "temperature_c": 20, "condition": "sunny"})


def model_of(url: str, api: str, name: str = "demo", **options: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, **options)
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    return kind(name, openai_client=client)


def agent_of(url: str, api: str, settings: ModelSettings = GREEDY, **fields: Any) -> Agent[Any]:
    return Agent("assistant", model=model_of(url, api), model_settings=settings, **fields)


def run(agent: Agent[Any], asked: Any, **options: Any) -> Any:
    return LOOP.run(Runner.run(agent, asked, run_config=QUIET, **options))


@pytest.mark.parametrize("api", APIS)
def test_an_answer_and_its_stream(url: str, api: str) -> None:
    agent = agent_of(url, api, instructions="Be brief.")
    complete = run(agent, QUESTION)

    async def stream() -> tuple[Any, str]:
        result = Runner.run_streamed(agent, QUESTION, run_config=QUIET)
        text = ""
        async for event in result.stream_events():
            data = getattr(event, "data", None)
            if getattr(data, "type", "") == "response.output_text.delta":
                text += data.delta
        return result, text

    streamed, text = LOOP.run(stream())
    assert text == streamed.final_output == complete.final_output != ""
    for result in (complete, streamed):
        assert result.context_wrapper.usage.output_tokens > 0
        assert result.context_wrapper.usage.requests == 1


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
def test_a_tool_is_called_and_its_result_answered(url: str, api: str, choice: str) -> None:
    settings = ModelSettings(temperature=0, max_tokens=200, tool_choice=choice)
    agent = agent_of(url, api, settings, tools=[get_weather])
    result = run(agent, WEATHER)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    # The items go back as the input of the next turn.
    turns = [*result.to_input_list(), {"role": "user", "content": QUESTION}]
    settings = ModelSettings(temperature=0, max_tokens=200, tool_choice="none")
    assert run(agent_of(url, api, settings, tools=[get_weather]), turns).final_output


@pytest.mark.parametrize("api", APIS)
def test_a_tool_is_called_in_a_stream(url: str, api: str) -> None:
    agent = agent_of(url, api, tools=[get_weather])

    async def stream() -> Any:
        result = Runner.run_streamed(agent, WEATHER, run_config=QUIET)
        async for _ in result.stream_events():
            pass
        return result

    result = LOOP.run(stream())
    assert result.new_items[0].type == "tool_call_item"
    assert result.final_output


@pytest.mark.parametrize("api", APIS)
def test_a_model_is_the_output(url: str, api: str) -> None:
    assert isinstance(run(agent_of(url, api, output_type=Person), PERSON).final_output, Person)


@pytest.mark.parametrize("api", APIS)
def test_a_session_remembers_the_conversation(url: str, api: str) -> None:
    session = SQLiteSession("one")
    agent = agent_of(url, api)
    first = run(agent, QUESTION, session=session)
    second = run(agent, "And itertools.tee?", session=session)
    tokens = [one.context_wrapper.usage.input_tokens for one in (first, second)]
    assert tokens[0] < tokens[1]


def test_a_response_continues_another(url: str) -> None:
    agent = agent_of(url, "responses")
    first = run(agent, QUESTION)
    second = run(agent, "And itertools.tee?", previous_response_id=first.last_response_id)
    tokens = [one.context_wrapper.usage.input_tokens for one in (first, second)]
    assert tokens[0] < tokens[1]
    with pytest.raises(openai.APIStatusError) as missing:
        run(agent, QUESTION, previous_response_id="resp_missing")
    assert missing.value.status_code in (400, 404)


@pytest.mark.parametrize("api", APIS)
def test_a_handoff_is_a_tool(url: str, api: str) -> None:
    other = agent_of(url, api)
    settings = ModelSettings(temperature=0, tool_choice="required")
    agent = agent_of(url, api, settings, handoffs=[handoff(other)])
    result = run(agent, QUESTION)
    assert result.last_agent is other
    assert result.final_output


@pytest.mark.parametrize("api", APIS)
def test_reasoning_goes_around(scripted_url: str, api: str) -> None:
    agent: Agent[Any] = Agent("thinker", model=model_of(scripted_url, api, "fake"))
    result = run(agent, "reason")
    assert result.final_output == "Four."
    assert "reasoning_item" in [item.type for item in result.new_items]
    turns = [*result.to_input_list(), {"role": "user", "content": "hi"}]
    assert run(agent, turns).final_output


@pytest.mark.parametrize("api", APIS)
def test_settings_beyond_the_basics_are_accepted(url: str, api: str) -> None:
    settings = ModelSettings(
        temperature=0,
        top_p=0.9,
        max_tokens=200,
        parallel_tool_calls=False,
        truncation="auto" if api == "responses" else None,
        reasoning=Reasoning(effort="low", summary="auto" if api == "responses" else None),
        verbosity="low",
        metadata={"run": "1"},
        store=False,
        prompt_cache_retention="24h",
        include_usage=True,
        top_logprobs=2,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        extra_body={"top_k": 3},
    )
    assert run(agent_of(url, api, settings, tools=[get_weather]), QUESTION).final_output


def test_a_tool_of_openais_servers_is_left_out(url: str) -> None:
    agent = agent_of(url, "responses", tools=[agents.WebSearchTool()])
    assert run(agent, QUESTION).final_output


@pytest.mark.parametrize("api", APIS)
def test_errors(url: str, scripted_url: str, locked_url: str, api: str) -> None:
    with pytest.raises(openai.BadRequestError) as overflow:
        run(agent_of(url, api), "word " * 5000)
    assert overflow.value.code == "context_length_exceeded"
    cases: list[tuple[Any, str, type[Exception]]] = [
        (model_of(locked_url, api, "fake"), "hi", openai.AuthenticationError),
        (model_of(scripted_url, api, "missing"), "hi", openai.NotFoundError),
        (model_of(scripted_url, api, "fake", timeout=0.5), "never", openai.APITimeoutError),
    ]
    for model, asked, kind in cases:
        with pytest.raises(kind):
            run(Agent("one", model=model), asked)
