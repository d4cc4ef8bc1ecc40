"""A repeated POST with its idempotency key gets the first one's answer, generated once."""

import asyncio
from typing import Any

import pytest
from client import CHAT, MESSAGES
from cut_connection import Steps, cut_call
from fake_engine import Script
from kept_world import ANN, BOB, KEYS, World, in_world
from test_conversation_streams import BODIES

from quickstep.errors import EngineError
from quickstep.server.options import KeptStreamOptions, ServerOptions
from quickstep.server.usage.api_keys import ApiKey, ApiKeys
from quickstep.server.usage.limits import KeyLimits
from quickstep.types import FinishReason

KEY = {"idempotency-key": "k1"}
BODY = {"messages": MESSAGES}


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_repeat_gets_the_same_bytes(path: str, body: dict[str, Any]) -> None:
    async def steps(world: World) -> None:
        first = await world.client.post(path, json=body, headers=KEY)
        assert first.status_code == 200
        assert "idempotent-replayed" not in first.headers
        again = await world.client.post(path, json=body, headers=KEY)
        assert again.content == first.content
        assert again.headers["idempotent-replayed"] == "true"
        assert again.headers["content-type"] == first.headers["content-type"]
        assert len(world.engine.submitted) == 1
        other = await world.client.post(path, json=body, headers={"idempotency-key": "k2"})
        assert other.status_code == 200
        assert len(world.engine.submitted) == 2

    in_world(steps)


@pytest.mark.parametrize("stream", [True, False])
def test_a_repeat_of_a_running_request_follows_it(stream: bool) -> None:
    """Also where the first client has left: it may come back with its key."""
    gate = Steps()

    async def steps(world: World) -> None:
        body = {**BODY, "stream": stream}
        left = asyncio.Event()
        first = asyncio.create_task(cut_call(world.app, "POST", CHAT, body, KEY))
        lost = asyncio.create_task(cut_call(world.app, "POST", CHAT, body, KEY, leave=left))
        gate.let(2)
        while world.engine.num_steps < 2:
            await asyncio.sleep(0)
        left.set()
        await lost
        again = asyncio.create_task(cut_call(world.app, "POST", CHAT, body, KEY))
        await asyncio.sleep(0)
        gate.set()
        found = [await first, await again]
        assert found[0].is_complete
        assert found[0].body == found[1].body
        assert b"test" in found[0].body
        assert len(world.engine.submitted) == 1

    in_world(steps, Script(gate=gate))  # type: ignore[arg-type]


def test_a_key_is_for_one_request() -> None:
    async def steps(world: World) -> None:
        await world.client.post(CHAT, json=BODY, headers=KEY)
        for path, body in ((CHAT, {**BODY, "seed": 1}), ("/chat/completions", BODY)):
            refused = await world.client.post(path, json=body, headers=KEY)
            assert refused.status_code == 422
            error = refused.json()["error"]
            assert error["code"] == "idempotency_key_reused"
            assert error["param"] == "idempotency-key"
        assert len(world.engine.submitted) == 1

    in_world(steps)


def test_each_api_key_has_its_own() -> None:
    async def steps(world: World) -> None:
        ids = []
        for key in (ANN, BOB, ANN):
            answer = await world.client.post(CHAT, json=BODY, headers={**KEY, **key})
            ids.append(answer.json()["id"])
        assert ids[0] == ids[2] != ids[1]

    in_world(steps, options=ServerOptions(api_keys=KEYS))


def test_errors_are_not_repeated() -> None:
    """Before the response began, or in it: nothing was answered."""

    async def steps(world: World) -> None:
        wrong = await world.client.post(CHAT, json={**BODY, "n": -1}, headers=KEY)
        assert wrong.status_code == 400
        world.engine.refusals = [EngineError("the engine restarts")]
        refused = await world.client.post(CHAT, json=BODY, headers=KEY)
        assert refused.status_code == 503
        world.engine.script = Script(FinishReason.ERROR, error="the logits are NaN")
        for stream in (False, True):
            failed = await world.client.post(CHAT, json={**BODY, "stream": stream}, headers=KEY)
            assert "NaN" in failed.text
        world.engine.script = Script()
        good = await world.client.post(CHAT, json=BODY, headers=KEY)
        assert good.status_code == 200
        again = await world.client.post(CHAT, json=BODY, headers=KEY)
        assert again.content == good.content

    in_world(steps)


def test_headers_of_the_first_answer_come_with_the_repeat() -> None:
    async def steps(world: World) -> None:
        body = {**BODY, "nonsense": 1}
        for _ in range(2):
            answer = await world.client.post(CHAT, json=body, headers=KEY)
            assert answer.headers["x-quickstep-ignored"] == "nonsense"

    in_world(steps)


def test_an_answer_that_is_too_long_is_not_repeated() -> None:
    options = ServerOptions(kept_streams=KeptStreamOptions(stream_bytes=64 * 1024))

    async def steps(world: World) -> None:
        body = {**BODY, "stream": True}
        first = await world.client.post(CHAT, json=body, headers=KEY)
        assert first.text.endswith("data: [DONE]\n\n")
        lost = await world.client.post(CHAT, json=body, headers=KEY)
        assert lost.status_code == 409
        assert lost.json()["error"]["code"] == "idempotent_answer_lost"
        assert len(world.engine.submitted) == 1

    in_world(steps, Script(words=("x" * 10_000,) * 20), options)


def test_it_goes_with_a_conversation_and_with_the_background() -> None:
    async def steps(world: World) -> None:
        both = {**KEY, "x-conversation-id": "c"}
        first = await world.client.post(CHAT, json=BODY, headers=both)
        again = await world.client.post(CHAT, json=BODY, headers=both)
        assert again.content == first.content
        assert (await world.call("GET", "/v1/stream/c")).content == first.content
        header = {"idempotency-key": "k2"}
        body = {"input": "hi", "background": True}
        ids = {
            (await world.client.post("/v1/responses", json=body, headers=header)).json()["id"]
            for _ in range(2)
        }
        assert len(ids) == 1
        assert len(world.engine.submitted) == 2

    in_world(steps)


def test_a_header_that_comes_twice_is_400() -> None:
    async def steps(world: World) -> None:
        headers = [("idempotency-key", "a"), ("idempotency-key", "b")]
        refused = await world.client.post(CHAT, json=BODY, headers=headers)
        assert refused.status_code == 400
        assert "twice" in refused.text

    in_world(steps)


def test_two_repeats_that_come_together_are_one_request() -> None:
    """Also while the conversation's earlier request is ended for them."""

    async def steps(world: World) -> None:
        conversation = {"x-conversation-id": "c"}
        earlier = asyncio.create_task(cut_call(world.app, "POST", CHAT, BODY, conversation))
        while world.engine.num_steps < 2:
            await asyncio.sleep(0)
        world.engine.script = Script()
        both = {**KEY, **conversation}
        first, second = await asyncio.gather(
            *(cut_call(world.app, "POST", CHAT, BODY, both) for _ in range(2))
        )
        assert first.body == second.body
        assert first.status == 200
        assert len(world.engine.submitted) == 2
        assert (await earlier).status == 409

    in_world(steps, Script(endless=True))


@pytest.mark.parametrize("header", ["idempotency-key", "x-conversation-id"])
def test_it_counts_once_for_the_limits_of_its_key(header: str) -> None:
    """And what is read again counts for none."""
    limited = ApiKeys([ApiKey("ann", "a", limits=KeyLimits(requests_per_minute=1))])

    async def steps(world: World) -> None:
        headers = {**ANN, header: "k"}
        first = await world.client.post(CHAT, json=BODY, headers=headers)
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        if header == "idempotency-key":
            again = await world.client.post(CHAT, json=BODY, headers=headers)
        else:
            again = await world.call("GET", "/v1/stream/k", ANN)
        assert again.content == first.content
        other = await world.client.post(CHAT, json=BODY, headers={**ANN, header: "other"})
        assert other.status_code == 429
        assert len(world.engine.submitted) == 1

    in_world(steps, options=ServerOptions(api_keys=limited))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/invocations", BODY),
        ("/api/embed", {"model": "fake", "input": "a"}),
    ],
)
def test_answers_in_one_piece_are_repeated_too(path: str, body: dict[str, Any]) -> None:
    async def steps(world: World) -> None:
        first, again = [await world.client.post(path, json=body, headers=KEY) for _ in "ab"]
        assert first.status_code == 200
        num_submitted = len(world.engine.submitted)
        assert again.content == first.content
        assert again.headers["idempotent-replayed"] == "true"
        assert len(world.engine.submitted) == num_submitted

    in_world(steps)
