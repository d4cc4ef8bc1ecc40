"""`/v1/chat/completions` over the scripted engine: messages, choices, logprobs, streams."""

import asyncio
from typing import Any

import httpx
import pytest
from client import CHAT, MESSAGES, chunks, client_of
from fake_engine import WORDS, FakeEngine

from quickstep.server.app import create_app

TEXT = "".join(WORDS)


def post(body: dict[str, Any], engine: FakeEngine | None = None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine())) as client:
            return await client.post(CHAT, json=body)

    return asyncio.run(run())


def rendered(messages: list[dict[str, Any]], **more: Any) -> str:
    """The prompt text that the engine was given."""
    engine = FakeEngine()
    response = post({"messages": messages, **more}, engine)
    assert response.status_code == 200, response.text
    return bytes(engine.submitted[0].prompt).decode()


def test_a_conversation_is_answered() -> None:
    answer = post({"messages": MESSAGES}).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None


def test_the_output_is_unlimited_unless_given() -> None:
    engine = FakeEngine()
    post({"messages": MESSAGES}, engine)
    assert engine.submitted[0].sampling.max_tokens is None


def test_messages_reach_the_template_in_order() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "annotations": []},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    assert rendered(messages) == "system: be brief\nuser: a\nb\nassistant: c\ntool: d\nassistant:"


def test_template_options_reach_the_template() -> None:
    text = rendered(MESSAGES, chat_template_kwargs={"x": 1}, add_generation_prompt=False)
    assert text == "user: hi\nx=1"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "a"}, "messages[0].role"),
        ({"role": "robot", "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0]",
        ),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "content": "a", "refusal": "no"}, "messages[0].refusal"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "messages[0].audio"),
        ({"role": "tool", "content": "a"}, "messages[0].tool_call_id"),
        ({"role": "function", "name": "f", "content": "a"}, "messages[0].role"),
    ],
)
def test_a_wrong_message_is_400_with_its_path(message: dict[str, Any], param: str) -> None:
    response = post({"messages": [message]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_no_messages_is_400() -> None:
    response = post({"messages": []})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_a_model_without_a_template_says_so() -> None:
    response = post({"messages": MESSAGES}, FakeEngine(chat_template=None))
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def test_logprobs_list_each_token_with_alternatives() -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    (choice,) = post(body).json()["choices"]
    hello = {"token": "Hello", "bytes": list(b"Hello")}
    assert choice["logprobs"] == {
        "content": [{**hello, "logprob": -0.25, "top_logprobs": [{**hello, "logprob": -0.5}]}],
        "refusal": None,
    }


def test_streamed_choices_add_up_to_the_whole_answer() -> None:
    body = {"messages": MESSAGES, "n": 3, "logprobs": True}
    whole = post(body).json()
    parts = chunks(post({**body, "stream": True}).text)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        mine = [
            item for part in parts for item in part["choices"] if item["index"] == choice["index"]
        ]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert mine[-1]["delta"] == {}
        text = "".join(item["delta"].get("content", "") for item in mine)
        assert text == choice["message"]["content"]
        listed = [
            entry for item in mine if item["logprobs"] for entry in item["logprobs"]["content"]
        ]
        assert listed == choice["logprobs"]["content"]
        reasons = [item["finish_reason"] for item in mine]
        assert reasons == [None] * (len(mine) - 1) + [choice["finish_reason"]]


def test_each_choice_names_the_seed_that_reproduces_it_alone() -> None:
    choices = post({"messages": MESSAGES, "n": 3, "seed": 7}).json()["choices"]
    seeds = [choice["seed"] for choice in choices]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
