"""llama.cpp's routes on the real engine with the demo model."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.server.options import ServerOptions

CODE = "def add(first, second):\n    return"
TEXT = "def höhe(x):\n\treturn '日本語 🙂' <|im_start|>"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = open_engine(
        EngineConfig(
            load=LoadConfig(model="demo", device="cpu"),
            cache=CacheConfig(num_blocks=200),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        )
    )
    with live_server(engine, ServerOptions(drain_s=0.0)) as server:
        yield server


def call(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_completion_has_the_bits_of_openais_route(server: LiveServer) -> None:
    shared = {"prompt": CODE, "temperature": 0.8, "top_k": 20, "seed": 5}
    ours = call(server, "/completion", n_predict=16, return_tokens=True, **shared)
    theirs = call(server, "/v1/completions", max_tokens=16, **shared)
    assert ours["content"] == theirs["choices"][0]["text"]
    assert len(ours["tokens"]) == ours["tokens_predicted"] == 16
    assert call(server, "/detokenize", tokens=ours["tokens"])["content"] == ours["content"]
    assert ours["timings"]["predicted_per_second"] > 0


def test_a_gbnf_grammar_shapes_the_answer(server: LiveServer) -> None:
    grammar = 'root ::= item ("," item){1,2}\nitem ::= "x" [0-9]+ # digits\n'
    answer = call(server, "/completion", prompt="a", grammar=grammar, n_predict=40, seed=1)
    assert re.fullmatch(r"x\d+(,x\d+){1,2}", answer["content"])


def test_a_json_schema_shapes_the_answer(server: LiveServer) -> None:
    schema = {"enum": ["one", "two"]}
    answer = call(server, "/completion", prompt="a", json_schema=schema, n_predict=20)
    assert answer["content"] in ('"one"', '"two"')


def test_a_banned_token_is_not_written_and_a_stop_string_is_named(server: LiveServer) -> None:
    fields = {"prompt": CODE, "n_predict": 16, "temperature": 0}
    content = call(server, "/completion", **fields)["content"]
    stop = content[5]
    stopped = call(server, "/completion", **fields, stop=["@@", stop])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", stop)
    assert stopped["content"] == content[: content.index(stop)]
    first = call(server, "/completion", **{**fields, "n_predict": 1}, return_tokens=True)["tokens"]
    banned = call(
        server, "/completion", **{**fields, "n_predict": 1}, logit_bias=[[first[0], False]],
        return_tokens=True,
    )  # fmt: skip
    assert banned["tokens"] != first


def test_a_prompt_that_is_not_to_be_cached_is_computed_again(server: LiveServer) -> None:
    fields = {"prompt": CODE * 6, "n_predict": 1}
    call(server, "/completion", **fields)
    assert call(server, "/completion", **fields)["tokens_cached"] > 16
    answer = call(server, "/completion", **fields, cache_prompt=False)
    assert answer["tokens_cached"] == answer["timings"]["cache_n"] == 0


def test_tokens_become_their_text_again(server: LiveServer) -> None:
    pieces = call(server, "/tokenize", content=TEXT, with_pieces=True)["tokens"]
    ids = [piece["id"] for piece in pieces]
    assert ids == call(server, "/tokenize", prompt=TEXT, add_special_tokens=False)["tokens"]
    assert call(server, "/detokenize", tokens=ids) == {"prompt": TEXT, "content": TEXT}
    spelled = b"".join(
        piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"])
        for piece in pieces
    )
    assert spelled == TEXT.encode()


def test_a_conversation_has_the_tokens_that_the_chat_route_counts(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "What does zip do?"}]
    tokens = call(server, "/tokenize", messages=messages, return_token_strs=True)
    answer = call(server, "/v1/chat/completions", messages=messages, max_tokens=1)
    assert tokens["count"] == len(tokens["token_strs"]) == answer["usage"]["prompt_tokens"]
    text = call(server, "/apply-template", messages=messages)["prompt"]
    assert call(server, "/tokenize", content=text)["tokens"] == tokens["tokens"]


def test_health_is_answered_while_a_long_text_is_tokenised(server: LiveServer) -> None:
    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {"content": "lambda x: x ** 2 + y\n" * 50_000, "with_pieces": True}
            long = asyncio.create_task(client.post("/tokenize", json=body))
            statuses = []
            while not long.done():
                statuses.append((await client.get("/health")).status_code)
            assert (await long).status_code == 200
            return statuses

    statuses = asyncio.run(run())
    assert len(statuses) > 1
    assert set(statuses) == {200}
