"""Whatever JSON arrives: an answer in shape, never a failure of ours, nothing left behind."""

import asyncio
from typing import Any

import httpx
from client import CHAT, COMPLETIONS, client_of
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from quickstep.server.app import create_app
from quickstep.server.schemas import ChatRequest, CompletionRequest

NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**53, 2**63, 2**64, -(2**70), 10**40]),
    st.floats(allow_nan=False, allow_infinity=False),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4))
NAMES = st.sampled_from(
    ["role", "content", "type", "text", "name", "id", "function", "include_usage"]
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
CONTENTS = st.one_of(
    st.text(max_size=5),
    st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "refusal", "image_url", "file", "video"])},
            optional={"text": st.text(max_size=3), "refusal": LEAVES, "image_url": JSON},
        ),
        max_size=2,
    ),
    JSON,
)
ROLES = ["system", "developer", "user", "assistant", "tool", "function", "robot"]
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(ROLES)},
        optional={
            "content": CONTENTS,
            "name": LEAVES,
            "tool_call_id": LEAVES,
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {
                        "id": st.just("1"),
                        "function": st.fixed_dictionaries(
                            {"name": st.just("f"), "arguments": st.text(max_size=4)}
                        ),
                    }
                ),
                max_size=2,
            ),
        },
    ),
    max_size=3,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function", "custom", "robot"])},
        optional={
            "function": st.fixed_dictionaries(
                {"name": st.one_of(st.just("f"), LEAVES)},
                optional={"description": LEAVES, "parameters": JSON, "strict": LEAVES},
            )
        },
    ),
    max_size=2,
)
CHOICES = st.one_of(st.sampled_from(["auto", "none", "required"]), JSON)
PROMPTS = st.one_of(
    st.text(max_size=5),
    st.lists(st.integers(-1, 300), max_size=4),
    st.lists(JSON, max_size=3),
    JSON,
)


def requests(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """A body with a plausible prompt and a few fields of any value."""
    schema, main, prompts = {
        CHAT: (ChatRequest, "messages", MESSAGES),
        COMPLETIONS: (CompletionRequest, "prompt", PROMPTS),
    }[path]
    names = [name for name in schema.__struct_fields__ if name not in (main, "model")]
    others = st.dictionaries(st.sampled_from(names), JSON, max_size=2)
    tools = st.fixed_dictionaries({}, optional={"tools": TOOLS, "tool_choice": CHOICES})
    return st.builds(
        lambda prompt, fields, tools: {**fields, **tools, main: prompt},
        prompts,
        others,
        tools if path == CHAT else st.just({}),
    )


def check(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()

    async def run() -> httpx.Response:
        async with client_of(create_app(engine)) as client:
            return await client.post(path, json=body)

    response = asyncio.run(run())
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    elif body.get("stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json()["choices"]
    assert not engine.open_streams


@settings(max_examples=250, deadline=None)
@given(requests(COMPLETIONS))
def test_any_completion_request_is_answered_or_refused(body: dict[str, Any]) -> None:
    check(COMPLETIONS, body)


@settings(max_examples=250, deadline=None)
@given(requests(CHAT))
def test_any_chat_request_is_answered_or_refused(body: dict[str, Any]) -> None:
    check(CHAT, body)
