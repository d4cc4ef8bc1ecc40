"""Ollama's own client on `/api`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import ollama
import pytest
from conftest import KEY
from pydantic import BaseModel

QUESTION: Any = [{"role": "user", "content": "What does itertools.chain do?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
PERSON: Any = [{"role": "user", "content": "Reply in JSON. Ann is 41 years old."}]
GREEDY: Any = {"temperature": 0, "num_predict": 60}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: Its name.
    """
    return json.dumps({"city": city, "temperature_c": 20, "condition": "sunny"})


@pytest.fixture(scope="module")
def client(url: str) -> ollama.Client:
    return ollama.Client(host=url)


@pytest.fixture(scope="module")
def scripted(scripted_url: str) -> ollama.Client:
    return ollama.Client(host=scripted_url)


def saying(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


def test_models_are_listed_shown_and_running(client: ollama.Client) -> None:
    names = [model.model for model in client.list().models]
    assert names[0]
    assert names[0].startswith("demo")
    for name in (names[0], "demo", "demo:latest"):
        shown = client.show(name)
        assert "tools" in (shown.capabilities or [])
        assert shown.modelinfo
    assert client.ps().models[0].model == names[0]


def test_a_chat_and_its_stream(client: ollama.Client) -> None:
    complete = client.chat("demo", QUESTION, options=GREEDY)
    parts = list(client.chat("demo", QUESTION, options=GREEDY, stream=True))
    assert complete.message.content
    assert "".join(part.message.content or "" for part in parts) == complete.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for answer in (complete, parts[-1]):
        assert answer.done_reason in ("stop", "length")
        assert answer.prompt_eval_count
        assert answer.eval_count == complete.eval_count
        assert answer.total_duration


def test_generate_and_its_stream(client: ollama.Client) -> None:
    fields: Any = {"model": "demo", "prompt": "import ", "raw": True, "options": GREEDY}
    complete = client.generate(**fields)
    parts = list(client.generate(**fields, stream=True))
    assert "".join(part.response for part in parts) == complete.response != ""
    templated = client.generate("demo", "What does itertools.chain do?", options=GREEDY)
    chat = client.chat("demo", QUESTION, options=GREEDY)
    assert templated.response == chat.message.content


def test_a_function_is_called_and_its_result_answered(client: ollama.Client) -> None:
    complete = client.chat("demo", WEATHER, tools=[get_weather], options=GREEDY).message
    parts = list(client.chat("demo", WEATHER, tools=[get_weather], options=GREEDY, stream=True))
    (streamed,) = [call for part in parts for call in part.message.tool_calls or []]
    assert complete.tool_calls
    for call in (complete.tool_calls[0], streamed):
        assert call.function.name == "get_weather"
        assert set(call.function.arguments) == {"city"}
    result = get_weather(**complete.tool_calls[0].function.arguments)
    turns = [*WEATHER, complete, {"role": "tool", "tool_name": "get_weather", "content": result}]
    assert client.chat("demo", turns, tools=[get_weather], options=GREEDY).message.content


def test_a_schema_is_a_format(client: ollama.Client) -> None:
    answer = client.chat("demo", PERSON, format=Person.model_json_schema(), options=GREEDY)
    assert Person.model_validate_json(answer.message.content or "")
    options = {**GREEDY, "num_predict": 200}
    answer = client.chat("demo", PERSON, format="json", options=options)
    assert isinstance(json.loads(answer.message.content or ""), dict)


def test_thinking_is_a_field_of_its_own(scripted: ollama.Client) -> None:
    complete = scripted.chat(**saying("reason", think=True)).message
    assert (complete.thinking, complete.content) == ("Two and two.", "Four.")
    parts = list(scripted.chat(**saying("reason", think=True, stream=True)))
    assert "".join(part.message.thinking or "" for part in parts) == complete.thinking
    assert "".join(part.message.content or "" for part in parts) == complete.content
    turns = [*saying("reason")["messages"], complete, *saying("hi")["messages"]]
    assert scripted.chat("fake", turns).message.content


def test_two_calls_in_one_answer(scripted: ollama.Client) -> None:
    answer = scripted.chat(**saying("call twice", tools=[get_weather]))
    calls = answer.message.tool_calls or []
    assert [call.function.arguments["city"] for call in calls] == ["Bern", "Basel"]


def test_options_of_loading_are_accepted(client: ollama.Client) -> None:
    options = {**GREEDY, "num_ctx": 4096, "num_gpu": 1, "num_thread": 2, "repeat_penalty": 1.1}
    answer = client.chat("demo", QUESTION, options=options, keep_alive="5m", think=False)
    assert answer.message.content
    assert client.generate("demo", "hi", keep_alive=0, options={"num_predict": 2}).done


def test_logprobs(client: ollama.Client) -> None:
    answer = client.chat("demo", QUESTION, logprobs=True, top_logprobs=2, options=GREEDY)
    assert answer.logprobs
    assert all(len(token.top_logprobs or []) == 2 for token in answer.logprobs)


def test_embeddings(client: ollama.Client) -> None:
    vectors = client.embed("demo", ["a", "b c"]).embeddings
    assert len(vectors) == 2
    assert len(vectors[0]) == len(vectors[1]) > 0
    assert len(client.embeddings("demo", "a").embedding) == len(vectors[0])


def test_async_requests_run_together(url: str) -> None:
    async def run() -> list[Any]:
        client = ollama.AsyncClient(host=url)
        asked = [client.chat("demo", QUESTION, options=GREEDY) for _ in range(6)]
        return await asyncio.gather(*asked)

    assert len({answer.message.content for answer in asyncio.run(run())}) == 1


def test_errors(
    client: ollama.Client, scripted: ollama.Client, scripted_url: str, locked_url: str
) -> None:
    cases = [
        (client, {"model": "demo", "messages": [{"role": "user", "content": "word " * 5000}]}, 400),
        (client, {"model": "llama3.2", "messages": QUESTION}, 404),
        (scripted, saying("fail"), 500),
        (ollama.Client(host=locked_url), saying("hi"), 401),
    ]
    for one, fields, status in cases:
        with pytest.raises(ollama.ResponseError) as refused:
            one.chat(**fields)
        assert refused.value.status_code == status
        assert refused.value.error
    with pytest.raises(ollama.ResponseError, match="NaN"):
        list(scripted.chat(**saying("fail", stream=True)))
    with pytest.raises(ollama.ResponseError):
        client.pull("llama3.2")
    with pytest.raises(httpx.TimeoutException):
        ollama.Client(host=scripted_url, timeout=0.5).chat(**saying("never"))
    keyed = ollama.Client(host=locked_url, headers={"authorization": f"Bearer {KEY}"})
    assert keyed.chat(**saying("hi")).message.content
