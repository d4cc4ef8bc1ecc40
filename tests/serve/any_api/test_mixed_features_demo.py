"""Every feature at once: requests of all kinds and surfaces in one small batch, chunked, preempted
and paused around each other, give byte for byte what each gets alone.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, client_of
from live_server import live_server_of
from msgspec.structs import replace

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig, StreamConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.server.app import create_app

RESPONSES, ANTHROPIC, LLAMA, EMBEDDINGS = (
    "/v1/responses",
    "/v1/messages",
    "/completion",
    "/v1/embeddings",
)
CALM = EngineConfig(
    load=LoadConfig(model="demo", device="cpu"),
    cache=CacheConfig(num_blocks=400, prefix_caching=False),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=2048),
    max_model_len=640,
    seed=5,
)
# few and small blocks: it chunks and preempts
CROWDED = replace(
    CALM,
    cache=CacheConfig(num_blocks=64, block_size=4),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=40, pipeline_depth=2),
    streams=StreamConfig(max_unread_deltas=2),
)
CODE = "def add(first, second):\n    return"
TEXTS = [CODE, "import itertools\n" * 6, "é"]
QUESTION = [{"role": "user", "content": "What does itertools.chain do?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Bern?"}]
PERSON = [{"role": "user", "content": "Reply in JSON. Ann is 41 years old."}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOLD = {"name": "get_weather", "description": "Get the current weather of a city."}
TOOLS = [{"type": "function", "function": {**TOLD, "parameters": CITY}}]
FLAT_TOOLS = [{"type": "function", **TOLD, "parameters": CITY, "strict": None}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [41, 42]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
USAGE = {"include_usage": True}


def code(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": CODE, "seed": 3, "max_tokens": 12, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": QUESTION, "seed": 4, "max_tokens": 16, **fields}


def respond(**fields: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {
        "model": "demo",
        "input": "What?",
        "max_output_tokens": 24,
        "seed": 6,
        **fields,
    }


def message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return ANTHROPIC, {"model": "demo", "messages": QUESTION, "max_tokens": 16, **fields}


REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    code(temperature=0, logprobs=3, max_tokens=70, ignore_eos=True),
    code(temperature=1.1, max_tokens=60, ignore_eos=True, stream=True, logprobs=1),
    code(presence_penalty=1.5, frequency_penalty=0.8, repetition_penalty=1.3, logprobs=0),
    code(dry_multiplier=0.8, dry_allowed_length=1, dry_range=30, max_tokens=60, ignore_eos=True),
    code(xtc_probability=0.6, xtc_threshold=0.05, typical_p=0.8, max_tokens=40, ignore_eos=True),
    code(bad_words=["first", " second", "self."], top_k=30, top_p=0.9, min_p=0.02),
    code(logit_bias={"67": 4.0, "300": -9.0}, min_tokens=8, stop_token_ids=[10, 67], priority=2),
    code(allowed_token_ids=[67, 271, 300], max_tokens=9, stream=True),
    code(n=3, temperature=0.9, stop=["\n", "a"], include_stop_str_in_output=True, priority=-1),
    code(prompt=TEXTS, n=2, temperature=0.9, stream=True, stream_options=USAGE),
    code(best_of=5, n=2, temperature=1.0, logprobs=1),
    code(use_beam_search=True, n=3, length_penalty=0.5, max_tokens=8, logprobs=2),
    code(prompt=TEXTS, echo=True, logprobs=2, max_tokens=0),
    code(echo=True, prompt_logprobs=2, return_token_ids=True, n=2),
    code(prompt=TEXTS[1], echo=True, logprobs=1, stream=True, return_token_ids=True, priority=1),
    code(structured_outputs={"regex": "[0-9]{4}-[a-z]{3}"}, stream=True),
    code(structured_outputs={"choice": ["yes", "no", "it depends"]}, n=2),
    code(structured_outputs={"grammar": 'start: "a" /[b-f]{2,6}/ "z"'}),
    code(preset="creative", cache_salt="tenant", max_tokens=50, ignore_eos=True),
    code(prompt=[[67, 271, 300], [5, 6]], add_special_tokens=False, skip_special_tokens=False),
    chat(temperature=0, logprobs=True, top_logprobs=3),
    chat(stream=True, stream_options=USAGE, n=2, stop=["er"]),
    chat(response_format=FORM, messages=PERSON, max_tokens=60, n=2),
    chat(response_format={"type": "json_object"}, messages=PERSON, max_tokens=40, stream=True),
    chat(messages=WEATHER, tools=TOOLS, temperature=0, max_tokens=60),
    chat(messages=WEATHER, tools=TOOLS, tool_choice="required", max_tokens=60, stream=True),
    chat(
        messages=WEATHER, tools=TOOLS, tool_choice=TOOLS[0] | {"function": {"name": "get_weather"}}
    ),
    chat(temperature=0.7, priority=3, max_tokens=50, ignore_eos=True),
    chat(use_beam_search=True, n=2, early_stopping=True, max_tokens=8),
    chat(prompt_logprobs=1, max_tokens=4, preset="factual"),
    chat(dry_multiplier=0.8, xtc_probability=0.5, bad_words=["the"], top_k=40, stream=True),
    respond(temperature=0, instructions="Be brief."),
    respond(input=WEATHER, tools=FLAT_TOOLS, tool_choice="required", stream=True, temperature=0),
    respond(text={"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}),
    message(temperature=0, stop_sequences=["er"]),
    message(messages=WEATHER, tools=[{**TOLD, "input_schema": CITY}], temperature=0, stream=True),
    message(top_k=1, system="Be brief.", max_tokens=30, stream=True),
    (LLAMA, {"prompt": CODE, "n_predict": 20, "seed": 3, "n_probs": 2, "repeat_penalty": 1.2}),
    (LLAMA, {"prompt": CODE, "n_predict": 20, "seed": 4, "stream": True, "json_schema": SCHEMA}),
    (EMBEDDINGS, {"input": TEXTS, "pooling": "mean"}),
    (EMBEDDINGS, {"input": TEXTS, "pooling": "last", "encoding_format": "base64"}),
)
# ids and times of an answer, and what the prefix cache and the clock had to do with it; Anthropic's
# input_tokens are those that were not cached
_CHANGING = re.compile(
    r"^(id|created|created_at|completed_at|item_id|call_id|\w*cache\w*|timings|generation_settings"
    r"|(prompt|input)_tokens_details|input_tokens|id_slot)$"
)


def plain(value: Any) -> Any:
    """JSON without what differs each time."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if not _CHANGING.match(name)}
    return [plain(one) for one in value] if isinstance(value, list) else value


def essence(response: httpx.Response) -> tuple[int, list[str]]:
    """The status, and the answer's pieces; choices take turns in a stream as they come."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.status_code, [json.dumps(plain(response.json()))]
    pieces = []
    for line in response.text.splitlines():
        name, _, data = line.partition(": ")
        is_json = name == "data" and data != "[DONE]"
        pieces.append(f"{name}: {json.dumps(plain(json.loads(data)))}" if is_json else line)
    events = [piece for piece in pieces if piece]
    return response.status_code, sorted(events, key=lambda one: re.findall(_CHOICE, one))


_CHOICE = re.compile(r'"choices": \[\{"index": (\d+)')


async def answer(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> Any:
    return essence(await client.post(route, json=body, timeout=120))


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Each request's answer from an engine that has nothing else to do."""

    async def run() -> list[Any]:
        async with client_of(create_app(open_engine(CALM))) as client:
            return [await answer(client, *request) for request in REQUESTS]

    answers = asyncio.run(run())
    for request, (status, pieces) in zip(REQUESTS, answers, strict=True):
        assert status == 200, (request, pieces)
    return answers


def check(together: list[Any], alone: list[Any]) -> None:
    for request, got, expected in zip(REQUESTS, together, alone, strict=True):
        assert got == expected, request


def test_in_this_process_each_request_gets_what_it_gets_alone(alone: list[Any]) -> None:
    async def run() -> list[Any]:
        engine = open_engine(CROWDED)
        async with client_of(create_app(engine)) as client:
            answers = await asyncio.gather(*(answer(client, *request) for request in REQUESTS))
            stats = engine.stats().scheduler
            assert min(stats.totals.num_preemptions, stats.totals.num_pauses) > 0
            assert stats.blocks.num_used == 0
            assert any(record.num_prefill_tokens == 40 for record in engine.step_log.steps)
            return answers

    check(asyncio.run(run()), alone)


def test_in_a_process_of_its_own_each_request_gets_what_it_gets_alone(alone: list[Any]) -> None:
    engine = RemoteEngine(CROWDED)

    async def opened() -> RemoteEngine:
        await engine.open()
        return engine

    async def run(url: str) -> list[Any]:
        async with httpx.AsyncClient(base_url=url) as client:
            return await asyncio.gather(*(answer(client, *one) for one in reversed(REQUESTS)))

    with live_server_of(opened) as server:
        together = asyncio.run(run(server.url))
        assert engine.stats().scheduler.totals.num_preemptions > 0
    check(together[::-1], alone)
