"""A stop string that occurs in the reasoning ends nothing; one of the answer ends it, on each API,
streamed or not, with and without drafts, in one sequence or several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client import chunks
from serve_process import serving

THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>\n{% endif %}{# </think> #}"
)
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "def add(a, b):"}],
    "max_tokens": 40,
    "thinking_budget": 12,
    "seed": 3,
    "temperature": 0.8,
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving("--chat-template", THINKS) as (_, address):
        yield address


def post(address: str, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{address}{path}", json={"model": "demo", **body}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def in_both(address: str) -> tuple[str, dict[str, Any]]:
    """A letter of the reasoning that is also in the answer, and the choice without stops."""
    choice = post(address, CHAT, ASKED)["choices"][0]
    thought, content = choice["message"]["reasoning_content"], choice["message"]["content"]
    return next(letter for letter in thought if letter.isalpha() and letter in content[1:]), choice


def test_a_stop_string_of_the_reasoning_ends_the_answer_only(address: str) -> None:
    stop, without = in_both(address)
    expected = without["message"]["content"].partition(stop)[0]
    for drafts in (True, False):
        body = {**ASKED, "stop": stop, "speculation": drafts}
        choice = post(address, CHAT, body)["choices"][0]
        assert choice["message"]["reasoning_content"] == without["message"]["reasoning_content"]
        assert choice["message"]["content"] == expected
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_stream_and_other_sequences_of_the_request_give_the_same(address: str) -> None:
    stop, _ = in_both(address)
    body = {**ASKED, "stop": stop, "n": 3}
    whole = post(address, CHAT, body)["choices"]
    text = httpx.post(f"{address}{CHAT}", json={**body, "stream": True}, timeout=60).text
    streamed = [{"reasoning_content": "", "content": ""} for _ in whole]
    for chunk in chunks(text):
        for part in chunk["choices"]:
            for name in streamed[part["index"]]:
                streamed[part["index"]][name] += part["delta"].get(name) or ""
    messages = [{name: each["message"][name] for name in streamed[0]} for each in whole]
    assert streamed == messages
    first = post(address, CHAT, {**body, "n": 1})["choices"][0]["message"]
    assert {name: first[name] for name in streamed[0]} == messages[0]


def test_stop_sequences_of_messages_and_ollama_leave_the_reasoning_alone(address: str) -> None:
    greedy = {"messages": ASKED["messages"], "temperature": 0}
    messages = {**greedy, "max_tokens": 40, "thinking": {"type": "enabled", "budget_tokens": 12}}
    thought, said = post(address, "/v1/messages", messages)["content"]
    stop = next(letter for letter in thought["thinking"] if letter.isalpha())
    stopped = post(address, "/v1/messages", {**messages, "stop_sequences": [stop]})
    assert stopped["content"][0]["thinking"] == thought["thinking"]
    assert [block["text"] for block in stopped["content"][1:]] == [
        text for text in [said["text"].partition(stop)[0]] if text
    ]
    options = {"temperature": 0, "num_predict": 30, "stop": [stop]}
    body = {"messages": ASKED["messages"], "stream": False, "options": options}
    message = post(address, "/api/chat", body)["message"]
    assert message["thinking"].startswith(thought["thinking"])


def test_a_completion_has_no_reasoning_and_ends_at_the_stop_anywhere(address: str) -> None:
    body = {"prompt": "user: x\nassistant: <think>\n", "max_tokens": 40, "temperature": 0}
    text = post(address, "/v1/completions", body)["choices"][0]["text"]
    stop = next(letter for letter in text if letter.isalpha())
    choice = post(address, "/v1/completions", {**body, "stop": stop})["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text.partition(stop)[0], "stop")
    assert choice["stop_reason"] == stop
