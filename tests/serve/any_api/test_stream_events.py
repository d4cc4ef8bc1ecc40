"""Every event of a stream fits the document, and nothing stands in one that is not told there."""

from typing import Any

import pytest
from api_cases import default_api
from client import CHAT, COMPLETIONS, MESSAGES
from fake_engine import FakeEngine, FakeTemplate, Script
from field_effects import CALL_TEXT, WITH_CALLS
from route_calls import ANTHROPIC, RESPONSES, pieces, post_to

from quickstep.text.tool_calls.formats import formats_of
from quickstep.types import FinishReason

API = default_api()
TEXT = f"<think>hm</think>Let me see.{CALL_TEXT}"
PARAMETERS = {"type": "object"}
CHAT_TOOL = {"type": "function", "function": {"name": "find_it"}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "tools": [CHAT_TOOL], "logprobs": True, "return_progress": True},
    COMPLETIONS: {"prompt": "a", "logprobs": 2, "return_progress": True},
    RESPONSES: {
        "input": "a",
        "tools": [{"type": "function", "name": "find_it"}],
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    },
    ANTHROPIC: {
        "model": "fake",
        "max_tokens": 500,
        "messages": MESSAGES,
        "tools": [{"name": "find_it", "input_schema": PARAMETERS}],
    },
    "/completion": {
        "prompt": "a",
        "n_probs": 2,
        "timings_per_token": True,
        "return_progress": True,
    },
}
ENDS = (FinishReason.EOS, FinishReason.MAX_TOKENS, FinishReason.ERROR, FinishReason.DEADLINE)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("reason", ENDS, ids=lambda reason: reason.name)
def test_every_event_fits_the_document(path: str, reason: FinishReason) -> None:
    template = FakeTemplate(formats_of(f"{WITH_CALLS}</think>"))
    script = Script(reason, error="it broke", words=pieces(TEXT))
    engine = FakeEngine(script=script, chat_template=template)
    response = post_to(path, {**BODIES[path], "stream": True}, engine)
    assert response.status_code == 200, response.text
    assert response.text.count("data: ") > 5
    API.judge_shape("POST", path, response)
