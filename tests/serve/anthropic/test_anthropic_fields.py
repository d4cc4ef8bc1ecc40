"""`/v1/messages`: values that are refused with their paths, and what its blocks become.

Each field alone is tried in `test_request_fields`.
"""

from typing import Any

import httpx
import pytest
from client import MESSAGES
from fake_engine import FakeEngine, FakeTemplate
from route_calls import ANTHROPIC, COUNT_TOKENS, post_to

from quickstep.text.tool_calls.formats import formats_of

TOOL = {"name": "find_it", "input_schema": {"type": "object"}}
JSON_OUTPUT = {"format": {"type": "json_schema", "schema": {"type": "array"}}}


def post(fields: dict[str, Any], engine: FakeEngine | None = None) -> httpx.Response:
    body = {"model": "fake", "max_tokens": 50, "messages": MESSAGES, **fields}
    return post_to(ANTHROPIC, body, engine)


def refusal_of(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    return str(body["error"]["message"])


def turn(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    turns = [{"role": role, "content": list(blocks)}]
    return {"messages": turns if role == "user" else [*turns, *MESSAGES]}


TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is an empty list"),
    ({"messages": [{"role": "assistant", "content": [USE]}]}, "messages[0] calls a tool"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    (turn("user", {"type": "image", "source": {}}), "messages[0].content[0] is of type image"),
    (turn("user", {"type": "document"}), "messages[0].content[0].source is missing"),
    (turn("user", {"type": "search_result"}), "messages[0].content[0].content is missing"),
    (turn("user", {"type": "video"}), "messages[0].content[0].type"),
    (turn("user", USE), "messages[0].content[0].type"),
    (
        turn("user", {**TEXT, "cache_control": {"type": "forever"}}),
        "messages[0].content[0].cache_control.type",
    ),
    (
        turn("user", {**RESULT, "content": [{"type": "image"}]}),
        "messages[0].content[0].content[0] is of type image",
    ),
    (turn("user", {**RESULT, "toolset_name": "s"}), "messages[0].content[0].toolset_name"),
    (turn("assistant", RESULT), "messages[0].content[0].type"),
    (turn("assistant", {**USE, "input": "{}"}), "messages[0].content[0].input"),
    (
        turn("assistant", {**USE, "caller": {"type": "code_execution"}}),
        "messages[0].content[0].caller",
    ),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "allowed_callers": ["x"]}]}, "tools[0].allowed_callers"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name find_it is listed twice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call, but tools is empty"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "no tool is named 'g'"),
    ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"temperature": 1.5}, "temperature is 1.5, it must be between 0 and 1"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17 entries"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id has 513 characters"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_what_cannot_be_honoured_is_400_with_its_path(fields: dict[str, Any], message: str) -> None:
    engine = FakeEngine()
    assert message in refusal_of(post(fields, engine))
    assert not engine.submitted


def test_blocks_become_the_messages_that_templates_read() -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {**USE, "input": {"city": "São Paulo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {**RESULT, "content": "20"},
                {**RESULT, "content": [TEXT], "is_error": True},
                {"type": "text", "text": "And"},
                {"type": "text", "text": "now?"},
            ],
        },
    ]
    engine = FakeEngine()
    response = post({"messages": turns, "system": "Be brief."}, engine)
    assert response.status_code == 200, response.text
    prompt = bytes(engine.submitted[0].prompt).decode()
    assert prompt.startswith(
        "system: Be brief.\nuser: hi\nassistant: Let me see.\n"
        "tool: 20\ntool: Error: x\nuser: And\nnow?\n"
    )
    assert """'arguments': '{"city": "São Paulo"}'""" in prompt


def rendered(formats: str, **fields: Any) -> tuple[httpx.Response, str]:
    engine = FakeEngine()
    engine.chat_template = FakeTemplate(formats_of("{{ tools }}" + formats))
    response = post(fields, engine)
    prompts = [bytes(item.prompt).decode() for item in engine.submitted]
    return response, "".join(prompts)


def test_thinking_is_turned_on_and_off_in_the_template() -> None:
    assert "enable_thinking=True" in rendered("</think>", thinking={"type": "adaptive"})[1]
    assert "enable_thinking=False" in rendered("</think>", thinking={"type": "disabled"})[1]
    assert "enable_thinking=False" in rendered("</think>", output_config={"effort": "none"})[1]
    harmony = rendered("<|channel|>analysis", output_config={"effort": "low"})
    assert "reasoning_effort=low" in harmony[1]


def test_a_budget_bounds_the_reasoning() -> None:
    engine = FakeEngine()
    engine.chat_template = FakeTemplate(formats_of("{{ tools }}</think>"))
    budget = {"type": "enabled", "budget_tokens": 20}
    assert post({"thinking": budget}, engine).status_code == 200
    assert "enable_thinking=True" in bytes(engine.submitted[0].prompt).decode()
    sampling = engine.submitted[0].sampling
    assert sampling.thinking_budget == 20
    assert sampling.reasoning_tags == ("<think>", "</think>")


@pytest.mark.parametrize("budget", [0, -1, 50])
def test_a_budget_is_less_than_the_whole_answer(budget: int) -> None:
    thinking = {"type": "enabled", "budget_tokens": budget}
    message = refusal_of(rendered("</think>", thinking=thinking)[0])
    assert message == (
        f"thinking.budget_tokens is {budget}, it must be between 1 and max_tokens - 1 (49)"
    )


def test_a_kind_of_thinking_that_does_not_exist_is_refused() -> None:
    assert "thinking.type" in refusal_of(rendered("</think>", thinking={"type": "forever"})[0])


def test_thinking_and_effort_may_be_given_together() -> None:
    response, prompt = rendered(
        "</think>", thinking={"type": "adaptive"}, output_config={"effort": "high"}
    )
    assert "x-quickstep-ignored" not in response.headers
    assert "enable_thinking=True" in prompt


def test_no_budget_without_tags() -> None:
    thinking = {"type": "enabled", "budget_tokens": 20}
    harmony = rendered("<|channel|>analysis", thinking=thinking)[0]
    assert harmony.headers["x-quickstep-ignored"] == "thinking.budget_tokens"


def test_a_budget_bounds_the_reasoning_before_a_grammar() -> None:
    thinking = {"type": "enabled", "budget_tokens": 20}
    engine = FakeEngine()
    engine.chat_template = FakeTemplate(formats_of("{{ tools }}</think>"))
    body = {"thinking": thinking, "output_config": JSON_OUTPUT}
    assert post(body, engine).status_code == 200
    sampling = engine.submitted[0].sampling
    assert sampling.thinking_budget == 20
    assert sampling.reasoning_tags == ("<think>", "</think>")
    assert sampling.grammar is not None


@pytest.mark.parametrize(
    ("choice", "start"),
    [
        ({"type": "any"}, "start: call ("),
        ({"type": "any", "disable_parallel_tool_use": True}, "start: call\n"),
        ({"type": "tool", "name": "find_it"}, "start: call\n"),
    ],
)
def test_a_choice_that_forces_a_call_is_a_grammar(choice: Any, start: str) -> None:
    engine = FakeEngine()
    assert post({"tools": [TOOL], "tool_choice": choice}, engine).status_code == 200
    grammar = engine.submitted[0].sampling.grammar
    assert grammar is not None
    assert grammar.text.startswith(start)


def test_no_tool_is_shown_where_none_may_be_called() -> None:
    engine = FakeEngine()
    post({"tools": [TOOL], "tool_choice": {"type": "none"}}, engine)
    assert "tool=" not in bytes(engine.submitted[0].prompt).decode()


def test_the_input_is_counted_as_it_would_be_submitted() -> None:
    fields = {"system": "Be brief.", "tools": [TOOL], "messages": MESSAGES}
    engine = FakeEngine()
    usage = post(fields, engine).json()["usage"]
    counted = post_to(COUNT_TOKENS, {"model": "fake", **fields})
    assert counted.json() == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
    }


def test_counting_refuses_what_answering_refuses() -> None:
    body = {"model": "fake", "messages": MESSAGES}
    wrong = {**body, "messages": [{"role": "user", "content": [RESULT | {"toolset_name": "s"}]}]}
    assert "toolset_name" in refusal_of(post_to(COUNT_TOKENS, wrong))
    assert "input_schema" in refusal_of(post_to(COUNT_TOKENS, {**body, "tools": [{"name": "f"}]}))


FOREIGN: list[dict[str, Any]] = [
    {"type": "redacted_thinking", "data": "zz"},
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "text_editor_code_execution_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": []},
]


def prompt_of(fields: dict[str, Any]) -> tuple[str, str]:
    """What the model reads, and what is reported as ignored."""
    engine = FakeEngine()
    response = post(fields, engine)
    assert response.status_code == 200, response.text
    (submitted,) = engine.submitted
    return bytes(submitted.prompt).decode(), response.headers.get("x-quickstep-ignored", "")


def test_what_only_another_server_can_read_is_left_out_and_reported() -> None:
    expected, _ = prompt_of(turn("assistant", TEXT))
    prompt, ignored = prompt_of(turn("assistant", *FOREIGN, TEXT))
    assert prompt == expected
    for block in FOREIGN:
        assert f"messages[].content[{block['type']}]" in ignored


@pytest.mark.parametrize("rest", ["You help.", "You help.\nx-anthropic-billing-header: kept"])
def test_a_billing_line_of_the_client_is_no_part_of_the_prompt(rest: str) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    stable = {"type": "text", "text": rest}
    expected, _ = prompt_of({"system": rest})
    for nonce in ("36ee5", "0aaa9"):
        begun = line.format(nonce)
        for system in (f"{begun}\n{rest}", [{"type": "text", "text": begun}, stable]):
            prompt, ignored = prompt_of({"system": system})
            assert prompt == expected
            assert "system[x-anthropic-billing-header]" in ignored
    assert prompt_of({"system": line})[0] == prompt_of({})[0]


DOCUMENT = {"type": "document", "title": "T", "context": "C", "citations": {"enabled": False}}
FOUND = {"type": "search_result", "title": "T", "source": "https://s", "content": [TEXT]}


def source(kind: str, **fields: Any) -> dict[str, Any]:
    return {**DOCUMENT, "source": {"type": kind, **fields}}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (source("text", media_type="text/plain", data="D\nE"), "Title: T\nContext: C\n\nD\nE"),
        (source("content", content="D"), "Title: T\nContext: C\n\nD"),
        (source("content", content=[TEXT, TEXT]), "Title: T\nContext: C\n\nx\nx"),
        ({"type": "document", "source": {"type": "text", "data": "D"}}, "D"),
        (FOUND, "Title: T\nSource: https://s\n\nx"),
    ],
)
def test_documents_and_search_results_are_text_in_messages_and_results(
    block: dict[str, Any], text: str
) -> None:
    prompt, ignored = prompt_of(turn("user", TEXT, block))
    assert f"user: x\n{text}\n" in prompt
    assert not ignored
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    assert f"tool: {text}\n" in prompt_of(turn("user", result))[0]


def test_citations_that_are_requested_are_reported() -> None:
    _, ignored = prompt_of(turn("user", {**FOUND, "citations": {"enabled": True}}))
    assert ignored == "messages[].content[].citations.enabled"


@pytest.mark.parametrize(
    ("block", "path", "says"),
    [
        (source("base64", media_type="application/pdf", data="JVBE"), ".source", "text only"),
        (source("url", url="http://x"), ".source", "outbound"),
        (source("file", file_id="file_1"), ".source", "no such files"),
        (source("content", content=[{"type": "image"}]), ".source.content[0]", "text only"),
        ({"type": "container_upload", "file_id": "file_1"}, "", "runs no tools"),
        ({"type": "image", "source": {}}, "", "text only"),
    ],
)
def test_what_is_no_text_is_400_with_its_path(block: dict[str, Any], path: str, says: str) -> None:
    response = post(turn("user", TEXT, block), FakeEngine())
    assert response.status_code == 400
    message = refusal_of(response)
    assert f"messages[0].content[1]{path} is of type " in message
    assert says in message
