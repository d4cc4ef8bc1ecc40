"""The tokens of the reasoning are counted, with the same result on each API, streamed or not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from client import CHAT, chunks, client_of
from fake_engine import FakeEngine, FakeTemplate, Script
from route_calls import events

from quickstep.server.app import create_app
from quickstep.text.tool_calls.formats import formats_of

MESSAGES = [{"role": "user", "content": "hi"}]
THINKS = "{{ tools }}</think>"
HARMONY = "{{ tools }}<|channel|>analysis<|channel|>commentary{{ message.tool_calls }}"
# template, end of the prompt, words of a token each, tokens up to the closing tag
CASES = [
    pytest.param(
        THINKS, "", ("<think>", "\n", "one", " two", "</think>", "\n", "ok"), 4, id="tags"
    ),
    pytest.param(THINKS, "<think>\n", ("\n", "one", "</think>", "ok"), 3, id="opened"),
    pytest.param(THINKS, "<think>", ("one", "</", "think", ">", "ok"), 4, id="in pieces"),
    pytest.param(THINKS, "", ("<think>one", " two"), 3, id="cut, with its end token"),
    pytest.param(THINKS, "", ("ok", "<think>", "no", "</think>"), 0, id="none"),
    pytest.param("{{ tools }}", "", ("<think>", "no", "</think>"), 0, id="no format"),
    pytest.param(
        HARMONY,
        "",
        (
            *("<|channel|>", "analysis", "<|message|>", "one", " two", "<|end|>"),
            *("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "ok"),
        ),
        3,
        id="harmony",
    ),
]


class OpeningTemplate(FakeTemplate):
    """Ends the prompt with a text."""

    end = ""

    def render(self, *args: Any, **named: Any) -> str:
        return super().render(*args, **named) + self.end


async def _counts(template: str, end: str, words: tuple[str, ...], n: int) -> dict[str, int]:
    known = OpeningTemplate(formats_of(template))
    known.end = end
    engine = FakeEngine(script=Script(words=words), chat_template=known)
    found = {}
    async with client_of(create_app(engine)) as client:

        async def post(path: str, **fields: Any) -> Any:
            response = await client.post(path, json={"model": "fake", **fields})
            assert response.status_code == 200, response.text
            return response.text if fields.get("stream") else response.json()

        chat: dict[str, Any] = {"messages": MESSAGES, "n": n}
        usage = (await post(CHAT, **chat))["usage"]
        found["chat"] = usage["completion_tokens_details"]["reasoning_tokens"]
        options = {"include_usage": True}
        streamed = chunks(await post(CHAT, **chat, stream=True, stream_options=options))
        usage = streamed[-1]["usage"]
        found["streamed"] = usage["completion_tokens_details"]["reasoning_tokens"]
        fields: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 99}
        usage = (await post("/v1/messages", **fields))["usage"]
        found["messages"] = usage["output_tokens_details"]["thinking_tokens"]
        usage = (await post("/v1/responses", input="hi"))["usage"]
        found["responses"] = usage["output_tokens_details"]["reasoning_tokens"]
        last = events(await post("/v1/responses", input="hi", stream=True))[-1]
        assert f'"reasoning_tokens":{found["responses"]}' in last[1]
        completion = await post("/v1/completions", prompt="hi")
        assert "completion_tokens_details" not in completion["usage"]
    return found


@pytest.mark.parametrize(("template", "end", "words", "num_tokens"), CASES)
def test_tokens_of_reasoning_are_counted_alike(
    template: str, end: str, words: tuple[str, ...], num_tokens: int
) -> None:
    found = asyncio.run(_counts(template, end, words, n=1))
    assert found == dict.fromkeys(("chat", "streamed", "messages", "responses"), num_tokens)


def test_choices_are_counted_together() -> None:
    found = asyncio.run(_counts(THINKS, "", ("<think>", "one", "</think>", "ok"), n=3))
    assert found == {"chat": 6, "streamed": 6, "messages": 2, "responses": 2}
