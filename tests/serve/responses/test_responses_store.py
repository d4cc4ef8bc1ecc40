"""Stored responses of `/v1/responses`: continued, read, listed, deleted, bounded, private."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from client import client_of
from fake_engine import FakeEngine
from route_calls import RESPONSES, events, saying

from quickstep.server.app import create_app
from quickstep.server.fields.sampling_fields import TextFormat
from quickstep.server.options import ServerOptions
from quickstep.server.responses.response_types import (
    ReasoningSettings,
    ResponseInputDetails,
    ResponseObject,
    ResponseOutputDetails,
    ResponseUsage,
    TextSettings,
)
from quickstep.server.responses.store import ResponseStore, StoredResponse
from quickstep.server.usage.api_keys import ApiKeys
from quickstep.types import FinishReason

TOOL = {"type": "function", "name": "get_weather", "parameters": {}, "strict": None}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def with_client(
    steps: Callable[[httpx.AsyncClient], Any],
    engine: FakeEngine | None = None,
    options: ServerOptions | None = None,
) -> Any:
    async def run() -> Any:
        async with client_of(create_app(engine or FakeEngine(), options)) as client:
            return await steps(client)

    return asyncio.run(run())


async def respond(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(RESPONSES, json={"input": "hi", **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_conversation_continues_without_its_instructions() -> None:
    engine = FakeEngine(script=saying("Yes."))

    async def steps(client: httpx.AsyncClient) -> None:
        first = await respond(client, instructions="Be brief.")
        second = await respond(client, input="And?", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        third = await respond(
            client, input="So?", previous_response_id=second["id"], instructions="Be long."
        )
        assert third["output"][0]["content"][0]["text"] == "Yes."

    with_client(steps, engine)
    prompts = [bytes(item.prompt).decode() for item in engine.submitted]
    assert prompts[1] == "user: hi\nassistant: Yes.\nuser: And?\nassistant:"
    assert prompts[2].startswith("system: Be long.\nuser: hi\nassistant: Yes.\nuser: And?\n")


def test_a_reference_is_the_stored_item() -> None:
    """Of the output and of the input, with reasoning and calls; of the caller's own items only."""
    engine = FakeEngine(script=saying("Yes."))
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "20"}
    thought = {"type": "reasoning", "summary": [], "content": []}
    items = [{"role": "user", "content": "hi"}, thought, call, output]

    async def steps(client: httpx.AsyncClient) -> None:
        first = await respond(client, input=items)
        listed = (await client.get(f"{RESPONSES}/{first['id']}/input_items?order=asc")).json()
        known = [*listed["data"], *first["output"]]
        refs = [{"type": "item_reference", "id": each["id"]} for each in known]
        new = {"role": "user", "content": "And?"}
        await respond(client, input=[*refs, new])
        await respond(client, input=[*items, *first["output"], new])
        unknown = {"type": "item_reference", "id": "msg_other"}
        refused = await client.post(RESPONSES, json={"input": [new, unknown]})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "input[1].id"

    with_client(steps, engine)
    prompts = [bytes(item.prompt).decode() for item in engine.submitted]
    assert prompts[1] == prompts[2]
    assert "Yes." in prompts[1]


def test_a_call_is_answered_in_the_next_response() -> None:
    engine = FakeEngine(script=saying(CALL))

    async def steps(client: httpx.AsyncClient) -> None:
        first = await respond(client, tools=[TOOL])
        (call,) = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "20"}
        await respond(client, input=[result], tools=[TOOL], previous_response_id=first["id"])

    with_client(steps, engine)
    prompt = bytes(engine.submitted[1].prompt).decode()
    assert "tool: 20" in prompt
    assert "'name': 'get_weather'" in prompt


def test_a_stored_response_is_the_one_that_was_answered() -> None:
    async def steps(client: httpx.AsyncClient) -> None:
        answer = await respond(client, metadata={"a": "b"})
        response = await client.get(f"{RESPONSES}/{answer['id']}")
        assert (response.status_code, response.json()) == (200, answer)
        gone = await client.delete(f"{RESPONSES}/{answer['id']}")
        assert gone.json() == {"id": answer["id"], "object": "response", "deleted": True}
        for call in (client.get, client.delete):
            missing = await call(f"{RESPONSES}/{answer['id']}")
            assert missing.status_code == 404
            assert missing.json()["error"]["param"] == "response_id"
        again = await client.post(
            RESPONSES, json={"input": "x", "previous_response_id": answer["id"]}
        )
        assert again.status_code == 400
        assert again.json()["error"]["code"] == "previous_response_not_found"

    with_client(steps)


def test_a_streamed_response_is_stored_before_its_last_event() -> None:
    async def steps(client: httpx.AsyncClient) -> None:
        streamed = await client.post(RESPONSES, json={"input": "hi", "stream": True})
        name, data = events(streamed.text)[-1]
        assert name == "response.completed"
        response = json.loads(data)["response"]
        assert (await client.get(f"{RESPONSES}/{response['id']}")).json() == response

    with_client(steps)


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_is_stored_of_a_response_that_failed_or_is_not_to_be_stored(stream: bool) -> None:
    engine = FakeEngine()
    fields = {"input": "hi", "stream": stream}

    async def steps(client: httpx.AsyncClient) -> list[str]:
        unstored = await client.post(RESPONSES, json={**fields, "store": False})
        engine.script = saying("x", reason=FinishReason.ERROR, error="the logits are NaN")
        failed = await client.post(RESPONSES, json=fields)
        ids = []
        if stream:
            for answer in (unstored, failed):
                ids.append(json.loads(events(answer.text)[-1][1])["response"]["id"])
        else:
            ids.append(unstored.json()["id"])
        return [(await client.get(f"{RESPONSES}/{one}")).status_code for one in ids]

    assert set(with_client(steps, engine)) == {404}


def test_a_failed_stream_ends_with_the_failed_response() -> None:
    engine = FakeEngine(script=saying("Hello", reason=FinishReason.ERROR, error="NaN logits"))

    async def steps(client: httpx.AsyncClient) -> str:
        return (await client.post(RESPONSES, json={"input": "hi", "stream": True})).text

    name, data = events(with_client(steps, engine))[-1]
    response = json.loads(data)["response"]
    assert name == "response.failed"
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "NaN logits"}
    (item,) = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hello")


def test_no_key_reads_a_response_of_another() -> None:
    options = ServerOptions(api_keys=ApiKeys(["ann=key-of-ann", "bob=key-of-bob"]))
    ann, bob = ({"x-api-key": f"key-of-{name}"} for name in ("ann", "bob"))

    async def steps(client: httpx.AsyncClient) -> None:
        first = await client.post(RESPONSES, json={"input": "hi"}, headers=ann)
        assert first.status_code == 200, first.text
        place = f"{RESPONSES}/{first.json()['id']}"
        assert (await client.get(place, headers=ann)).status_code == 200
        assert (await client.get(place, headers=bob)).status_code == 404
        assert (await client.get(f"{place}/input_items", headers=bob)).status_code == 404
        assert (await client.delete(place, headers=bob)).status_code == 404
        body = {"input": "x", "previous_response_id": first.json()["id"]}
        assert (await client.post(RESPONSES, json=body, headers=bob)).status_code == 400
        assert (await client.post(RESPONSES, json=body, headers=ann)).status_code == 200

    with_client(steps, options=options)


def test_input_items_come_in_pages_the_last_first() -> None:
    turns = [{"role": "user", "content": str(number)} for number in range(5)]

    async def steps(client: httpx.AsyncClient) -> None:
        answer = await respond(client, input=turns)
        place = f"{RESPONSES}/{answer['id']}/input_items"

        async def page(**query: Any) -> dict[str, Any]:
            response = await client.get(place, params=query)
            assert response.status_code == 200, response.text
            listed: dict[str, Any] = response.json()
            return listed

        def texts(listed: dict[str, Any]) -> str:
            return "".join(item["content"][0]["text"] for item in listed["data"])

        assert texts(await page()) == "43210"
        first = await page(limit=2, order="asc")
        assert (texts(first), first["has_more"]) == ("01", True)
        rest = await page(order="asc", after=first["last_id"])
        assert (texts(rest), rest["has_more"]) == ("234", False)
        for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "x"}, {"x": "y"}):
            wrong = await client.get(place, params=query)
            assert wrong.status_code == 400
            assert wrong.json()["error"]["param"] == next(iter(query))

    with_client(steps)


def stored(name: str, text: str = "") -> StoredResponse:
    response = ResponseObject(
        id=name,
        created_at=0,
        completed_at=0,
        status="completed",
        error=None,
        incomplete_details=None,
        instructions=None,
        max_output_tokens=None,
        max_tool_calls=None,
        metadata={},
        model="m",
        output=[],
        parallel_tool_calls=True,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        previous_response_id=None,
        prompt_cache_key=None,
        reasoning=ReasoningSettings(None),
        safety_identifier=None,
        store=True,
        temperature=1.0,
        text=TextSettings(TextFormat()),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        usage=ResponseUsage(
            input_tokens=0,
            input_tokens_details=ResponseInputDetails(0),
            output_tokens=0,
            output_tokens_details=ResponseOutputDetails(0),
            total_tokens=0,
        ),
        user=None,
        seed=0,
        system_fingerprint="",
    )
    return StoredResponse(response, ({"role": "user", "content": text},), ())


def test_the_operator_bounds_what_is_stored() -> None:
    async def steps(client: httpx.AsyncClient) -> list[int]:
        ids = [(await respond(client))["id"] for _ in range(2)]
        return [(await client.get(f"{RESPONSES}/{one}")).status_code for one in ids]

    assert with_client(steps, options=ServerOptions(stored_responses=1)) == [404, 200]
    assert with_client(steps, options=ServerOptions(stored_response_bytes=64)) == [404, 404]
    assert with_client(steps) == [200, 200]


def test_the_least_used_response_goes_first() -> None:
    store = ResponseStore(max_responses=2)
    store.put("", stored("a"))
    store.put("", stored("b"))
    assert store.get("", "a") is not None
    store.put("", stored("c"))
    assert [name for name in "abc" if store.get("", name)] == ["a", "c"]


def test_bytes_are_bounded_and_come_back() -> None:
    store = ResponseStore()
    store.put("", stored("a"))
    size = store.num_bytes
    store = ResponseStore(max_bytes=size * 2)
    for name in "abc":
        store.put("", stored(name))
    assert (len(store), store.num_bytes) == (2, size * 2)
    store.put("", stored("d", "x" * 10_000))  # larger than everything
    assert len(store) == 2
    assert store.delete("", "c")
    assert not store.delete("", "c")
    assert not store.delete("another", "b")
    assert store.delete("", "b")
    assert (len(store), store.num_bytes) == (0, 0)


def test_one_keys_responses_evict_no_response_of_a_key_with_fewer() -> None:
    store = ResponseStore(max_responses=3)
    store.put("ann", stored("first"))
    for number in range(5):
        store.put("bob", stored(f"bobs-{number}"))
    assert store.get("ann", "first") is not None
    assert [store.get("bob", f"bobs-{number}") is not None for number in range(5)] == [
        *(False, False, False),
        *(True, True),
    ]
    size = store.num_bytes // 3
    small = ResponseStore(max_bytes=size * 3 + 20)
    small.put("ann", stored("first"))
    for number in range(5):
        small.put("bob", stored(f"bobs-{number}"))
    assert small.get("ann", "first") is not None
