"""Parts of a message's content reach the template as they were sent, on every API."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest
from client import client_of
from fake_engine import FakeEngine

from quickstep.server.app import create_app
from quickstep.text.chat_template import ChatTemplate

READS_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}|{% endfor %}"
    "{% if tools or true %}{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }}{% endfor %}{% endfor %}{% endif %}"
)
READS_TEXT = READS_PARTS.replace(
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}", "{{ raise_exception('parts') }}"
)
AB = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
INPUT = [{"type": "input_text", "text": text} for text in "AB"]
OUTPUT = [{"type": "output_text", "text": text, "annotations": []} for text in "AB"]
EVERY_ROLE = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": AB},
            {"role": "user", "content": AB},
            {"role": "assistant", "content": AB, "tool_calls": [CALL]},
            {"role": "tool", "content": AB, "tool_call_id": "call00001"},
        ]
    },
    "/v1/messages": {
        "max_tokens": 4,
        "system": AB,
        "messages": [
            {"role": "user", "content": AB},
            {
                "role": "assistant",
                "content": [*AB, {"type": "tool_use", "id": "t", "name": "f", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": AB}],
            },
        ],
    },
    "/v1/responses": {
        "input": [
            {"role": "system", "content": INPUT},
            {"role": "user", "content": INPUT},
            {"role": "assistant", "content": OUTPUT},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": INPUT},
        ]
    },
}
ROLES = ("system", "user", "assistant", "tool")


async def _prompt_of(path: str, body: dict[str, Any], template: str) -> str:
    engine: Any = FakeEngine()
    engine.chat_template = ChatTemplate({"default": template}, {}, datetime.now)
    async with client_of(create_app(engine)) as client:
        response = await client.post(path, json={"model": "fake", **body})
    assert response.status_code == 200, response.text
    return bytes(engine.submitted[0].prompt).decode()


def prompt_of(path: str, body: dict[str, Any], template: str) -> str:
    return asyncio.run(_prompt_of(path, body, template))


@pytest.mark.parametrize("path", EVERY_ROLE)
def test_a_template_that_reads_parts_has_those_of_the_client(path: str) -> None:
    prompt = prompt_of(path, EVERY_ROLE[path], READS_PARTS)
    assert prompt.startswith("".join(f"{role}:<A><B>|" for role in ROLES))


@pytest.mark.parametrize("path", EVERY_ROLE)
def test_a_template_that_reads_text_has_parts_joined_by_line_ends(path: str) -> None:
    prompt = prompt_of(path, EVERY_ROLE[path], READS_TEXT)
    assert prompt.startswith("".join(f"{role}:A\nB|" for role in ROLES))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_text_is_one_part_where_the_template_reads_only_parts(path: str) -> None:
    only = READS_PARTS.replace("{% if m.content is string %}{{ m.content }}{% else %}", "", 1)
    body = {"messages": [{"role": "user", "content": "AB"}], "max_tokens": 4}
    if path == "/api/chat":
        del body["max_tokens"]
    assert prompt_of(path, body, only.replace("{% endif %}|", "|", 1)) == "user:<AB>|"


def test_a_system_prompt_of_blocks_loses_a_billing_line_only() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    prompt = prompt_of("/v1/messages", {**body, "system": [billing, *AB]}, READS_PARTS)
    assert prompt == "system:<A><B>|user:x|"


def test_a_begun_answer_of_parts_is_continued_after_its_last_part() -> None:
    body = {
        "messages": [{"role": "user", "content": AB}, {"role": "assistant", "content": AB}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    closed = READS_PARTS.replace("<{{ p.text }}>", "{{ p.text }}")
    prompt = prompt_of("/v1/chat/completions", body, closed)
    assert prompt == "user:AB|assistant:AB"
