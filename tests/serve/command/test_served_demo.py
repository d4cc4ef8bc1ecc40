"""The real engine with the bundled demo model behind a socket."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, connect, live_server, until

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine

CODE = "def add(first, second):\n    return"
QUESTION = [{"role": "user", "content": "What does itertools.chain do?"}]
NUM_BLOCKS = 400


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(
        EngineConfig(
            load=LoadConfig(model="demo", device="cpu"),
            cache=CacheConfig(num_blocks=NUM_BLOCKS),
            scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
        )
    )


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[LiveServer]:
    with live_server(engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(server: LiveServer, path: str = "completions", **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": 12, "temperature": 0, "seed": 7, **fields}
    response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def used_blocks(server: LiveServer) -> int:
    return int(httpx.get(f"{server.url}/health").json()["num_used_blocks"])


def test_chat_answers_and_its_stream_says_the_same(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "demo",
        "messages": QUESTION,
        "max_completion_tokens": 40,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**fields)
    parts = list(client.chat.completions.create(**fields, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert whole.choices[0].message.content
    assert text == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_repeated_prompt_is_cached_and_gives_the_same_answer(server: LiveServer) -> None:
    prompt = "import itertools\n\n\n" + "def chain(*iterables):\n    pass\n" * 4
    cold = complete(server, prompt=prompt, logprobs=2)
    warm = complete(server, prompt=prompt, logprobs=2)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert warm["choices"] == cold["choices"]


def test_every_choices_seed_reproduces_it_alone(server: LiveServer) -> None:
    sampled = complete(server, prompt=CODE, n=3, temperature=0.9)
    assert len({choice["text"] for choice in sampled["choices"]}) > 1
    for choice in sampled["choices"]:
        alone = complete(server, prompt=CODE, temperature=0.9, seed=choice["seed"])
        assert alone["choices"][0]["text"] == choice["text"]


def test_token_ids_and_text_are_the_same_prompt(server: LiveServer, engine: Engine) -> None:
    ids = engine.tokenizer.encode(CODE)
    assert complete(server, prompt=ids)["choices"] == complete(server, prompt=CODE)["choices"]


def test_a_stop_string_cuts_the_text(server: LiveServer) -> None:
    text = complete(server, prompt=CODE)["choices"][0]["text"]
    stop = text[len(text) // 2]
    (choice,) = complete(server, prompt=CODE, stop=[stop])["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a " * 20_000}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"prompt": "a", "logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
    ],
)
def test_what_the_model_cannot_take_is_400(
    server: LiveServer, fields: dict[str, Any], param: str
) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json=fields, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_200_streams_with_a_third_leaving_at_random_leave_no_block_in_use(
    server: LiveServer,
) -> None:
    rng = random.Random(1)
    jobs = [
        (f"def function_{number % 23}(", rng.randrange(0, 1500) if rng.random() < 0.3 else None)
        for number in range(200)
    ]
    solo = complete(server, prompt=jobs[0][0])["choices"][0]["text"]

    async def stream_once(prompt: str, leave_after: int | None) -> bytes | None:
        fields = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True}
        reader, writer = await connect(server, fields)
        try:
            if leave_after is None:
                return await reader.readuntil(b"data: [DONE]\n\n")
            await reader.read(leave_after)
            return None
        finally:
            writer.transport.abort()

    async def run() -> list[bytes | None]:
        return await asyncio.gather(*(stream_once(*job) for job in jobs))

    answers = asyncio.run(asyncio.wait_for(run(), 240))
    until(lambda: used_blocks(server) == 0)
    stayed = [answer for answer in answers if answer is not None]
    assert len(stayed) > 100
    assert all(answer.count(b'"finish_reason":"') == 1 for answer in stayed)
    if answers[0] is not None:
        assert streamed_text(answers[0]) == solo


def streamed_text(answer: bytes) -> str:
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return "".join(
        choice["text"]
        for line in lines
        for choice in json.loads(line.removeprefix(b"data: "))["choices"]
    )


def test_metrics_describe_the_engine(server: LiveServer) -> None:
    complete(server, prompt=CODE)
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")
    )
    model = '{engine="0",model_name="demo"}'
    assert float(values[f"quickstep:engine_steps_total{model}"]) > 0
    assert float(values[f"quickstep:engine_busy_seconds_total{model}"]) > 0
    assert float(values[f"quickstep:generation_tokens_total{model}"]) > 0
    assert float(values[f"quickstep:num_requests_running{model}"]) == 0


def test_a_long_prompt_is_tokenised_while_health_is_answered(server: LiveServer) -> None:
    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            body = {"prompt": "lambda x: x ** 2 + y\n" * 20_000}
            long = asyncio.create_task(client.post("/v1/completions", json=body))
            statuses = []
            while not long.done():
                statuses.append((await client.get("/health")).status_code)
            assert (await long).status_code == 400
            return statuses

    statuses = asyncio.run(run())
    assert len(statuses) > 1
    assert set(statuses) == {200}


def test_a_chat_with_tools_is_answered_and_its_stream_says_the_same(client: openai.OpenAI) -> None:
    """What the small model makes of the tools is its own business."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    call = {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    fields: dict[str, Any] = {
        "model": "demo",
        "messages": [
            *QUESTION,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
        ],
        "max_completion_tokens": 40,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert (streamed.message.content or "") == (whole.message.content or "")
    assert streamed.finish_reason == whole.finish_reason
    calls = [choice.message.tool_calls or [] for choice in (whole, streamed)]
    names = [[(one.function.name, one.function.arguments) for one in mine] for mine in calls]
    assert names[0] == names[1]
    assert whole.message.content or names[0]
