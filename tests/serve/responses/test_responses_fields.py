"""`/v1/responses`: values that are refused with their paths, and what its items become.

Each field alone is tried in `test_request_fields`.
"""

from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeTemplate
from route_calls import RESPONSES, post_to

from quickstep.text.tool_calls.formats import formats_of

TOOL = {"type": "function", "name": "find_it", "parameters": None, "strict": None}
SCHEMA = {"type": "json_schema", "name": "s", "schema": {"type": "array"}}
LOGPROBS = ["message.output_text.logprobs"]


def post(fields: dict[str, Any], engine: FakeEngine | None = None) -> httpx.Response:
    return post_to(RESPONSES, {"input": "hi", **fields}, engine)


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"input": [{"type": kind, **fields}]}


def message(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts), **fields}]}


CALLED = {"call_id": "c", "name": "f", "arguments": "{}"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    (item("web_search_call", id="x"), "input[0].type"),
    (item("item_reference", id="x"), "input[0].id"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    (message({"type": "input_image", "image_url": "http://x"}), "input[0].content[0]"),
    (message({"type": "input_file", "file_id": "x"}), "input[0].content[0]"),
    (message({"type": "input_video"}), "input[0].content[0].type"),
    (item("function_call", **CALLED, caller={"type": "program"}), "input[0].caller"),
    (item("function_call", **CALLED, namespace="n"), "input[0].namespace"),
    (item("function_call_output", output="x"), "input[0].call_id"),
    (item("reasoning", encrypted_content="?"), "input[0].encrypted_content"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
    ({"tools": [{**TOOL, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "web_search_preview"}, "tools": [TOOL]}, "tool_choice"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [TOOL]},
        "tool_choice.tools",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}, "tools": [TOOL]},
        "tool_choice.mode",
    ),
    ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": SCHEMA}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"include": ["colours"]}, "include[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs"),
    ({"include": LOGPROBS, "top_logprobs": -1}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"prompt_cache_key": "x" * 513}, "prompt_cache_key"),
    ({"safety_identifier": "x" * 513}, "safety_identifier"),
    ({"temperature": -1}, "temperature"),
    ({"stream_options": {}}, "stream_options"),
    ({"previous_response_id": "resp_0"}, "previous_response_id"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_cannot_be_honoured_is_400_with_its_path(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    response = post(fields, engine)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.submitted


def seen_by_model(items: Any, **fields: Any) -> str:
    engine = FakeEngine()
    response = post({"input": items, **fields}, engine)
    assert response.status_code == 200, response.text
    return bytes(engine.submitted[0].prompt).decode()


def test_items_become_the_messages_that_templates_read() -> None:
    history = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", **CALLED},
        {"type": "function_call_output", "call_id": "c", "output": "20"},
    ]
    prompt = seen_by_model(history, instructions="You are kind.")
    assert prompt.startswith(
        "system: You are kind.\nsystem: Be brief.\nuser: hi\nassistant: Let me see.\ntool: 20\n"
    )
    assert prompt.count("assistant:") == 2  # the call is in the message before it
    assert "'name': 'f', 'arguments': '{}'" in prompt


def test_a_model_that_reasons_can_be_kept_from_it() -> None:
    engine = FakeEngine()
    engine.chat_template = FakeTemplate(formats_of("{{ tools }}</think>"))
    assert post({"reasoning": {"effort": "none"}}, engine).status_code == 200
    assert "enable_thinking=False" in bytes(engine.submitted[0].prompt).decode()


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_token_budget"])
def test_the_reasoning_can_have_a_budget(name: str) -> None:
    engine = FakeEngine()
    engine.chat_template = FakeTemplate(formats_of("{{ tools }}</think>"))
    assert post({name: 20}, engine).status_code == 200
    assert engine.submitted[0].sampling.thinking_budget == 20


def test_the_effort_reaches_gpt_oss() -> None:
    engine = FakeEngine()
    engine.chat_template = FakeTemplate(formats_of("{{ tools }}<|channel|>analysis"))
    assert post({"reasoning": {"effort": "high"}}, engine).status_code == 200
    assert "reasoning_effort=high" in bytes(engine.submitted[0].prompt).decode()
    assert "x-quickstep-ignored" not in post({"reasoning": {"effort": "low"}}, engine).headers
    lacking = post({"reasoning": {"effort": "minimal"}}, engine)
    assert lacking.headers["x-quickstep-ignored"] == "reasoning.effort"
    assert "reasoning_effort" not in bytes(engine.submitted[2].prompt).decode()


def test_a_tool_without_a_type_is_a_function() -> None:
    tool = {name: value for name, value in TOOL.items() if name != "type"}
    assert post({"tools": [tool]}).status_code == 200


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["find_it", "keep_it"]),
        ({"type": "function", "name": "keep_it"}, ["keep_it"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "find_it"}],
            },
            ["find_it"],
        ),
    ],
)
def test_a_forced_call_is_kept_to_the_tools_that_are_allowed(choice: Any, names: list[str]) -> None:
    engine = FakeEngine()
    tools = [TOOL, {**TOOL, "name": "keep_it"}]
    assert post({"tools": tools, "tool_choice": choice}, engine).status_code == 200
    grammar = engine.submitted[0].sampling.grammar
    assert grammar is not None
    assert [name for name in ("find_it", "keep_it") if name in grammar.text] == names


def test_no_tool_is_shown_where_none_may_be_called() -> None:
    assert "tool=" not in seen_by_model("hi", tools=[TOOL], tool_choice="none")


def test_logprobs_are_next_to_the_text() -> None:
    engine = FakeEngine()
    response = post({"include": LOGPROBS, "top_logprobs": 2}, engine)
    (part,) = response.json()["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
