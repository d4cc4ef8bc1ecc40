"""Fields without effect: dropped or accepted, reported in a header and once per client in the log,
refused where the operator wants it so.

Every hint of every schema is tried in `test_request_fields`; here is what is around them.
"""

import asyncio
import logging
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine, Script
from route_calls import ANTHROPIC, COUNT_TOKENS, RESPONSES

from quickstep.server.app import create_app
from quickstep.server.fields.field_reader import take_out_unknown
from quickstep.server.openai.request_types import ChatRequest
from quickstep.server.options import FieldRules, ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

REPORT = ServerOptions()
REFUSE = ServerOptions(field_rules=FieldRules(refuse_unknown=True))
STRICT = ServerOptions(field_rules=FieldRules(refuse_unknown=True, refuse_hints=True))
IGNORED = "x-quickstep-ignored"
OF_ROUTE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "a"},
    RESPONSES: {"input": "hi"},
    ANTHROPIC: {"model": "fake", "max_tokens": 50, "messages": MESSAGES},
    COUNT_TOKENS: {"model": "fake", "messages": MESSAGES},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "a"},
    "/apply-template": {"messages": MESSAGES},
    "/completion": {"prompt": "a"},
    "/api/chat": {"model": "fake", "messages": MESSAGES},
    "/api/generate": {"model": "fake", "prompt": "a"},
    "/api/embed": {"model": "fake", "input": "a"},
    "/api/embeddings": {"model": "fake", "prompt": "a"},
    "/api/show": {"model": "fake"},
}
CHAT_TOOL = {"type": "function", "function": {"name": "find_it"}}
RESPONSES_TOOL = {"type": "function", "name": "find_it", "parameters": None, "strict": None}
ANTHROPIC_TOOL = {"name": "find_it", "input_schema": {"type": "object"}}


def post(
    path: str,
    body: dict[str, Any],
    options: ServerOptions = REPORT,
    engine: FakeEngine | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine(), options)) as client:
            return await client.post(path, json={**OF_ROUTE[path], **body}, headers=headers)

    return asyncio.run(run())


def ignored(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [name for name in response.headers.get(IGNORED, "").split(", ") if name]


UNKNOWN: tuple[tuple[str, dict[str, Any], list[str], str], ...] = (
    (COMPLETIONS, {"repetition_penalti": 2}, ["repetition_penalti"], "repetition_penalti"),
    (COMPLETIONS, {"x": [{}], "y": 1}, ["x", "y"], "x"),
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": "a", "mood": "glad"},
                {"role": "assistant", "content": [{"type": "text", "text": "b", "z": 1}]},
                {"role": "user", "content": "c", "mood": "sad"},
            ],
            "response_format": {"type": "text", "deep": {"er": 1}},
        },
        ["messages[].mood", "messages[].content[].z", "response_format.deep"],
        "messages[0].mood",
    ),
    (CHAT, {"tools": [{**CHAT_TOOL, "cost": 2}]}, ["tools[].cost"], "tools[0].cost"),
    (
        RESPONSES,
        {
            "input": [
                {
                    "type": "function_call",
                    "call_id": "c",
                    "name": "f",
                    "arguments": "{}",
                    "mood": 1,
                },
                {"role": "user", "content": [{"type": "input_text", "text": "hi", "lang": "en"}]},
            ],
            "tools": [{**RESPONSES_TOOL, "parameters": {"x-own": 1}, "cost": 2}],
        },
        ["input[].mood", "input[].content[].lang", "tools[].cost"],
        "input[0].mood",
    ),
    (
        ANTHROPIC,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "lang": "en"}]}
            ],
            "tools": [{**ANTHROPIC_TOOL, "cost": 2}],
        },
        ["messages[].content[].lang", "tools[].cost"],
        "messages[0].content[0].lang",
    ),
)


@pytest.mark.parametrize(("path", "body", "names", "first"), UNKNOWN)
def test_unknown_fields_are_dropped_and_reported_or_refused(
    path: str, body: dict[str, Any], names: list[str], first: str
) -> None:
    assert ignored(post(path, body)) == names
    error = post(path, body, REFUSE).json()["error"]
    assert error["message"].startswith(f"{first} is unknown")


def test_known_fields_are_honoured_and_checked_beside_unknown_ones() -> None:
    engine = FakeEngine()
    post(COMPLETIONS, {"top_k": 7, "?": 1}, engine=engine)
    assert engine.submitted[0].sampling.top_k == 7
    wrong = post(COMPLETIONS, {"top_k": "7", "?": 1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "top_k")
    assert IGNORED not in post(COMPLETIONS, {}).headers


def test_an_unknown_field_that_is_null_is_not_given() -> None:
    assert ignored(post(CHAT, {"x": None})) == []


def test_the_report_of_many_fields_is_bounded() -> None:
    reported = ignored(post(COMPLETIONS, {f"x{number}": 1 for number in range(9000)}))
    assert reported[:2] == ["x0", "x1"]
    assert len(reported) == 64


def test_the_walk_visits_each_part_of_a_body_once() -> None:
    """Fields of the same name in many items are one path, and what is open is left alone."""
    schema = {"type": "object", "properties": {"x": {"y": 1}}}
    content = {
        "messages": [{"role": "user", "content": "a", f"x{at % 3}": 1} for at in range(3000)],
        "structured_outputs": {"json": schema},
        "tools": [{"any": 1}],
    }
    found = take_out_unknown(content, ChatRequest)
    assert found == ["messages[0].x0", "messages[1].x1", "messages[2].x2"]
    assert content["messages"] == [{"role": "user", "content": "a"}] * 3000
    assert content["structured_outputs"] == {"json": schema}
    assert content["tools"] == [{"any": 1}]


def test_names_that_no_header_may_hold_are_escaped() -> None:
    response = post(COMPLETIONS, {"größe\r\nx-evil: 1": 1})
    assert "x-evil" not in response.headers
    assert "\n" not in response.headers[IGNORED]


@pytest.mark.parametrize("path", OF_ROUTE)
def test_every_route_reports_in_its_answer_and_in_its_errors(path: str) -> None:
    assert ignored(post(path, {"colour": 1})) == ["colour"]
    assert post(path, {"colour": 1}, REFUSE).status_code == 400


@pytest.mark.parametrize(
    "path", [CHAT, COMPLETIONS, RESPONSES, ANTHROPIC, "/completion", "/api/chat"]
)
def test_a_stream_reports_as_well(path: str) -> None:
    assert ignored(post(path, {"stream": True, "colour": 1})) == ["colour"]


def test_the_engines_refusal_reports_what_was_ignored() -> None:
    response = post(CHAT, {"colour": 1, "messages": [{"role": "user", "content": "a" * 5000}]})
    assert (response.status_code, response.headers[IGNORED]) == (400, "colour")


def test_the_log_names_an_ignored_field_once_per_client(caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys((f"ann={'A' * 16}", f"bob={'B' * 16}"))

    async def run() -> None:
        app = create_app(FakeEngine(), ServerOptions(api_keys=keys))
        async with client_of(app) as client:
            for key in ("A" * 16, "A" * 16, "B" * 16):
                body = {"prompt": "a", "colour": 1}
                await client.post(COMPLETIONS, json=body, headers={"x-api-key": key})

    with caplog.at_level(logging.WARNING, "quickstep.server"):
        asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records if "colour" in record.getMessage()]
    assert [line.split(" of ")[1].split()[0] for line in lines] == ["ann", "bob"]


CONDITIONAL: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (RESPONSES, {"reasoning": {"effort": "minimal"}}, "reasoning.effort"),
    (RESPONSES, {"text": {"verbosity": "high"}}, "text.verbosity"),
    (RESPONSES, {"include": ["web_search_call.results"]}, "include[]"),
    (ANTHROPIC, {"output_config": {"effort": "max"}}, "output_config.effort"),
    (ANTHROPIC, {"thinking": {"type": "adaptive"}}, "thinking"),
    (ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": 20}}, "thinking"),
    (ANTHROPIC, {"thinking": {"type": "between_tools"}}, "thinking"),
    ("/api/chat", {"think": True}, "think"),
    ("/api/generate", {"think": "high"}, "think"),
]


@pytest.mark.parametrize(("path", "body", "name"), CONDITIONAL)
def test_a_hint_that_the_model_lacks_is_reported_and_with_strict_refused(
    path: str, body: dict[str, Any], name: str
) -> None:
    engine, plain = FakeEngine(), FakeEngine()
    assert ignored(post(path, body, engine=engine)) == [name]
    post(path, {}, engine=plain)
    assert engine.submitted == plain.submitted
    refused = post(path, body, STRICT)
    assert refused.status_code == 400
    assert "has no effect" in refused.text


SERVER_TOOLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"type": "web_search"}, CHAT_TOOL),
    (CHAT, {"type": "custom", "custom": {"name": "x", "format": {"type": "text"}}}, CHAT_TOOL),
    (RESPONSES, {"type": "web_search_preview"}, RESPONSES_TOOL),
    (RESPONSES, {"type": "code_interpreter", "container": {"type": "auto"}}, RESPONSES_TOOL),
    (RESPONSES, {"type": "custom", "name": "x", "format": {"type": "grammar"}}, RESPONSES_TOOL),
    (ANTHROPIC, {"type": "bash_20250124", "name": "bash"}, ANTHROPIC_TOOL),
    (COUNT_TOKENS, {"type": "web_search_20250305", "name": "web_search"}, ANTHROPIC_TOOL),
    ("/apply-template", {"type": "web_search"}, CHAT_TOOL),
]


@pytest.mark.parametrize(("path", "tool", "own"), SERVER_TOOLS)
def test_a_tool_that_the_client_does_not_run_is_left_out_of_the_prompt_and_reported(
    path: str, tool: dict[str, Any], own: dict[str, Any]
) -> None:
    prompts = []
    for tools in ([tool, own], [own]):
        engine = FakeEngine()
        response = post(path, {"tools": tools}, engine=engine)
        assert ignored(response) == ([f"tools[{tool['type']}]"] if len(tools) > 1 else [])
        assert engine.chat_template is not None
        prompts.append(engine.chat_template.texts)
    assert prompts[0] == prompts[1]
    assert post(path, {"tools": [tool, own]}, STRICT).status_code == 400


DEMANDED: list[tuple[str, dict[str, Any], Any]] = [
    (CHAT, {"type": "web_search"}, "required"),
    (
        CHAT,
        {"type": "custom", "custom": {"name": "x"}},
        {"type": "custom", "custom": {"name": "x"}},
    ),
    (RESPONSES, {"type": "web_search_preview"}, {"type": "web_search_preview"}),
    (RESPONSES, {"type": "web_search_preview"}, "required"),
    (ANTHROPIC, {"type": "bash_20250124", "name": "bash"}, {"type": "tool", "name": "bash"}),
    (ANTHROPIC, {"type": "bash_20250124", "name": "bash"}, {"type": "any"}),
]


@pytest.mark.parametrize(("path", "tool", "choice"), DEMANDED)
def test_a_choice_that_demands_a_tool_that_is_left_out_is_400(
    path: str, tool: dict[str, Any], choice: Any
) -> None:
    response = post(path, {"tools": [tool], "tool_choice": choice})
    assert response.status_code == 400
    assert "tool_choice" in response.json()["error"]["message"]


def test_the_responses_answer_lists_the_tools_that_the_model_was_shown() -> None:
    tools = [{"type": "web_search_preview"}, RESPONSES_TOOL]
    shown = post(RESPONSES, {"tools": tools}).json()["tools"]
    assert shown == [{**RESPONSES_TOOL, "description": None}]


def test_betas_are_reported_unless_they_ask_for_what_is_here() -> None:
    betas = {"anthropic-beta": "prompt-caching-2024-07-31,computer-use-2025-01-24"}
    reported = ["anthropic-beta=computer-use-2025-01-24"]
    assert ignored(post(ANTHROPIC, {}, headers=betas)) == reported
    assert post(ANTHROPIC, {}, STRICT, headers=betas).status_code == 400


ONE_OF = {"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 9}]}
LOOSENED: list[tuple[str, dict[str, Any], str]] = [
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": ONE_OF},
            }
        },
        "response_format.json_schema.schema.oneOf",
    ),
    (COMPLETIONS, {"structured_outputs": {"json": ONE_OF}}, "structured_outputs.json.oneOf"),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": ONE_OF}}},
        "text.format.schema.oneOf",
    ),
    (
        ANTHROPIC,
        {"output_config": {"format": {"type": "json_schema", "schema": ONE_OF}}},
        "output_config.format.schema.oneOf",
    ),
    ("/completion", {"json_schema": ONE_OF}, "json_schema.oneOf"),
    ("/api/generate", {"format": ONE_OF}, "format.oneOf"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "name"), LOOSENED)
def test_a_keyword_that_the_engine_loosens_is_reported_and_with_strict_refused(
    path: str, body: dict[str, Any], name: str, stream: bool
) -> None:
    engine = FakeEngine(script=Script(ignored=("oneOf",)))
    sent = {**body, "stream": stream, "colour": 1}
    assert ignored(post(path, sent, engine=engine)) == ["colour", name]
    refused = post(path, {**body, "stream": stream}, STRICT, engine)
    assert refused.status_code == 400
    assert f'"{name} is enforced less strictly' in refused.text
    assert not engine.open_streams
