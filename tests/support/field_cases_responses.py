"""For every honoured field of `/v1/responses` a value, and its visible effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
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
    levelled,
    read,
    said,
    sampled,
    shown,
    thinking,
)

from quickstep.server.responses import request_types as schemas
from quickstep.server.responses.input_items import sealed

LOGPROBS = ["message.output_text.logprobs"]
TOOL = {"type": "function", "name": "find_it"}
FORMAT = {"type": "json_schema", "name": "s", "schema": ARRAY}


async def first(client: httpx.AsyncClient) -> Mapping[str, Any]:
    """A response to continue."""
    answer = await client.post("/v1/responses", json={"input": "earlier"})
    return {"previous_response_id": answer.json()["id"]}


async def fetched(client: httpx.AsyncClient, answer: Any) -> Any:
    """Whether it can be fetched."""
    return (await client.get(f"/v1/responses/{answer['id']}")).status_code


async def listed_input(client: httpx.AsyncClient, answer: Any) -> Any:
    """Its input, item by item."""
    return (await client.get(f"/v1/responses/{answer['id']}/input_items")).json()["data"]


def listed(name: str, value: Any) -> Case:
    return Case(value, lambda seen: seen.later[0].get(name) == value, after=listed_input)


def noted(name: str) -> Case:
    """A note about a part of a message."""
    value = [{"note": 1}]

    def holds(seen: Seen) -> bool:
        item = seen.later[0]
        parts = item["content"] if item["type"] == "message" else item["output"]
        return bool(parts[0].get(name) == value)

    return Case(value, holds, after=listed_input)


def repeated(name: str, value: Any) -> Case:
    return Case(value, lambda seen: seen.answer[name] == value)


def form(name: str, value: Any) -> Case:
    """A part of `text.format`."""
    return Case(value, lambda seen: seen.answer["text"]["format"].get(name) == value)


def num_calls(seen: Seen) -> int:
    return sum(item["type"] == "function_call" for item in seen.answer["output"])


def effort_is_told(seen: Seen) -> bool:
    told = seen.answer["reasoning"]["effort"] == "none"
    return told and "enable_thinking=False" in seen.prompt


RESPONSES: Cases = {
    **cases(
        input=([{"role": "user", "content": "yo"}], shown("user: yo")),
        instructions=("be kind", shown("system: be kind\n")),
        max_output_tokens=(
            2,
            lambda seen: (
                seen.answer["usage"]["output_tokens"] == 2
                and seen.answer["incomplete_details"] == {"reason": "max_output_tokens"}
            ),
        ),
        safety_identifier=("ann", lambda seen: seen.submitted.tenant == "ann"),
        text=({"format": FORMAT}, constrained(ARRAY)),
        include=(LOGPROBS, sampled("logprobs", 0)),
        tools=([TOOL], shown('"name": "find_it"')),
        chat_template_kwargs=({"k": "v"}, shown("k=v")),
        top_logprobs=(3, sampled("logprobs", 3)),
    ),
    "max_tool_calls": repeated("max_tool_calls", 3),
    "metadata": repeated("metadata", {"a": "b"}),
    "store": Case(False, lambda seen: seen.later == 404, after=fetched),
    "background": repeated("background", True),
    "reasoning": Case({"effort": "none"}, effort_is_told, engine=thinking),
    "tool_choice": Case("required", is_forced, {"tools": [TOOL]}),
    "parallel_tool_calls": Case(
        False, lambda seen: num_calls(seen) == 1, {"tools": [TOOL]}, engine=calling_twice
    ),
    # what came before stands in the second prompt that the engine gets
    "previous_response_id": Case(
        None, lambda seen: b"earlier" in bytes(seen.engine.submitted[1].prompt), before=first
    ),
}

RESPONSES_CASES: dict[type[msgspec.Struct], Cases] = {
    schemas.ResponsesRequest: RESPONSES,
    schemas.InputTextPart: {"text": read()},
    schemas.OutputTextPart: {
        "text": read(),
        "annotations": noted("annotations"),
        "logprobs": noted("logprobs"),
    },
    schemas.OutputRefusalPart: {"refusal": read()},
    schemas.MessageItem: {
        "role": said("role", "system"),
        "content": said("content"),
        "id": listed("id", "msg_9"),
        "status": listed("status", "incomplete"),
    },
    schemas.FunctionCallItem: {
        "call_id": called("id", "call_9"),
        "name": called("name", "find_it"),
        "arguments": called("arguments", '{"a": 1}'),
        "id": listed("id", "fc_9"),
        "status": listed("status", "incomplete"),
    },
    schemas.FunctionCallOutputItem: {
        "call_id": said("tool_call_id", "call_9"),
        "output": said("content"),
        "id": listed("id", "fco_9"),
        "status": listed("status", "incomplete"),
    },
    schemas.ReasoningItem: {
        "id": listed("id", "rs_9"),
        "status": listed("status", "incomplete"),
        "summary": Case(
            [{"type": "summary_text", "text": "hm"}], said("reasoning_content", "hm").holds
        ),
        "content": Case(
            [{"type": "reasoning_text", "text": "hm"}], said("reasoning_content", "hm").holds
        ),
        "encrypted_content": Case(sealed("hm"), said("reasoning_content", "hm").holds),
    },
    schemas.SummaryPart: {"text": said("reasoning_content")},
    schemas.ReasoningPart: {"text": said("reasoning_content")},
    schemas.FunctionToolSpec: {
        "name": Case("find_it", shown('"name": "find_it"')),
        "description": Case("Finds it.", shown("Finds it.")),
        "parameters": Case({"type": "object", "title": "yo!"}, shown('"title": "yo!"')),
        "strict": Case(True, is_forced),
    },
    schemas.SchemaFormat: {
        "name": form("name", "yo"),
        "description": form("description", "yo"),
        "strict": form("strict", True),
        "schema": Case(ANY_OBJECT, constrained(ANY_OBJECT)),
    },
    schemas.TextConfig: {
        "format": Case(FORMAT, constrained(ARRAY)),
        "verbosity": Case("low", shown("verbosity=low"), engine=levelled),
    },
    schemas.ReasoningConfig: {"effort": Case("none", effort_is_told, engine=thinking)},
}
