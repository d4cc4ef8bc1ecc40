"""Answers that the client has begun: vLLM's `continue_final_message`."""

from typing import Any

import pytest
from chat_calls import THINKING, engine_saying, post
from client import MESSAGES

PAST_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BEGUN: dict[str, Any] = {"role": "assistant", "content": "So"}


def test_a_begun_answer_is_continued_inside_its_reasoning() -> None:
    thinking = {**BEGUN, "content": "<think>I see"}
    body = {"messages": [*MESSAGES, thinking], "continue_final_message": True}
    engine = engine_saying(" it.</think>Yes", THINKING)
    message = post(body, engine).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("it.", "Yes")
    assert bytes(engine.submitted[-1].prompt).endswith(b"assistant: <think>I see")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": MESSAGES}, "messages[0]"),
        ({"messages": [{**BEGUN, "tool_calls": [PAST_CALL]}]}, "messages[0]"),
        ({"messages": [BEGUN], "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_cannot_be_continued_is_refused(body: dict[str, Any], param: str) -> None:
    response = post({**body, "continue_final_message": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
