"""The bundled demo model on all three surfaces: a chat, a tool call, an answer of a schema."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
from live_server import live_server

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine

QUESTION: Any = [{"role": "user", "content": "What does itertools.chain do?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
PERSON: Any = [{"role": "user", "content": "Reply in JSON. Ann is 41 years old."}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOLD: Any = {"name": "get_weather", "description": "Get the current weather of a city."}
FUNCTION: Any = {"type": "function", **TOLD, "parameters": CITY, "strict": None}
TOOL: Any = {**TOLD, "input_schema": CITY}
GREEDY: Any = {"temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = open_engine(
        EngineConfig(
            load=LoadConfig(model="demo", device="cpu"),
            cache=CacheConfig(num_blocks=200),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        )
    )
    with live_server(engine) as server:
        yield server.url


@pytest.fixture(scope="module")
def chat(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def respond(chat: openai.OpenAI, **fields: Any) -> Any:
    """A response, which its stream repeats."""
    fields = {"model": "demo", "max_output_tokens": 60, **GREEDY, **fields}
    whole = chat.responses.create(**fields)
    with chat.responses.stream(**fields) as stream:
        streamed = stream.get_final_response()
    assert said(streamed.output) == said(whole.output)
    return whole


def said(output: Any) -> list[tuple[Any, ...]]:
    return [
        (item.name, item.arguments) if item.type == "function_call" else (item.content[0].text,)
        for item in output
    ]


def message(claude: anthropic.Anthropic, **fields: Any) -> Any:
    """A message, which its stream repeats."""
    fields = {"model": "demo", "max_tokens": 60, "extra_body": GREEDY, **fields}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    blocks = [
        [{**block.model_dump(), "id": None, "parsed_output": None} for block in one.content]
        for one in (whole, streamed)
    ]
    assert blocks[0] == blocks[1]
    assert whole.stop_reason == streamed.stop_reason
    return whole


def test_a_chat_is_the_same_on_all_apis(chat: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    completion = chat.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=60, **GREEDY
    )
    text = completion.choices[0].message.content
    assert text
    response = respond(chat, input=QUESTION)
    assert response.output_text == text
    (block,) = message(claude, messages=QUESTION).content
    assert block.text == text


def test_a_partial_response_continues_as_it_would_have(
    chat: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    (block,) = message(claude, messages=QUESTION).content
    begun = " ".join(block.text.split(" ")[:3])
    rest = block.text.removeprefix(begun)
    turns: Any = [*QUESTION, {"role": "assistant", "content": begun}]
    (continued,) = message(claude, messages=turns).content
    assert continued.text.startswith(rest)
    extra: Any = {"continue_final_message": True, "add_generation_prompt": False}
    fields: Any = {"model": "demo", "messages": turns, "max_tokens": 60, **GREEDY}
    whole = chat.chat.completions.create(**fields, extra_body=extra).choices[0].message.content
    stream = chat.chat.completions.create(**fields, extra_body=extra, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    assert whole == continued.text


class GetWeather(pydantic.BaseModel):
    """Get the current weather of a city."""

    city: Literal["Zug", "Basel"]


def test_a_strict_tool_fits_its_schema_and_leaves_text_alone(
    chat: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    tool: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")
    schema = tool["function"]["parameters"]
    for choice in ("auto", "required"):
        call = (
            chat.chat.completions.parse(
                model="demo", messages=WEATHER, tools=[tool], tool_choice=choice, **GREEDY
            )
            .choices[0]
            .message.tool_calls[0]
            .function
        )
        assert call.parsed_arguments.city in ("Zug", "Basel")
    told: Any = {**TOLD, "type": "function", "parameters": schema, "strict": True}
    (item,) = respond(chat, input=WEATHER, tools=[told]).output
    assert json.loads(item.arguments)["city"] in ("Zug", "Basel")
    shown: Any = {**TOLD, "input_schema": schema, "strict": True}
    (use,) = message(claude, messages=WEATHER, tools=[shown]).content
    assert use.input["city"] in ("Zug", "Basel")
    texts = [
        respond(chat, input=QUESTION, tools=[{**told, "strict": strict}]).output_text
        for strict in (True, False)
    ]
    assert texts[0] == texts[1] != ""


def test_a_prompt_counts_the_same_and_comes_from_the_cache(
    chat: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    fields: Any = {"messages": WEATHER, "tools": [TOOL]}
    counted = claude.messages.count_tokens(model="demo", **fields).input_tokens
    message(claude, **fields)
    usage = message(claude, **fields).usage
    assert usage.cache_read_input_tokens >= 16
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    told = respond(chat, input=WEATHER, tools=[FUNCTION]).usage
    assert told.input_tokens == counted
    assert told.input_tokens_details.cached_tokens >= 16


def test_the_model_calls_a_tool_and_answers_with_its_result(
    chat: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    tools: Any = [{"type": "function", "function": {**TOLD, "parameters": CITY}}]
    choice = chat.chat.completions.create(
        model="demo", messages=WEATHER, tools=tools, max_tokens=60, **GREEDY
    ).choices[0]
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Bern"}'
    response = respond(chat, input=WEATHER, tools=[FUNCTION])
    (call,) = response.output
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Bern"}')
    whole = message(claude, messages=WEATHER, tools=[TOOL])
    (use,) = whole.content
    assert (use.name, use.input, whole.stop_reason) == ("get_weather", {"city": "Bern"}, "tool_use")

    weather = '{"city": "Bern", "temperature_c": 20, "condition": "sunny"}'
    result = {"type": "function_call_output", "call_id": call.call_id, "output": weather}
    asked: Any = {"input": [result], "previous_response_id": response.id, "tools": [FUNCTION]}
    assert "20 degrees" in respond(chat, **asked).output_text
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": weather}]
    turns: Any = [
        *WEATHER,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": results},
    ]
    assert "20 degrees" in message(claude, messages=turns, tools=[TOOL]).content[0].text


def test_a_call_can_be_forced(chat: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    (call,) = respond(
        chat,
        input=QUESTION,
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "get_weather"},
    ).output
    assert set(json.loads(call.arguments)) == {"city"}
    whole = message(claude, messages=QUESTION, tools=[TOOL], tool_choice={"type": "any"})
    assert whole.stop_reason == "tool_use"
    assert set(whole.content[0].input) == {"city"}


def test_an_answer_follows_its_schema(chat: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    ann = {"name": "Ann", "age": 41}
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    completion = chat.chat.completions.create(
        model="demo", messages=PERSON, response_format=form, max_tokens=60, **GREEDY
    )
    assert json.loads(completion.choices[0].message.content or "") == ann
    text = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
    assert json.loads(respond(chat, input=PERSON, text=text).output_text) == ann
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    (block,) = message(claude, messages=PERSON, output_config=output).content
    assert json.loads(block.text) == ann


def test_a_stop_sequence_ends_a_message_and_is_named(claude: anthropic.Anthropic) -> None:
    text = message(claude, messages=QUESTION).content[0].text
    stop = text.split()[3]
    whole = message(claude, messages=QUESTION, stop_sequences=[stop])
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", stop)
    assert whole.content[0].text == text[: text.index(stop)]
