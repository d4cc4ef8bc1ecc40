"""Scores, embeddings, beams and deadlines of the demo model: the same in this process, behind a
process of its own, and through the real clients.
"""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from client import CHAT, COMPLETIONS, client_of
from live_server import LiveServer, live_server, until

from quickstep import LLM, BeamSearchParams, Pooling
from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.server.app import create_app
from quickstep.types import FinishReason, Request, SamplingParams

EMBEDDINGS = "/v1/embeddings"
CONFIG = EngineConfig(
    load=LoadConfig(model="demo", device="cpu"),
    cache=CacheConfig(num_blocks=400),
    scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=48),
    seed=5,
)
CODE = "def add(first, second):\n    return"
TEXTS = [CODE, "import itertools\n" * 8, "é"]
QUESTION = [{"role": "user", "content": "What does itertools.chain do?"}]
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 8}
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": TEXTS, "echo": True, "logprobs": 2, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": CODE, "prompt_logprobs": 3, "return_token_ids": True, "n": 2}),
    (COMPLETIONS, {"prompt": CODE, "best_of": 6, "n": 2, "seed": 4, "max_tokens": 8}),
    (COMPLETIONS, {"prompt": TEXTS[:2], "logprobs": 1, "length_penalty": 0.5, **BEAMS}),
    (CHAT, {"messages": QUESTION, "prompt_logprobs": 0, "max_tokens": 4, "temperature": 0}),
    (CHAT, {"messages": QUESTION, "early_stopping": True, **BEAMS}),
    (EMBEDDINGS, {"input": TEXTS, "pooling": "mean"}),
    (EMBEDDINGS, {"input": TEXTS, "pooling": "last", "encoding_format": "base64"}),
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(open_engine(CONFIG)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", block_size=16, max_num_batched_tokens=7) as llm:
        yield llm


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in answer if name not in ("id", "created", "seed")}


async def answers(engine: Engine | RemoteEngine) -> list[dict[str, Any]]:
    """What is said to all requests at once; and the engine keeps deadlines."""
    bodies = [(route, {"seed": 1} | body) for route, body in REQUESTS if route != EMBEDDINGS]
    bodies += [(route, body) for route, body in REQUESTS if route == EMBEDDINGS]
    async with client_of(create_app(engine)) as client:
        posts = [client.post(route, json=body) for route, body in bodies]
        responses = await asyncio.gather(*posts)
        assert await cut(engine) == (FinishReason.DEADLINE, "deadline")
    assert [response.status_code for response in responses] == [200] * len(REQUESTS)
    return [essence(response.json()) for response in responses]


async def cut(engine: Engine | RemoteEngine) -> tuple[FinishReason | None, object]:
    """How a request ends whose deadline comes before its answer can."""
    endless = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
    prompt = tuple(engine.tokenizer.encode(CODE))
    async with engine.stream(Request("", prompt, endless, timeout_s=0.02)) as stream:
        last = [delta async for delta in stream][-1]
    return last.finish_reason, last.stop_reason


def test_both_engines_give_the_same_outputs_and_keep_deadlines() -> None:
    async def run() -> None:
        expected = await answers(open_engine(CONFIG))
        there = RemoteEngine(CONFIG)
        await there.open()
        assert await answers(there) == expected

    asyncio.run(run())


def test_a_mixed_batch_gives_each_request_what_it_gets_alone(server: LiveServer) -> None:
    async def post(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
        fields = body if route == EMBEDDINGS else {"seed": 1, **body}
        response = await client.post(route, json=fields)
        assert response.status_code == 200, response.text
        answer = essence(response.json())
        answer["usage"].pop("prompt_tokens_details", None)  # how much was cached may differ
        return answer

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            alone = [await post(client, *request) for request in REQUESTS]
            together = await asyncio.gather(*(post(client, *one) for one in REQUESTS * 2))
            assert together == alone * 2

    asyncio.run(run())


def test_embeddings_through_openais_client(client: openai.OpenAI, llm: LLM) -> None:
    for pooling in (Pooling.LAST, Pooling.MEAN, Pooling.CLS):
        more = {"pooling": pooling.value}
        plain = client.embeddings.create(
            model="demo", input=TEXTS, encoding_format="float", extra_body=more
        )
        expected = [list(one.outputs.embedding) for one in llm.embed(TEXTS, pooling=pooling)]
        assert [one.embedding for one in plain.data] == expected
        # the client asks for base64 by itself, and decodes it
        packed = client.embeddings.create(model="demo", input=TEXTS, extra_body=more)
        assert [list(one.embedding) for one in packed.data] == expected
    assert [one.index for one in plain.data] == [0, 1, 2]
    num_tokens = sum(len(llm.engine.tokenizer.encode(text)) for text in TEXTS)
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (num_tokens, num_tokens)


def test_the_forms_of_an_input_mean_the_same(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode(CODE)
    forms: list[Any] = [CODE, [CODE], ids, [ids]]
    made = [client.embeddings.create(model="demo", input=form).data for form in forms]
    assert all(
        [list(one.embedding) for one in data] == [list(made[0][0].embedding)] for data in made
    )
    last = client.embeddings.create(model="demo", input=CODE, extra_body={"pooling": "last"})
    assert last.data[0].embedding == made[0][0].embedding


def test_fewer_dimensions_are_the_first_ones_at_length_one(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model="demo", input=CODE).data[0].embedding
    short = client.embeddings.create(model="demo", input=CODE, dimensions=8).data[0].embedding
    length = math.sqrt(math.fsum(x * x for x in whole[:8]))
    assert list(short) == pytest.approx([x / length for x in whole[:8]], abs=1e-6)
    same = client.embeddings.create(model="demo", input=CODE, dimensions=len(whole))
    assert same.data[0].embedding == whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [4096]}, "input"),
        ({"input": ["a"] * 257}, "input"),
        ({"input": "a " * 5000}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 257}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": "a", "user": "x" * 600}, "user"),
        ({"input": "a", "timeout_s": 0}, "timeout_s"),
        ({}, "input"),
    ],
)
def test_a_wrong_embedding_request_names_its_field(
    server: LiveServer, fields: dict[str, Any], param: str
) -> None:
    response = httpx.post(f"{server.url}{EMBEDDINGS}", json=fields, timeout=60)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param


def test_base64_is_little_endian_float32(server: LiveServer) -> None:
    url = f"{server.url}{EMBEDDINGS}"
    text = httpx.post(url, json={"input": CODE, "encoding_format": "base64"}, timeout=60).json()
    plain = httpx.post(url, json={"input": CODE}, timeout=60).json()
    packed = base64.b64decode(text["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(packed) // 4}f", packed)) == plain["data"][0]["embedding"]


def test_timeout_s_gives_what_there_is_and_says_why(server: LiveServer) -> None:
    fields = {"prompt": CODE, "ignore_eos": True, "max_tokens": 2000, "timeout_s": 0.05}
    for more in ({}, {"use_beam_search": True, "n": 2}):
        (choice, *_) = complete(server, **fields, **more)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("timeout", "deadline")


def complete(server: LiveServer, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}{COMPLETIONS}", json=fields, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_streamed_echo_is_the_whole_one(server: LiveServer, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"prompt": TEXTS[1], "echo": True, "logprobs": 2, "n": 2}
    fields |= {"max_tokens": 6, "seed": 8}
    whole = complete(server, **fields)["choices"]
    joined = [{"text": "", "tokens": [], "token_logprobs": [], "text_offset": []} for _ in whole]
    for chunk in client.completions.create(model="demo", stream=True, **fields):
        (word,) = chunk.choices
        joined[word.index]["text"] += word.text
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined[word.index][name] += getattr(word.logprobs, name, None) or []
    for choice, streamed in zip(whole, joined, strict=True):
        assert streamed.pop("text") == choice["text"]
        assert streamed == {name: choice["logprobs"][name] for name in streamed}
        assert choice["text"].startswith(TEXTS[1])
        offsets = choice["logprobs"]["text_offset"]
        pieces = [choice["text"][a:b] for a, b in pairwise(offsets)]
        assert pieces == choice["logprobs"]["tokens"][:-1]


def test_an_echoed_scoring_is_the_generations_own(server: LiveServer) -> None:
    """What evaluation harnesses do: the logprobs of a continuation, by sending it as a prompt."""
    drawn = complete(
        server, prompt=CODE, logprobs=1, max_tokens=6, temperature=0, return_token_ids=True
    )["choices"][0]
    ids = [*drawn["prompt_token_ids"], *drawn["token_ids"]]
    scored = complete(server, prompt=ids, echo=True, logprobs=1, max_tokens=0)["choices"][0]
    num_prompt = len(drawn["prompt_token_ids"])
    assert scored["logprobs"]["token_logprobs"][num_prompt:] == drawn["logprobs"]["token_logprobs"]
    assert scored["logprobs"]["token_logprobs"][0] is None


def test_the_best_are_those_with_the_highest_mean(server: LiveServer) -> None:
    fields = {"prompt": CODE, "seed": 9, "temperature": 1.3, "max_tokens": 9, "logprobs": 0}
    drawn = complete(server, n=6, **fields)["choices"]

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return math.fsum(values) / len(values)

    best = complete(server, n=2, best_of=6, **fields)
    expected = sorted(drawn, key=lambda choice: -mean(choice))[:2]
    assert [one["text"] for one in best["choices"]] == [one["text"] for one in expected]
    assert [one["seed"] for one in best["choices"]] == [one["seed"] for one in expected]
    num_tokens = sum(len(one["logprobs"]["tokens"]) for one in drawn)
    assert best["usage"]["completion_tokens"] == num_tokens


def test_a_served_search_is_the_librarys(server: LiveServer, llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=10, length_penalty=0.5)
    [found] = llm.beam_search(CODE, params)
    fields = {**BEAMS, "n": 3, "best_of": 4, "max_tokens": 10, "length_penalty": 0.5}
    choices = complete(server, prompt=CODE, logprobs=1, return_token_ids=True, **fields)["choices"]
    assert [tuple(one["token_ids"]) for one in choices] == [
        sequence.output_token_ids for sequence in found.sequences[:3]
    ]
    for choice, one in zip(choices, found.sequences, strict=False):
        assert f"{CODE}{choice['text']}" == one.text
        assert choice["finish_reason"] == one.finish_reason
        total = math.fsum(choice["logprobs"]["token_logprobs"])
        assert total == pytest.approx(one.cum_logprob, abs=1e-9)


def test_a_search_that_the_client_leaves_ends_at_once(server: LiveServer) -> None:
    fields = {"prompt": CODE, **BEAMS, "max_tokens": 2000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{COMPLETIONS}", json=fields, timeout=0.3)
    until(lambda: httpx.get(f"{server.url}/health").json()["num_used_blocks"] == 0)
    assert complete(server, prompt=CODE, max_tokens=2)["choices"]
