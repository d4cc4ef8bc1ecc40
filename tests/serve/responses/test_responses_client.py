"""OpenAI's own client on `/v1/responses`, with the scripted engine behind a socket."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_engine import WORDS, FakeEngine, Script
from live_server import live_server
from pydantic import BaseModel
from route_calls import saying

from quickstep.types import FinishReason

TEXT = "".join(WORDS)
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with (
        live_server(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def fresh_script(engine: FakeEngine) -> Iterator[None]:
    yield
    engine.script = Script()


def test_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hi", max_output_tokens=50)
    assert answer.output_text == TEXT
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_a_response_that_is_cut(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hi", max_output_tokens=2)
    assert (answer.output_text, answer.status) == ("Hello world", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="fake", input="hi", stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == TEXT


def test_the_streaming_helper_assembles_the_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="hi") as stream:
        assert stream.get_final_response().output_text == TEXT


def test_a_tool_goes_around(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying(f"Let me see.\n{CALL}")
    history: list[Any] = [{"role": "user", "content": "The weather in Bern?"}]
    first = client.responses.create(model="fake", input=history, tools=[TOOL], store=False)
    call = first.output[-1]
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Bern"}')
    engine.script = saying("20 degrees.")
    history += [item.model_dump() for item in first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "20"})
    second = client.responses.create(model="fake", input=history, tools=[TOOL])
    assert second.output_text == "20 degrees."
    assert "tool: 20" in bytes(engine.submitted[-1].prompt).decode()


def test_a_streamed_tool_call_is_the_same(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying(CALL)
    with client.responses.stream(model="fake", input="hi", tools=[TOOL]) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert call.arguments == '{"city": "Bern"}'


def test_structured_output_is_parsed(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying('{"name": "Bern", "people": 134000}')
    answer = client.responses.parse(model="fake", input="hi", text_format=City)
    assert answer.output_parsed == City(name="Bern", people=134000)
    grammar = engine.submitted[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


def test_a_chain_of_responses(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.responses.create(model="fake", input="one")
    second = client.responses.create(model="fake", input="two", previous_response_id=first.id)
    client.responses.create(model="fake", input="three", previous_response_id=second.id)
    prompt = bytes(engine.submitted[-1].prompt).decode()
    assert prompt.replace(TEXT, "T") == (
        "user: one\nassistant: T\nuser: two\nassistant: T\nuser: three\nassistant:"
    )
    assert client.responses.retrieve(second.id).output_text == TEXT
    (item,) = client.responses.input_items.list(second.id).data
    assert item.type == "message"
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="gpt-9", input="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model="fake", input="a", previous_response_id="resp_0")
    assert gone.value.code == "previous_response_not_found"
    assert gone.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="fake", input="a", background=True, store=False)
    assert refused.value.param == "background"


def test_a_response_in_the_background(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.responses.create(model="fake", input="a", background=True, stream=True)
    events = list(first)
    last = events[-1]
    assert last.type == "response.completed"
    url = last.response.id
    for after in (0, 5, len(events) - 2):
        rest = client.responses.retrieve(url, stream=True, starting_after=after)
        assert list(rest) == events[after + 1 :]
    engine.script = Script(endless=True)
    begun = client.responses.create(model="fake", input="a", background=True)
    assert begun.background
    assert client.responses.retrieve(begun.id).status == "in_progress"
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.responses.create(model="fake", input="a", previous_response_id=begun.id)


def test_a_failure_ends_the_stream_with_its_response(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.script = Script(FinishReason.ERROR, error="the logits are NaN")
    with pytest.raises(openai.InternalServerError, match="NaN"):
        client.responses.create(model="fake", input="a")
    *_, last = client.responses.create(model="fake", input="a", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "the logits are NaN"
