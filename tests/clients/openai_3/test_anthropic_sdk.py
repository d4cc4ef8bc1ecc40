"""Anthropic's own client: what its helpers make of the demo model's and the scripts' answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from conftest import KEY
from pydantic import BaseModel

QUESTION: Any = [{"role": "user", "content": "What does itertools.chain do?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
PERSON: Any = [{"role": "user", "content": "Reply in JSON. Ann is 41 years old."}]
FIELDS: Any = {"model": "demo", "max_tokens": 200, "extra_body": {"temperature": 0}}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: Its name.
    """
    return json.dumps({"city": city, "temperature_c": 20, "condition": "sunny"})


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(scripted_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=scripted_url, api_key="none", max_retries=0) as client:
        yield client


def saying(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "fake", "max_tokens": 2000, "messages": messages, **fields}


def test_a_stream_repeats_the_complete_message(client: anthropic.Anthropic) -> None:
    complete = client.messages.create(**FIELDS, messages=QUESTION)
    with client.messages.stream(**FIELDS, messages=QUESTION) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert complete.content[0].type == "text"
    assert text == complete.content[0].text != ""
    assert streamed.stop_reason == complete.stop_reason
    assert streamed.usage.output_tokens == complete.usage.output_tokens > 0


def test_the_tool_runner_calls_a_function(client: anthropic.Anthropic) -> None:
    runner = client.beta.messages.tool_runner(**FIELDS, messages=WEATHER, tools=[get_weather])
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]


def test_a_model_is_parsed(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(**FIELDS, messages=PERSON, output_format=Person)
    assert isinstance(parsed.parsed_output, Person)


def test_thinking_has_a_signature_and_goes_back(scripted: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    complete = scripted.messages.create(**saying("reason"), thinking=thinking)
    with scripted.messages.stream(**saying("reason"), thinking=thinking) as stream:
        streamed = stream.get_final_message()
    for message in (complete, streamed):
        thought, text = message.content
        assert thought.type == "thinking"
        assert (thought.thinking, bool(thought.signature)) == ("Two and two.", True)
        assert text.type == "text"
    turns: Any = [
        {"role": "user", "content": "reason"},
        {"role": "assistant", "content": streamed.content},
        {"role": "user", "content": "hi"},
    ]
    assert scripted.messages.create(model="fake", max_tokens=50, messages=turns).content


def test_models_are_listed(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "gpt-4o-mini"]


def test_async_requests_run_together(url: str) -> None:
    async def run() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            asked = [client.messages.create(**FIELDS, messages=QUESTION) for _ in range(6)]
            return await asyncio.gather(*asked)

    assert len({message.content[0].text for message in asyncio.run(run())}) == 1


def test_errors(
    client: anthropic.Anthropic, scripted: anthropic.Anthropic, locked_url: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**FIELDS, messages=[{"role": "user", "content": "word " * 5000}])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**FIELDS, "model": "claude-9"}, messages=QUESTION)
    with pytest.raises(anthropic.InternalServerError, match="NaN"):
        scripted.messages.create(**saying("fail"))
    with pytest.raises(anthropic.APITimeoutError):
        scripted.with_options(timeout=0.5).messages.create(**saying("never"))
    assert scripted.with_options(max_retries=2).messages.create(**saying("busy 1")).content
    for token, allowed in ((KEY, True), ("wrong", False)):
        with anthropic.Anthropic(base_url=locked_url, auth_token=token, max_retries=0) as keyed:
            if allowed:
                assert keyed.messages.create(**saying("hi")).content
                continue
            with pytest.raises(anthropic.AuthenticationError):
                keyed.messages.create(**saying("hi"))
