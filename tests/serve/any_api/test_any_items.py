"""Whatever JSON arrives at responses and messages: an answer in shape, never a failure of ours."""

import asyncio
from typing import Any

import httpx
import pytest
from client import client_of
from example_counts import examples
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from route_calls import ANTHROPIC, COUNT_TOKENS, RESPONSES, events

from quickstep.server.anthropic.request_types import CountTokensRequest, MessagesRequest
from quickstep.server.app import create_app
from quickstep.server.options import ServerOptions
from quickstep.server.responses.request_types import ResponsesRequest
from quickstep.text.tool_calls.formats import TOOL_CALL_FORMATS

TEXT = st.text(max_size=4)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-3, 0, 1, 40, 2**31, 2**64, -(2**70), 10**40]),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXT,
)
NAMES = st.sampled_from(["role", "content", "type", "text", "name", "id", "function"])
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
ARGUMENTS = st.one_of(st.just("{}"), TEXT)


def some(kinds: list[str], **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects of a kind with a few members of the right name."""
    return st.fixed_dictionaries({"type": st.sampled_from(kinds)}, optional=optional)


PARTS = st.lists(some(["input_text", "output_text", "input_image", "text"], text=TEXT), max_size=2)
ITEMS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "developer", "robot"])},
            optional={"content": st.one_of(TEXT, PARTS, JSON), "id": LEAVES, "phase": LEAVES},
        ),
        some(
            ["function_call", "function_call_output", "reasoning", "robot"],
            call_id=TEXT,
            name=TEXT,
            arguments=ARGUMENTS,
            output=st.one_of(TEXT, PARTS),
            content=JSON,
            encrypted_content=TEXT,
        ),
        JSON,
    ),
    max_size=3,
)
BLOCKS = st.lists(
    some(
        ["text", "image", "thinking", "tool_use", "tool_result", "robot"],
        text=TEXT,
        thinking=TEXT,
        id=TEXT,
        name=TEXT,
        input=JSON,
        tool_use_id=TEXT,
        content=st.one_of(TEXT, JSON),
        is_error=LEAVES,
    ),
    max_size=2,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "user", "assistant", "system", "robot"])},
        optional={"content": st.one_of(TEXT, BLOCKS, JSON)},
    ),
    max_size=3,
)
SCHEMAS = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {},
        optional={
            name: JSON
            for name in ("type", "properties", "required", "$defs", "additionalProperties")
        },
    ),
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"name": st.one_of(st.just("f"), LEAVES)},
        optional={
            "type": st.one_of(st.sampled_from(["function", "custom"]), JSON),
            "parameters": SCHEMAS,
            "input_schema": SCHEMAS,
            "strict": LEAVES,
        },
    ),
    max_size=2,
)
CHOICES = st.one_of(
    st.sampled_from(["auto", "required", {"type": "any"}, {"type": "tool", "name": "f"}]), JSON
)
MAIN: dict[str, tuple[Any, str, st.SearchStrategy[Any]]] = {
    RESPONSES: (ResponsesRequest, "input", st.one_of(TEXT, ITEMS, JSON)),
    ANTHROPIC: (MessagesRequest, "messages", TURNS),
    COUNT_TOKENS: (CountTokensRequest, "messages", TURNS),
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    schema, main, given_main = MAIN[path]
    names = [name for name in schema.__struct_fields__ if name not in (main, "model")]
    body = draw(st.dictionaries(st.sampled_from(names), JSON, max_size=2))
    if draw(st.booleans()):
        body |= {"tools": draw(TOOLS), "tool_choice": draw(CHOICES)}
    if path == ANTHROPIC:
        body.setdefault("max_tokens", 9)
    return {**body, "model": "fake", main: draw(given_main)}


def post(path: str, body: dict[str, Any], parser: str) -> httpx.Response:
    engine = FakeEngine()

    async def run() -> httpx.Response:
        app = create_app(engine, ServerOptions(tool_call_parser=parser))
        async with client_of(app) as client:
            return await client.post(path, json=body)

    response = asyncio.run(run())
    assert not engine.open_streams
    return response


@pytest.mark.parametrize("path", MAIN)
@examples(60)
@given(st.data())
def test_any_body_is_answered_or_refused(path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path))
    parser = data.draw(st.sampled_from(list(TOOL_CALL_FORMATS)))
    response = post(path, body, parser)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        answer = response.json()
        assert answer["error"]["message"]
        assert (answer.get("type") == "error") == (path != RESPONSES)
    elif body.get("stream"):
        last = "response.completed" if path == RESPONSES else "message_stop"
        cut = "response.incomplete"
        assert events(response.text)[-1][0] in (last, cut)
    else:
        assert response.json()
