"""What takes long for one request is no one else's business: it runs beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, client_of
from fake_engine import FakeEngine, FakeTemplate, FakeTokenizer
from live_server import DEADLINE_S

from quickstep.server.app import create_app
from quickstep.server.options import RequestLimits, ServerOptions

LONG = "a" * 100_000


@dataclass
class Held:
    """A piece of work that has begun, and ends when the test says so."""

    begun: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        self.begun.set()
        assert self.released.wait(DEADLINE_S), "the event loop did not go on meanwhile"


class HeldTokenizer(FakeTokenizer):
    def __init__(self, held: Held, least_chars: int = len(LONG)) -> None:
        self._held = held
        self._least_chars = least_chars

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) >= self._least_chars:
            self._held.work()
            text = text[:100]  # dozens of a million ids each would take most of a GB
        return super().encode(text, add_special_tokens)


class HeldTemplate(FakeTemplate):
    held: Held

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        self.held.work()
        return super().render(messages, tools, add_generation_prompt, extra, continue_final_message)


def others_are_served_while(engine: FakeEngine, held: Held, path: str, body: Any) -> httpx.Response:
    """Health and a short request are answered in the middle of a long one, whose answer it is."""

    async def run() -> httpx.Response:
        async with client_of(create_app(engine, ServerOptions())) as client:
            long = asyncio.create_task(client.post(path, json=body))
            await asyncio.to_thread(held.begun.wait, DEADLINE_S)
            for _ in range(3):
                assert (await client.get("/health")).status_code == 200
            short = await client.post(COMPLETIONS, json={"prompt": "a"})
            assert short.status_code == 200
            assert not long.done()
            held.released.set()
            return await long

    return asyncio.run(asyncio.wait_for(run(), 2 * DEADLINE_S))


def test_a_long_prompt_is_tokenised_beside_the_loop() -> None:
    held = Held()
    engine = FakeEngine(tokenizer=HeldTokenizer(held), max_model_len=200_000)
    answer = others_are_served_while(engine, held, COMPLETIONS, {"prompt": LONG})
    assert answer.status_code == 200


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), ("/v1/embeddings", "input")])
def test_many_prompts_of_some_length_are_tokenised_beside_the_loop(path: str, field: str) -> None:
    held = Held()
    engine = FakeEngine(tokenizer=HeldTokenizer(held, least_chars=2000))
    answer = others_are_served_while(engine, held, path, {field: ["a" * 2000] * 8})
    assert answer.status_code == 200


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    class Refusing(FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            raise AssertionError("the text was tokenised")

    async def run() -> httpx.Response:
        engine = FakeEngine(tokenizer=Refusing(), max_model_len=100)
        async with client_of(create_app(engine, ServerOptions())) as client:
            return await client.post(COMPLETIONS, json={"prompt": LONG})

    answer = asyncio.run(run())
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "100000 tokens > 99 maximum (or more" in answer.json()["error"]["message"]


def test_large_prompts_leave_threads_to_the_others_and_a_full_queue_is_503() -> None:
    """One is worked on, 64 wait, the others have no place; a prompt of usual size has one."""
    held = Held()
    engine = FakeEngine(
        tokenizer=HeldTokenizer(held, least_chars=1_100_000), max_model_len=2_000_000
    )

    async def run() -> tuple[httpx.Response, list[int], list[httpx.Response]]:
        async with client_of(create_app(engine, ServerOptions())) as client:
            body = {"prompt": "a" * 1_100_000, "max_tokens": 1}
            large = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for _ in range(70)]
            await asyncio.to_thread(held.begun.wait, DEADLINE_S)
            usual = await client.post(COMPLETIONS, json={"prompt": "a" * 5000})
            done, _ = await asyncio.wait(large, return_when=asyncio.FIRST_COMPLETED)
            refused = [task.result() for task in done]
            held.released.set()
            return usual, [(await task).status_code for task in large], refused

    usual, statuses, refused = asyncio.run(asyncio.wait_for(run(), 4 * DEADLINE_S))
    assert usual.status_code == 200
    assert set(statuses) == {200, 503}
    for answer in refused:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_busy"
        assert answer.headers["retry-after"] == "1"


def test_a_long_conversation_is_rendered_beside_the_loop() -> None:
    held = Held()
    template = HeldTemplate()
    template.held = held
    engine = FakeEngine(chat_template=template, max_model_len=200_000)
    messages = [{"role": "user", "content": LONG}]
    answer = others_are_served_while(engine, held, CHAT, {"messages": messages})
    assert answer.status_code == 200


def test_a_long_body_is_looked_through_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held()

    def slow(body: bytes, limits: RequestLimits) -> None:
        if len(body) > len(LONG):
            held.work()

    monkeypatch.setattr("quickstep.server.http.route.check_json", slow)
    engine = FakeEngine(max_model_len=200_000)
    answer = others_are_served_while(engine, held, COMPLETIONS, {"prompt": LONG})
    assert answer.status_code == 200
