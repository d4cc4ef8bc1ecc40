"""`ChatAnthropic` of LangChain on `/v1/messages`: thinking, marks for the cache, tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
from conftest import KEY
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

QUESTION = "What does itertools.chain do?"
WEATHER = "What is the weather in Bern?"
PERSON = "Reply in JSON. Ann is 41 years old."
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return json.dumps({"city": city, "temperature_c": 20, "condition": "sunny"})


def chat(url: str, **fields: Any) -> ChatAnthropic:
    fields = {"model": "demo", "max_tokens": 100, "api_key": "none", "max_retries": 0, **fields}
    return ChatAnthropic(base_url=url, **fields)


def greedy(url: str, **fields: Any) -> ChatAnthropic:
    return chat(url, temperature=0, **fields)


def streamed(model: Any, asked: Any) -> AIMessageChunk:
    """The sum of a stream's chunks."""
    chunks = list(model.stream(asked))
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert isinstance(total, AIMessageChunk)
    return total


def test_a_stream_repeats_the_complete_answer_and_its_usage(url: str) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    complete = greedy(url).invoke(messages)
    total = streamed(greedy(url), messages)
    assert complete.text
    assert total.text == complete.text
    assert complete.usage_metadata
    assert total.usage_metadata
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert total.usage_metadata[name] == complete.usage_metadata[name] > 0
    assert total.response_metadata["stop_reason"] == complete.response_metadata["stop_reason"]


@pytest.mark.parametrize("choice", [None, "any", "get_weather"])
def test_a_tool_goes_around(url: str, choice: str | None) -> None:
    bound = greedy(url).bind_tools([get_weather], tool_choice=choice)
    complete = bound.invoke(WEATHER)
    total = streamed(bound, WEATHER)
    for message in (complete, total):
        (call,) = message.tool_calls
        assert call["name"] == "get_weather"
        assert set(call["args"]) == {"city"}
    result = get_weather.invoke(complete.tool_calls[0])
    assert isinstance(result, ToolMessage)
    answer = greedy(url).bind_tools([get_weather]).invoke([HumanMessage(WEATHER), complete, result])
    assert answer.text or answer.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(url: str, method: Any) -> None:
    model = greedy(url).with_structured_output(Person, method=method, include_raw=True)
    found: Any = model.invoke(PERSON)
    assert found["parsing_error"] is None
    assert isinstance(found["parsed"], Person)


def test_thinking_without_a_reasoning_model_is_accepted(url: str) -> None:
    assert chat(url, max_tokens=1500, thinking=THINKING).invoke(QUESTION).text
    assert chat(url, thinking={"type": "adaptive"}, effort="low").invoke(QUESTION).text


def test_thinking_is_a_block_that_goes_back(scripted_url: str) -> None:
    model = chat(scripted_url, model="fake", max_tokens=1500, thinking=THINKING)
    bound = model.bind_tools([get_weather])
    complete = bound.invoke("reason and call")
    total = streamed(bound, "reason and call")
    for message in (complete, total):
        kinds = [block["type"] for block in message.content_blocks]
        assert kinds == ["reasoning", "text", "tool_call"]
        blocks: Any = message.content
        assert blocks[0]["thinking"] == "Weather."
        assert "signature" in blocks[0]
        result = ToolMessage("20 degrees", tool_call_id=message.tool_calls[0]["id"])
        turns = [HumanMessage("reason and call"), message, result, HumanMessage("hi")]
        assert bound.invoke(turns).text


def test_marks_for_the_cache_are_accepted_and_counted(url: str) -> None:
    mark = {"type": "ephemeral"}
    text = "You are a helpful assistant for the weather. " * 20
    messages = [
        SystemMessage([{"type": "text", "text": text, "cache_control": mark}]),
        HumanMessage([{"type": "text", "text": QUESTION, "cache_control": mark}]),
    ]
    greedy(url).invoke(messages)
    again = greedy(url).invoke(messages).usage_metadata
    assert again
    assert again["input_token_details"]["cache_read"] > 0
    told = streamed(greedy(url), messages).usage_metadata
    assert told
    assert told["input_token_details"]["cache_read"] > 0
    assert told["input_tokens"] == again["input_tokens"]
    tool_with_mark = {
        "name": "get_weather",
        "description": "Get the weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": mark,
    }
    assert greedy(url).bind_tools([tool_with_mark]).invoke(messages)
    assert greedy(url).invoke(QUESTION, cache_control=mark).text


def test_tools_of_the_server_are_left_out(url: str) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 1}
    assert greedy(url).bind_tools([search]).invoke(QUESTION).text


def test_what_a_client_sets_beyond_the_basics_is_accepted(url: str) -> None:
    model = greedy(
        url,
        top_k=3,
        top_p=0.9,
        stop=["###"],
        betas=["interleaved-thinking-2025-05-14"],
        default_headers={"anthropic-beta": "tools-2024-05-16"},
        model_kwargs={"metadata": {"user_id": "ann"}},
    )
    assert model.invoke(QUESTION).text


def test_tokens_are_counted(url: str) -> None:
    model = greedy(url)
    counted = model.get_num_tokens_from_messages([HumanMessage(QUESTION)])
    usage = model.invoke(QUESTION).usage_metadata
    assert usage
    assert counted == usage["input_tokens"]


def test_batches_and_async(url: str) -> None:
    model = greedy(url)
    texts = {message.text for message in model.batch([QUESTION] * 4)}

    async def run() -> set[str]:
        answers = await model.abatch([QUESTION] * 4)
        text = "".join([chunk.text async for chunk in model.astream(QUESTION)])
        return {text, *(answer.text for answer in answers)}

    assert asyncio.run(run()) == texts
    assert len(texts) == 1


def test_a_long_prompt_overflows_the_context(url: str) -> None:
    with pytest.raises(ContextOverflowError):
        greedy(url).invoke("word " * 5000)
    with pytest.raises(ContextOverflowError):
        list(greedy(url).stream("word " * 5000))


def test_errors(scripted_url: str, locked_url: str) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        chat(locked_url, model="fake", api_key="wrong").invoke("hi")
    assert chat(locked_url, model="fake", api_key=KEY).invoke("hi").text
    with pytest.raises(anthropic.NotFoundError):
        chat(scripted_url, model="claude-9").invoke("hi")
    with pytest.raises(anthropic.APITimeoutError):
        chat(scripted_url, model="fake", timeout=0.5).invoke("never")
    with pytest.raises(anthropic.InternalServerError):
        chat(scripted_url, model="fake").invoke("fail")
    assert chat(scripted_url, model="fake", max_retries=2).invoke("busy 1").text
