"""Anthropic's own client on `/v1/messages`, with the scripted engine behind a socket."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from fake_engine import WORDS, FakeEngine, FakeTemplate, Script
from live_server import live_server
from route_calls import saying

from quickstep.errors import EngineError
from quickstep.text.tool_calls.formats import formats_of
from quickstep.types import FinishReason

TEXT = "".join(WORDS)
TEMPLATE = "{% for tool in tools %}<tool_call>{% endfor %}{{ message.tool_calls }}</think>"
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
REQUEST: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "hi"}],
}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(chat_template=FakeTemplate(formats_of(TEMPLATE)))


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[anthropic.Anthropic]:
    with (
        live_server(engine) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def fresh_script(engine: FakeEngine) -> Iterator[None]:
    yield
    engine.script = Script()


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**REQUEST, system="Be brief.")
    (block,) = message.content
    assert block.type == "text"
    assert block.text == TEXT
    assert (message.stop_reason, message.role) == ("end_turn", "assistant")
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.output_tokens == 9


def test_a_message_that_is_cut(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**{**REQUEST, "max_tokens": 2})
    assert message.stop_reason == "max_tokens"


def test_a_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**REQUEST) as stream:
        assert "".join(stream.text_stream) == TEXT
        final = stream.get_final_message()
    complete = client.messages.create(**REQUEST)
    assert final.stop_reason == complete.stop_reason == "end_turn"
    assert final.usage == complete.usage


def test_raw_events_begin_with_the_message(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(**REQUEST, stream=True))
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"


def test_a_tool_goes_around(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.script = saying(f"<think>Weather.</think>Let me see.\n{CALL}")
    fields = {**REQUEST, "tools": [TOOL]}
    complete = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for message in (complete, streamed):
        assert message.stop_reason == "tool_use"
        thought, text, call = message.content
        assert thought.type == "thinking"
        assert thought.thinking == "Weather."
        assert text.type == "text"
        assert text.text == "Let me see."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("get_weather", {"city": "Bern"})
    call = complete.content[2]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"}
    messages: list[Any] = [
        *REQUEST["messages"],
        {"role": "assistant", "content": complete.content},
        {"role": "user", "content": [result]},
    ]
    engine.script = saying("20 degrees.")
    answer = client.messages.create(**{**fields, "messages": messages})
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "20 degrees."
    prompt = bytes(engine.submitted[-1].prompt).decode()
    assert "tool: 20 degrees" in prompt
    assert "'name': 'get_weather'" in prompt


def test_thinking_has_the_same_signature_in_a_stream(
    client: anthropic.Anthropic, engine: FakeEngine
) -> None:
    # Clients drop a streamed block of thinking that no signature_delta ends.
    engine.script = saying("<think>Two and two.</think>Four.")
    complete = client.messages.create(**REQUEST)
    events = list(client.messages.create(**REQUEST, stream=True))
    with client.messages.stream(**REQUEST) as stream:
        streamed = stream.get_final_message()
    assert complete.content[0].type == streamed.content[0].type == "thinking"
    assert complete.content[0].signature == streamed.content[0].signature != ""
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas.count("signature_delta") == 1
    assert deltas[deltas.index("signature_delta") - 1] == "thinking_delta"


def test_a_forced_call_and_structured_output_are_grammars(
    client: anthropic.Anthropic, engine: FakeEngine
) -> None:
    client.messages.create(**REQUEST, tools=[TOOL], tool_choice={"type": "any"})
    forced = engine.submitted[-1].sampling.grammar
    assert forced is not None
    assert "get_weather" in forced.text
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.messages.create(
        **REQUEST, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    grammar = engine.submitted[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


def test_a_stop_sequence_is_named(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.script = saying("So", reason=FinishReason.STOP_STRING, stop_reason="###")
    message = client.messages.create(**REQUEST, stop_sequences=["###"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "###")
    assert engine.submitted[-1].sampling.stop == ("###",)


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    request = {name: REQUEST[name] for name in ("model", "messages")}
    counted = client.messages.count_tokens(**request, tools=[TOOL])
    usage = client.messages.create(**REQUEST, tools=[TOOL]).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_fields_that_the_client_no_longer_names_go_through_extra_body(
    client: anthropic.Anthropic, engine: FakeEngine
) -> None:
    client.messages.create(**REQUEST, extra_body={"temperature": 0.25, "top_k": 3, "top_p": 0.5})
    sampling = engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 3, 0.5)


def test_errors_become_the_clients_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**REQUEST, "model": "claude-9"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="inference_geo is not supported"):
        client.messages.create(**REQUEST, inference_geo="us")
    raw = client.messages.with_raw_response.create(**REQUEST, extra_body={"colour": 1})
    assert raw.headers["x-quickstep-ignored"] == "colour"
    with pytest.raises(anthropic.ContentTooLargeError):
        content = "a" * (5 * 1024 * 1024)
        client.messages.create(**{**REQUEST, "messages": [{"role": "user", "content": content}]})


def test_betas_that_ask_for_nothing_pass_and_others_are_reported(
    client: anthropic.Anthropic,
) -> None:
    passing = ["interleaved-thinking-2025-05-14", "prompt-caching-2024-07-31"]
    assert client.beta.messages.create(**REQUEST, betas=passing).content
    assert client.beta.messages.count_tokens(
        model="fake", messages=REQUEST["messages"], betas=["token-counting-2024-11-01"]
    ).input_tokens
    for betas in (["mcp-client-2025-04-04"], [*passing, "files-api-2025-04-14"]):
        raw = client.beta.messages.with_raw_response.create(**REQUEST, betas=betas)
        assert raw.headers["x-quickstep-ignored"] == f"anthropic-beta={betas[-1]}"


def test_what_is_our_fault_is_typed_as_well(
    client: anthropic.Anthropic, engine: FakeEngine
) -> None:
    engine.script = Script(FinishReason.ERROR, error="the logits are NaN")
    with pytest.raises(anthropic.InternalServerError, match="NaN"):
        client.messages.create(**REQUEST)
    with pytest.raises(anthropic.APIStatusError, match="NaN"):
        list(client.messages.create(**REQUEST, stream=True))
    engine.script = Script(raises=EngineError("the engine has stopped"))
    with pytest.raises(anthropic.APIStatusError) as gone:
        client.messages.create(**REQUEST)
    assert gone.value.body["error"]["type"] == "overloaded_error"
    assert gone.value.status_code == 529
