"""For every honoured field of Anthropic's `/v1/messages` a value, and its visible effect."""

from __future__ import annotations

import msgspec
from field_effects import (
    ANY_OBJECT,
    ARRAY,
    Case,
    Cases,
    Seen,
    called,
    calling_twice,
    cases,
    constrained,
    is_forced,
    read,
    said,
    sampled,
    shown,
    thinking,
    unknown_model,
)

from quickstep.server.anthropic import request_types as schemas

TOOL = {"name": "find_it", "input_schema": ANY_OBJECT}
JSON_OUTPUT = {"type": "json_schema", "schema": ARRAY}
OFF = shown("enable_thinking=False")


def num_calls(seen: Seen) -> int:
    return sum(block["type"] == "tool_use" for block in seen.answer["content"])


def hides_tools(seen: Seen) -> bool:
    return "tool=" not in seen.prompt


MARKED = Case(
    {"type": "ephemeral"}, lambda seen: seen.answer["usage"]["cache_creation_input_tokens"] > 0
)
ONE_CALL = Case(
    True,
    lambda seen: num_calls(seen) == 1,
    {"tools": [TOOL], "max_tokens": 100},
    engine=calling_twice,
)
COUNT: Cases = {
    **cases(
        messages=([{"role": "user", "content": "yo"}], shown("user: yo")),
        system=("be kind", shown("system: be kind\n")),
        tools=([TOOL], shown('"name": "find_it"')),
    ),
    "model": unknown_model(),
    "cache_control": MARKED,
    "tool_choice": Case({"type": "none"}, hides_tools, {"tools": [TOOL]}),
    "thinking": Case({"type": "disabled"}, OFF, engine=thinking),
    "output_config": Case({"effort": "none"}, OFF, engine=thinking),
}
MESSAGES: Cases = {
    **cases(
        model=("second", lambda seen: seen.answer["model"] == "second"),
        max_tokens=(2, lambda seen: seen.answer["usage"]["output_tokens"] == 2),
        stop_sequences=(["x"], sampled("stop", ("x",))),
        stream=(True, lambda seen: len(seen.chunks) > 2),
        temperature=(0.5, sampled("temperature", 0.5)),
        top_k=(5, sampled("top_k", 5)),
        top_p=(0.5, sampled("top_p", 0.5)),
        metadata=({"user_id": "ann"}, lambda seen: seen.submitted.tenant == "ann"),
    ),
    "tool_choice": Case({"type": "any"}, is_forced, {"tools": [TOOL]}),
}

MESSAGES_CASES: dict[type[msgspec.Struct], Cases] = {
    schemas.CountTokensRequest: COUNT,
    schemas.MessagesRequest: MESSAGES,
    schemas.PlainBlock: {"text": read(), "cache_control": MARKED},
    schemas.DocumentBlock: {
        "source": read({"type": "text", "data": "yo!"}),
        "title": read(text="Title: yo!"),
        "context": read(text="Context: yo!"),
        "cache_control": MARKED,
    },
    schemas.TextSource: {"data": read()},
    schemas.ContentSource: {"content": read()},
    schemas.SearchResultBlock: {
        "content": read([{"type": "text", "text": "yo!"}]),
        "source": read(text="Source: yo!"),
        "title": read(text="Title: yo!"),
        "cache_control": MARKED,
    },
    schemas.ThinkingBlock: {"thinking": said("reasoning_content")},
    schemas.ToolUseBlock: {
        "id": called("id", "call_9"),
        "name": called("name", "find_it"),
        "cache_control": MARKED,
        "input": Case({"a": 1}, lambda seen: seen.call["function"]["arguments"] == '{"a": 1}'),
    },
    schemas.ToolResultBlock: {
        "tool_use_id": said("tool_call_id", "call_9"),
        "content": read(),
        "cache_control": MARKED,
        "is_error": Case(True, shown("Error: ")),
    },
    schemas.UserTurn: {"content": said("content")},
    schemas.AssistantTurn: {"content": said("content")},
    schemas.SystemTurn: {"content": said("content")},
    schemas.CustomToolSpec: {
        "name": Case("find_it", shown('"name": "find_it"')),
        "description": Case("Finds it.", shown("Finds it.")),
        "input_schema": Case({"type": "object", "title": "yo!"}, shown('"title": "yo!"')),
        "strict": Case(True, is_forced),
        "cache_control": MARKED,
    },
    schemas.AutoChoice: {"disable_parallel_tool_use": ONE_CALL},
    schemas.AnyChoice: {"disable_parallel_tool_use": ONE_CALL},
    schemas.AnyTool: {
        "name": Case(
            "find_it",
            lambda seen: is_forced(seen) and "find_it" in str(seen.submitted.sampling.grammar),
            {"tools": [TOOL, {"name": "a", "input_schema": ANY_OBJECT}]},
        )
    },
    schemas.EnabledThinking: {
        "budget_tokens": Case(7, sampled("thinking_budget", 7), {"max_tokens": 50}, engine=thinking)
    },
    schemas.JsonOutput: {"schema": Case(ARRAY, constrained(ARRAY))},
    schemas.OutputConfig: {
        "effort": Case("none", OFF, engine=thinking),
        "format": Case(JSON_OUTPUT, constrained(ARRAY)),
    },
    schemas.RequestMetadata: {"user_id": Case("ann", lambda seen: seen.submitted.tenant == "ann")},
}
