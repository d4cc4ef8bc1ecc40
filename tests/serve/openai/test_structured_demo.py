"""Structured output and forced calls with the bundled demo model, through OpenAI's own client."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, live_server

from quickstep.config import CacheConfig, EngineConfig, LoadConfig
from quickstep.engine.assembly import open_engine

MESSAGES: list[Any] = [{"role": "user", "content": "Describe itertools.chain as JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"enum": ["io", "math", "text"]}, "maxItems": 4},
        "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["title", "year", "tags", "maybe"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
OTHER = {
    "type": "function",
    "function": {
        "name": "now",
        "strict": True,
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = EngineConfig(
        load=LoadConfig(model="demo", device="cpu"), cache=CacheConfig(num_blocks=400)
    )
    with live_server(open_engine(config)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 200, **fields}
    return client.chat.completions.create(**given)


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 1), (1.0, 2), (1.8, 3)])
def test_a_json_schema_holds_streamed_as_whole(
    client: openai.OpenAI, temperature: float, seed: int
) -> None:
    fields = {
        "response_format": json_schema(SCHEMA),
        "temperature": temperature,
        "seed": seed,
        "n": 2,
    }
    whole = chat(client, **fields)
    texts = ["", ""]
    for part in chat(client, **fields, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert list(value) == SCHEMA["required"]
        assert len(value["title"]) <= 40
        assert 1900 <= value["year"] <= 2100
        assert set(value["tags"]) <= {"io", "math", "text"}
        assert value["maybe"] in (True, False, None)


CERTAIN = {
    "type": "object",
    "properties": {"a_long_name_of_a_member": {"const": "a text of some words"}},
    "required": ["a_long_name_of_a_member"],
}


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_chunks_say_which_tokens_were_drafts_to_who_asks_for_timings(
    server: LiveServer, route: str
) -> None:
    prompt = {"messages": MESSAGES} if route.startswith("chat") else {"prompt": "x"}
    body = {**prompt, "json_schema": CERTAIN, "temperature": 0.0, "stream": True}
    seen = []
    for wanted in (True, False):
        asked = {**body, "quickstep_timings": wanted}
        lines = httpx.post(f"{server.url}/v1/{route}", json=asked).text.splitlines()
        seen.append([json.loads(line[6:]) for line in lines if line.startswith("data: {")])
    drafts = [
        [choice for part in parts for choice in part["choices"] if "draft" in choice]
        for parts in seen
    ]
    (times,) = seen[0][-1]["quickstep"]["sequences"]
    assert times["num_accepted"] == len(drafts[0]) > 0
    assert all(choice["draft"] is True for choice in drafts[0])
    assert not drafts[1]


def test_a_json_object_begins_as_one(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, temperature=0.5, seed=4)
    content = answer.choices[0].message.content
    assert content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[0-9]{4}-[0-9]{2}"}, r"\d{4}-\d{2}"),
        ({"choice": ["yes", "no", "<tool_call>"]}, r"yes|no|<tool_call>"),
        ({"grammar": 'start: "a" "b"~2..4'}, r"ab{2,4}"),
        ({"json": {"type": "boolean"}}, r"true|false"),
        ({"json": '{"const": 5}'}, r"5"),
    ],
)
def test_structured_outputs_hold_on_both_apis(
    client: openai.OpenAI, asked: dict[str, Any], pattern: str
) -> None:
    body = {"structured_outputs": asked}
    said = chat(client, temperature=2.0, seed=5, extra_body=body).choices[0]
    assert re.fullmatch(pattern, said.message.content)
    text = client.completions.create(
        model="demo", prompt="x = ", max_tokens=60, temperature=2.0, extra_body=body
    ).choices[0]
    assert re.fullmatch(pattern, text.text)
    assert said.finish_reason == text.finish_reason == "stop"


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_one_with_valid_arguments(client: openai.OpenAI, seed: int) -> None:
    fields = {"tools": [TOOL, OTHER], "tool_choice": "required", "parallel_tool_calls": False}
    choice = chat(client, **fields, temperature=1.5, seed=seed).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        assert arguments == {}
    else:
        assert call.function.name == "get_weather"
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("C", "F")


def test_a_named_function_is_the_one_called_streamed_as_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "tools": [TOOL, OTHER],
        "tool_choice": {"type": "function", "function": {"name": "now"}},
        "temperature": 1.5,
        "seed": 6,
    }
    [call] = chat(client, **fields).choices[0].message.tool_calls
    streamed = [
        news
        for part in chat(client, **fields, stream=True)
        for choice in part.choices
        for news in choice.delta.tool_calls or ()
    ]
    assert (call.function.name, call.function.arguments) == ("now", "{}")
    assert "".join(news.function.name or "" for news in streamed) == "now"
    assert "".join(news.function.arguments or "" for news in streamed) == "{}"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"response_format": json_schema({"type": "array", "uniqueItems": True})},
        "response_format.json_schema.schema",
        "uniqueItems",
    ),
    (
        {"extra_body": {"structured_outputs": {"json": {"not": {}}}}},
        "structured_outputs.json",
        "not",
    ),
    (
        {"extra_body": {"structured_outputs": {"regex": "(a"}}},
        "structured_outputs.regex",
        "unclosed group",
    ),
    (
        {"extra_body": {"structured_outputs": {"choice": []}}},
        "structured_outputs.choice",
        "empty choice",
    ),
    (
        {"extra_body": {"structured_outputs": {"grammar": "start: x"}}},
        "structured_outputs.grammar",
        "x",
    ),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"propertyNames": {"format": "email"}}},
                }
            ],
            "tool_choice": "required",
        },
        "tools",
        "propertyNames",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_cannot_be_enforced_is_400_with_its_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.param == param
    assert caught.value.message.count(param) == 1
    assert words in caught.value.message
