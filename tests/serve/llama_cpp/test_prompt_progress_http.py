"""`return_progress` of llama.cpp: chunks of a stream while its prompt is computed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of, frames
from fake_engine import FakeEngine

from quickstep.server.app import create_app

LLAMA = "/completion"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "abcdef"},
    LLAMA: {"prompt": "abcdef"},
}


def ask(path: str, **fields: Any) -> tuple[httpx.Response, FakeEngine]:
    engine = FakeEngine()

    async def run() -> httpx.Response:
        async with client_of(create_app(engine)) as client:
            return await client.post(path, json={**BODIES[path], "max_tokens": 3, **fields})

    return asyncio.run(run()), engine


def chunks_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(frame) for frame in frames(text) if frame != "[DONE]"]


@pytest.mark.parametrize("path", BODIES)
def test_chunks_with_the_progress_come_before_the_first_text(path: str) -> None:
    response, engine = ask(path, stream=True, return_progress=True)
    total = len(engine.submitted[0].prompt)
    found = chunks_of(response.text)
    reports = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
    assert reports == [
        {"total": total, "cache": 1, "processed": done, "time_ms": done * 125.0}
        for done in (total // 2, total)
    ]
    plain = chunks_of(ask(path, stream=True)[0].text)
    rest = [chunk for chunk in found if "prompt_progress" not in chunk]
    if path != LLAMA:
        assert [chunk["choices"] for chunk in rest] == [chunk["choices"] for chunk in plain]
    else:
        texts = [[chunk["content"] for chunk in chunks] for chunks in (rest, plain)]
        assert texts[0] == texts[1]
    for chunk in found:
        if "prompt_progress" in chunk:
            (choice,) = chunk.get("choices", [chunk])
            assert not (choice.get("text") or choice.get("content") or choice.get("delta"))
            assert choice.get("finish_reason") is None and not choice.get("stop")


@pytest.mark.parametrize("path", BODIES)
def test_without_a_stream_it_has_no_effect_and_is_reported(path: str) -> None:
    response, engine = ask(path, return_progress=True)
    assert response.headers["x-quickstep-ignored"] == "return_progress"
    assert not engine.submitted[0].reports_progress
    assert "x-quickstep-ignored" not in ask(path, return_progress=False)[0].headers


def test_several_completions_of_several_prompts_have_the_progress_of_each_prompt() -> None:
    """A prompt has a token more than letters, that of the start."""
    prompts = ["abcd", "abcdef"]
    response, _ = ask(COMPLETIONS, prompt=prompts, n=2, stream=True, return_progress=True)
    seen: dict[int, list[int]] = {}
    for chunk in chunks_of(response.text):
        if "prompt_progress" in chunk:
            (choice,) = chunk["choices"]
            seen.setdefault(choice["index"], []).append(chunk["prompt_progress"]["processed"])
    assert {index: done[-1] for index, done in seen.items()} == {
        0: 5,
        2: 7,
    }  # with the token at the start
