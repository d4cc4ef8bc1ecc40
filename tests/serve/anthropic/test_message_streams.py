"""Streams of responses and messages: their order, and that they add up to the whole answer."""

import asyncio
import itertools
import json
from typing import Any

import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine, FakeTemplate, Script
from hypothesis import given
from hypothesis import strategies as st
from route_calls import ANTHROPIC, RESPONSES, events

from quickstep.server.app import create_app
from quickstep.server.generate.message import partial_object
from quickstep.text.tool_calls.formats import formats_of
from quickstep.types import FinishReason

TEMPLATE = "{% for tool in tools %}<tool_call>{% endfor %}{{ '<think></think>' }}"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "São Paulo"}}\n</tool_call>'
REGEX, FORMAT = "structured_outputs.regex", "output_config.format.schema"
THOUGHTS = "<think>So, weather.</think>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {
        "input": "hi",
        "store": False,
        "tools": [{"type": "function", "name": "get_weather", "parameters": SCHEMA}],
    },
    ANTHROPIC: {
        "model": "fake",
        "max_tokens": 900,
        "messages": MESSAGES,
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
    },
}
PARTS = ("Hello ", "world", " <", CALL, CALL + "\n", "{no}", "\n", THOUGHTS, "é ✓")


def answers(path: str, script: Script) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """The whole answer, and the events of the stream of the same text."""

    async def run() -> Any:
        engine = FakeEngine(script=script)
        engine.chat_template = FakeTemplate(formats_of(TEMPLATE))
        async with client_of(create_app(engine)) as client:
            whole = await client.post(path, json=BODIES[path])
            stream = await client.post(path, json={**BODIES[path], "stream": True})
            return whole.json(), stream.text

    whole, text = asyncio.run(run())
    told = [(name, json.loads(data)) for name, data in events(text)]
    assert all(name == data["type"] for name, data in told)
    return whole, told


def bare(content: Any) -> Any:
    """Without the ids, which no two answers share."""
    if isinstance(content, list):
        return [bare(one) for one in content]
    if not isinstance(content, dict):
        return content
    times = ("id", "call_id", "created_at", "completed_at")
    return {name: bare(value) for name, value in content.items() if name not in times}


def assembled_message(told: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What Anthropic's events add up to."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for name, data in told:
        if name == "message_start":
            message = data["message"]
        elif name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(data["content_block"])
        elif name == "content_block_delta":
            block, delta = message["content"][data["index"]], data["delta"]
            if delta["type"] == "input_json_delta":
                inputs[data["index"]] = inputs.get(data["index"], "") + delta["partial_json"]
                block["input"] = partial_object(inputs[data["index"]])
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
        elif name == "message_delta":
            message |= data["delta"]
            message["usage"] |= data["usage"]
    return message


def assembled_items(told: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the deltas of OpenAI's events add up to, item by item."""
    items: list[dict[str, Any]] = []
    for name, data in told:
        if name == "response.output_item.added":
            assert data["output_index"] == len(items)
            items.append(data["item"])
        elif name == "response.content_part.added":
            items[data["output_index"]]["content"].append(data["part"])
        elif name.endswith("text.delta"):
            items[data["output_index"]]["content"][data["content_index"]]["text"] += data["delta"]
        elif name.endswith("arguments.delta"):
            items[data["output_index"]]["arguments"] += data["delta"]
        elif name == "response.output_item.done":
            items[data["output_index"]]["status"] = data["item"]["status"]
            assert items[data["output_index"]] == data["item"]
    return items


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    text = "".join(draw(st.lists(st.sampled_from(PARTS), max_size=5)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    words = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    reason = draw(st.sampled_from([FinishReason.EOS, FinishReason.CONTEXT_LIMIT]))
    return Script(words=tuple(words), reason=reason)


@given(scripts())
def test_anthropics_events_add_up_to_the_whole_message(script: Script) -> None:
    whole, told = answers(ANTHROPIC, script)
    assert bare(assembled_message(told)) == bare(whole)


@given(scripts())
def test_openais_events_add_up_to_the_whole_response(script: Script) -> None:
    whole, told = answers(RESPONSES, script)
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    assert bare(told[-1][1]["response"]) == bare(whole)
    assert assembled_items(told) == told[-1][1]["response"]["output"]
    cut = script.reason is FinishReason.CONTEXT_LIMIT
    assert whole["status"] == ("incomplete" if cut else "completed")


SAID = Script(words=(THOUGHTS, "Let me see.\n", CALL))


def test_anthropics_events_come_in_its_order() -> None:
    whole, told = answers(ANTHROPIC, SAID)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in told] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_delta"),  # the signature
        *("content_block_stop", *block * 2, "message_delta", "message_stop"),
    ]  # fmt: skip
    assert [one["type"] for one in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"city": "São Paulo"}
    assert whole["content"][2]["id"].startswith("toolu_")
    assert whole["stop_reason"] == "tool_use"
    assert told[0][1]["message"]["stop_reason"] is None


def test_openais_events_come_in_its_order() -> None:
    whole, told = answers(RESPONSES, SAID)

    def item(*inner: str) -> list[str]:
        return ["output_item.added", *inner, "output_item.done"]

    def part(kind: str) -> list[str]:
        return item("content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done")

    call = item("function_call_arguments.delta", "function_call_arguments.done")
    order = [*part("reasoning_text"), *part("output_text"), *call]
    names = [name.removeprefix("response.") for name, _ in told]
    assert names == ["created", "in_progress", *order, "completed"]
    assert [one["type"] for one in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["output"][2]["arguments"] == '{"city": "São Paulo"}'
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] >= 1


@pytest.mark.parametrize(
    ("reason", "stop_reason"),
    [
        (FinishReason.EOS, "end_turn"),
        (FinishReason.STOP_TOKEN, "end_turn"),
        (FinishReason.CONTEXT_LIMIT, "model_context_window_exceeded"),
        (FinishReason.REPETITION, "max_tokens"),
        (FinishReason.DEADLINE, "max_tokens"),
    ],
)
def test_every_end_has_anthropics_name(reason: FinishReason, stop_reason: str) -> None:
    whole, _ = answers(ANTHROPIC, Script(reason=reason))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (stop_reason, None)


def test_a_stop_sequence_is_named() -> None:
    script = Script(reason=FinishReason.STOP_STRING, stop_reason="###")
    whole, _ = answers(ANTHROPIC, script)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "###")


def test_an_error_is_the_last_event_of_anthropics_stream() -> None:
    script = Script(reason=FinishReason.ERROR, error="the logits are NaN")
    whole, told = answers(ANTHROPIC, script)
    error = {"type": "error", "error": {"type": "api_error", "message": "the logits are NaN"}}
    assert told[-1] == ("error", error)
    assert whole == error


def test_an_empty_answer_is_an_empty_message() -> None:
    whole, told = answers(RESPONSES, Script(words=("",)))
    assert [part["text"] for part in whole["output"][0]["content"]] == [""]
    assert assembled_items(told) == told[-1][1]["response"]["output"]


def test_sealed_reasoning_comes_back_as_it_was() -> None:
    async def run() -> tuple[dict[str, Any], FakeEngine]:
        engine = FakeEngine(script=Script(words=(THOUGHTS, "Hi")))
        engine.chat_template = FakeTemplate(formats_of(TEMPLATE))
        sealing = {**BODIES[RESPONSES], "include": ["reasoning.encrypted_content"]}
        async with client_of(create_app(engine)) as client:
            first = (await client.post(RESPONSES, json=sealing)).json()
            kept = {**first["output"][0], "content": []}
            again = await client.post(RESPONSES, json={"input": [kept, {**MESSAGES[0]}]})
            assert again.status_code == 200, again.text
            return first, engine

    first, engine = asyncio.run(run())
    assert first["output"][0]["content"][0]["text"] == "So, weather."
    assert first["output"][0]["encrypted_content"] != "So, weather."
    assert len(engine.submitted) == 2


REFUSED = Script(
    words=("a",), reason=FinishReason.REFUSED, error="the grammar cannot be followed: too large"
)


def test_a_grammar_that_fails_late_is_the_clients_in_every_api() -> None:
    schema: dict[str, Any] = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    said: dict[str, Any] = {"model": "fake", "messages": MESSAGES}
    config = {"format": {"type": "json_schema", "schema": schema}}
    bodies: dict[str, tuple[dict[str, Any], str]] = {
        CHAT: ({**said, "structured_outputs": {"json": schema}}, "structured_outputs.json"),
        COMPLETIONS: ({"prompt": "a", "structured_outputs": {"regex": "a+"}}, REGEX),
        RESPONSES: ({"input": "hi", "store": False, "text": text}, "text.format.schema"),
        ANTHROPIC: ({**said, "max_tokens": 9, "output_config": config}, FORMAT),
    }

    async def run() -> None:
        async with client_of(create_app(FakeEngine(script=REFUSED))) as client:
            for path, (body, field) in bodies.items():
                refused = await client.post(path, json=body)
                message = f"{field} cannot be followed: too large"
                assert refused.status_code == 400
                assert refused.json()["error"]["message"] == message
                stream = await client.post(path, json={**body, "stream": True})
                assert stream.status_code == 200
                assert message in stream.text.strip().removesuffix("data: [DONE]")
                if path in (CHAT, COMPLETIONS):
                    assert refused.json()["error"]["param"] == field
                    assert refused.text in stream.text

    asyncio.run(run())


def test_fields_that_forbid_every_token_are_named() -> None:
    async def run() -> dict[str, Any]:
        script = Script(reason=FinishReason.REFUSED, error="no token is left")
        async with client_of(create_app(FakeEngine(script=script))) as client:
            body = {"prompt": "a", "allowed_token_ids": [5], "logit_bias": {"5": -100}}
            refused = await client.post(COMPLETIONS, json=body)
            assert refused.status_code == 400
            error: dict[str, Any] = refused.json()["error"]
            return error

    assert asyncio.run(run())["param"] == "allowed_token_ids"


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ('{"a": [1, {"b": "]"}]}', {"a": [1, {"b": "]"}]}),
        ('{"a": "x", "b": "cu', {"a": "x"}),
        ('{"a": {"b": 1, "c"', {"a": {"b": 1}}),
        ('{"a": [true, fal', {"a": [True]}),
        ('{"a": "x\\', {}),
        ("{", {}),
        ("", {}),
        ("[1]", {}),
        ("oops", {}),
    ],
)
def test_arguments_that_were_cut_keep_the_members_that_are_there(
    text: str, members: dict[str, Any]
) -> None:
    assert partial_object(text) == members


CUT = Script(words=(CALL[: CALL.index("Paulo")],), reason=FinishReason.MAX_TOKENS)


def test_a_call_that_the_limit_cut_is_a_call_with_what_there_is_on_every_api() -> None:
    whole, told = answers(ANTHROPIC, CUT)
    assert [one["type"] for one in whole["content"]] == ["tool_use"]
    assert whole["stop_reason"] == "max_tokens"
    said = [data["delta"] for name, data in told if name == "content_block_delta"]
    assert [one["type"] for one in said] == ["input_json_delta"]
    assert said[0]["partial_json"] == '{"city": "São '
    whole, told = answers(RESPONSES, CUT)
    assert whole["status"] == "incomplete"
    (item,) = whole["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    assert item["arguments"] == '{"city": "São '
    (done,) = [data for name, data in told if name.endswith("arguments.done")]
    assert done["arguments"] == item["arguments"]
