"""Answers and events against the official clients' own models, strictly: no value is converted.

What the models leave optional and the published schema of open responses requires is in a list.
"""

import json
from typing import Any

import anthropic.types
import openai.types
import openai.types.chat
import openai.types.responses
import pydantic
import pytest
from client import CHAT, COMPLETIONS, MESSAGES
from fake_engine import FakeEngine, FakeTemplate, Script
from openai.types.responses.response_stream_event import ResponseStreamEvent
from route_calls import ANTHROPIC, COUNT_TOKENS, RESPONSES, events, post_to, saying

from quickstep.text.tool_calls.formats import formats_of
from quickstep.types import FinishReason

CALL = '<tool_call>{"name": "find_it", "arguments": {"a": 1}}</tool_call>'
RESPONSES_TOOL = {"type": "function", "name": "find_it", "parameters": None, "strict": None}
ANTHROPIC_TOOL = {"name": "find_it", "input_schema": {"type": "object"}}
LOGPROBS = ["message.output_text.logprobs"]
REQUIRED_OF_A_RESPONSE = (
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
)
ENDS = (
    FinishReason.EOS,
    FinishReason.MAX_TOKENS,
    FinishReason.CONTEXT_LIMIT,
    FinishReason.DEADLINE,
    FinishReason.ABORTED,
)


def saying_all() -> FakeEngine:
    """Reasoning, text and a call."""
    template = FakeTemplate(formats_of("{{ tools }}<tool_call>{{ message.tool_calls }}</think>"))
    engine = FakeEngine(chat_template=template)
    engine.script = saying(f"<think>hm</think>Let me see.{CALL}")
    return engine


def ending(reason: FinishReason) -> FakeEngine:
    return FakeEngine(script=Script(reason))


def check(model: Any, content: object) -> None:
    """Valid without conversions, and without a field that the model does not know of."""
    pydantic.TypeAdapter(model).validate_json(json.dumps(content), strict=True)


def response_body(**fields: Any) -> dict[str, Any]:
    return {"input": "hi", "include": LOGPROBS, "tools": [RESPONSES_TOOL], **fields}


def message_body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "max_tokens": 500,
        "messages": MESSAGES,
        "tools": [ANTHROPIC_TOOL],
        **fields,
    }


def test_a_response_has_every_field_that_its_schema_requires() -> None:
    response = post_to(
        RESPONSES, response_body(presence_penalty=0.5, frequency_penalty=-0.25), saying_all()
    ).json()
    check(openai.types.responses.Response, response)
    assert [name for name in REQUIRED_OF_A_RESPONSE if name not in response] == []
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0.5, -0.25)
    assert response["tools"] == [{**RESPONSES_TOOL, "description": None}]
    kinds = {item["type"]: set(item) for item in response["output"]}
    assert kinds["reasoning"] >= {"id", "summary", "content", "encrypted_content", "status"}
    assert kinds["message"] >= {"id", "role", "content", "status"}
    assert kinds["function_call"] >= {"id", "call_id", "name", "arguments", "status"}


@pytest.mark.parametrize("reason", ENDS)
def test_a_response_is_valid_however_it_ended(reason: FinishReason) -> None:
    response = post_to(RESPONSES, response_body(), ending(reason)).json()
    check(openai.types.responses.Response, response)
    assert (response["incomplete_details"] is None) == (response["status"] == "completed")


def test_every_event_of_a_response_is_valid_and_carries_a_whole_response() -> None:
    told = events(post_to(RESPONSES, response_body(stream=True), saying_all()).text)
    assert len(told) > 10
    for name, data in told:
        content = json.loads(data)
        check(ResponseStreamEvent, content)
        assert content["type"] == name
        if "response" in content:
            missing = [key for key in REQUIRED_OF_A_RESPONSE if key not in content["response"]]
            assert missing == []


@pytest.mark.parametrize("reason", ENDS)
def test_a_message_is_valid_however_it_ended(reason: FinishReason) -> None:
    check(anthropic.types.Message, post_to(ANTHROPIC, message_body(), ending(reason)).json())


def test_a_message_has_every_field_that_its_schema_requires() -> None:
    message = post_to(ANTHROPIC, message_body(), saying_all()).json()
    check(anthropic.types.Message, message)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    known = {"id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"}
    assert set(message) >= known | {"container"}
    usage = {"input_tokens", "output_tokens", "cache_creation_input_tokens", "server_tool_use"}
    assert set(message["usage"]) >= usage | {"cache_read_input_tokens", "cache_creation"}
    counted = post_to(COUNT_TOKENS, {"model": "fake", "messages": MESSAGES}).json()
    check(anthropic.types.MessageTokensCount, counted)


def test_every_event_of_a_message_is_valid() -> None:
    told = events(post_to(ANTHROPIC, message_body(stream=True), saying_all()).text)
    for name, data in told:
        if name != "ping":  # which the client's models leave out
            check(anthropic.types.RawMessageStreamEvent, json.loads(data))


MARK = {"cache_control": {"type": "ephemeral"}}
MARKED: list[dict[str, Any]] = [
    MARK,
    {"system": [{"type": "text", "text": "Be brief.", **MARK}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **MARK}]}]},
    {"tools": [{**ANTHROPIC_TOOL, **MARK}]},
]


@pytest.mark.parametrize("marked", MARKED)
@pytest.mark.parametrize("num_cached", [0, 8])
def test_a_marked_prefix_counts_what_the_cache_read_and_what_it_added(
    marked: dict[str, Any], num_cached: int
) -> None:
    engine = FakeEngine(num_cached_tokens=num_cached)
    usage = post_to(ANTHROPIC, message_body(**marked), engine).json()["usage"]
    num_prompt = len(engine.submitted[0].prompt)
    num_whole = (num_prompt - 1) // engine.block_size * engine.block_size
    assert usage["cache_read_input_tokens"] == num_cached
    assert usage["cache_creation_input_tokens"] == num_whole - num_cached
    assert usage["input_tokens"] == num_prompt - num_whole


def test_without_a_mark_nothing_was_added_to_the_cache_on_demand() -> None:
    engine = FakeEngine()
    usage = post_to(ANTHROPIC, message_body(), engine).json()["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] + 3 == len(engine.submitted[0].prompt)


def test_chat_and_completions_are_valid() -> None:
    tool = {"type": "function", "function": {"name": "find_it"}}
    chat = {"messages": MESSAGES, "tools": [tool], "logprobs": True, "top_logprobs": 2}
    check(openai.types.chat.ChatCompletion, post_to(CHAT, chat, saying_all()).json())
    text = post_to(COMPLETIONS, {"prompt": "a", "logprobs": 2}).json()
    check(openai.types.Completion, text)
    streamed = post_to(CHAT, {**chat, "stream": True}, saying_all()).text
    for line in streamed.splitlines():
        if line.startswith("data: {"):
            check(openai.types.chat.ChatCompletionChunk, json.loads(line.removeprefix("data: ")))
