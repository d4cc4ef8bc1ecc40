"""Chats with a scripted engine that says a given text."""

import asyncio
from typing import Any

import httpx
from client import CHAT, MESSAGES, client_of
from fake_engine import FakeEngine, FakeTemplate, Script

from quickstep.server.app import create_app
from quickstep.server.options import ServerOptions
from quickstep.text.tool_calls.formats import formats_of

THINKING = "{% for tool in tools %}<tool_call>{% endfor %}{{ '<think></think>' }}"


def pieces(text: str, size: int = 3) -> tuple[str, ...]:
    return tuple(text[at : at + size] for at in range(0, len(text), size))


def engine_saying(text: str, template: str | None = None, **script: Any) -> FakeEngine:
    engine = FakeEngine(script=Script(words=pieces(text), **script))
    if template is not None:
        engine.chat_template = FakeTemplate(formats_of(template))
    return engine


def post(
    body: dict[str, Any], engine: FakeEngine | None = None, options: ServerOptions | None = None
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine(), options)) as client:
            return await client.post(CHAT, json={"messages": MESSAGES, **body})

    return asyncio.run(run())
